/* SPDX-License-Identifier: Apache-2.0
 *
 * A file descriptor for other processes of this user, by a name that fits into a memory handle.
 */
#ifndef FLYCOMM_FD_SOCKET_H
#define FLYCOMM_FD_SOCKET_H

enum { FC_FD_NAME_BYTES = 64 };

typedef struct fc_fd_offer fc_fd_offer;

/* Offers `fd`, and owns it from now on, also if it fails (NULL, with the error set). */
fc_fd_offer *fc_fd_offer_start(int fd, char name[FC_FD_NAME_BYTES]);

/* Takes the offer back: when this returns, its thread has ended, and its name and its descriptors are gone. */
void fc_fd_offer_stop(fc_fd_offer *offer);

/* A descriptor of one's own for what is offered under `name`, or -1 with the error set. Waits 10 seconds at most. */
int fc_fd_receive(const char name[FC_FD_NAME_BYTES]);

#endif
