/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for AMD's HIP runtime, for tests on machines without an AMD GPU: what its files share.
 *
 * Device memory is POSIX shared memory, so that an IPC handle really opens in another process. A code object is read as
 * the real runtime reads it (name, argument layout, limits), and a launch of it runs the host build of the same kernel,
 * on a thread of its stream, as a GPU would: the launch returns at once.
 *
 *   STANDIN_HIP_DEVICES=2           how many devices there are (default 8)
 *   STANDIN_HIP_ARCH=gfx942         what they are; the code object of another chip does not load
 *   STANDIN_HIP_KERNELS=folder      host builds, <hash of the code object>.so (host_builds.py)
 *   STANDIN_HIP_HOST=file           libflycomm_shim.so, whose host runtime runs them
 *   STANDIN_HIP_FAIL=function:n     its n-th call since this was set fails (function:n:code; n = 0: every call)
 *   STANDIN_HIP_NO_PEER=1           no device may use another's memory
 *   STANDIN_HIP_REPORT=folder       at exit, what was not given back is written to <folder>/<pid>
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801
};

enum { MAX_DEVICES = 16, MAX_ARGUMENTS = 64 };

/* Counted; what is not 0 at exit was leaked. */
struct counts {
    int allocated, opened, mapped, modules, streams;
    int launches; /* that ran to their end; only for tests to look at */
};
extern struct counts standin_counts;
extern pthread_mutex_t standin_lock; /* of the counts, the regions and the peers */

/* standin_hip.c */
int standin_fails(const char *function); /* the code to answer with now, or 0 */
int standin_devices(void);
const char *standin_arch(void);
int standin_current(void);
void standin_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *standin_host(const char *name); /* a function of the host runtime; ends the process if there is none */

/* standin_stream.c */
struct launch {
    struct launch *next;
    void (*run)(struct launch *launch); /* leaves fc_host_take_error */
};
void standin_enqueue(void *stream, struct launch *launch);
int standin_stream_device(void *stream);
int standin_drain(void *stream); /* waits; the code of what failed in it, once */

#define HIP __attribute__((visibility("default")))
#define BEGIN                                                                                                          \
    int failure = standin_fails(__func__);                                                                             \
    if (failure != 0)                                                                                                  \
        return failure

#endif
