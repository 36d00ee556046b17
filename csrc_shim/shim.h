/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of this library share and nobody outside sees.
 */
#ifndef FLYCOMM_SHIM_INTERNAL_H
#define FLYCOMM_SHIM_INTERNAL_H

#include <stdbool.h>

#include "flycomm_shim.h"

/* The first byte of a handle says how its memory is shared: another way is another kind. */
enum fc_handle_kind { FC_HANDLE_SHM = 1, FC_HANDLE_CUDA_IPC = 2, FC_HANDLE_HIP_IPC = 3, FC_HANDLE_CUDA_FD = 4 };

/* Sets this thread's fc_last_error() and returns -1. One sentence: value, limit, remedy. */
int fc_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* names.c: names in /dev/shm, of this user's processes, and locked by the process that owns them. */
#define FC_NAMES_FOLDER "/dev/shm"
#define FC_SOCKET "fd" /* the one thing in a name that is a folder */
int fc_name_make(char *name, size_t bytes); /* a new one, of less than 64 bytes */
bool fc_name_valid(const char *name, size_t bytes);
int fc_name_lock(int file); /* 0, or -1 with errno set */
void fc_names_sweep(void);  /* removes the names of this user's dead processes */

/* host_device.c */
int fc_host_device_query(fc_device_info *info);

/* ipc_host.c: POSIX shared memory. */
int fc_host_alloc(size_t bytes, uint64_t *address);
int fc_host_free(uint64_t address);
int fc_host_export(uint64_t address, uint8_t handle[FC_HANDLE_BYTES], size_t *length);
int fc_host_export_done(uint64_t address);
int fc_host_open(const uint8_t *handle, size_t length, uint64_t *address);
int fc_host_close(uint64_t address);
int fc_host_alloc_mapped(size_t bytes, void **host, uint64_t *address);

#endif
