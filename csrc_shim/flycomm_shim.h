/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole C interface of libflycomm_shim: no Python, no torch, and no driver linked in it. Drivers are opened at
 * run time, the copy that the process already has first.
 *
 * Every function that returns int returns 0, or a negative number with a sentence in fc_last_error() (per thread).
 * Addresses are device virtual addresses as integers; a device is the ordinal that the target's driver counts.
 */
#ifndef FLYCOMM_SHIM_H
#define FLYCOMM_SHIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_API __attribute__((visibility("default")))

/* Raised with every change of this page; flycomm/_shim.py names the one it was written for. */
#define FC_VERSION "2"

enum fc_target { FC_HOST = 0, FC_CUDA = 1, FC_HIP = 2 };
enum { FC_HANDLE_BYTES = 128 };

/* How memory of a GPU reaches other processes: by the driver's IPC, by a file descriptor (CUDA has both), or by a
 * descriptor where the driver refuses IPC. A handle says which it was. The host target has one way of its own. */
enum fc_sharing { FC_SHARING_AUTO = 0, FC_SHARING_IPC = 1, FC_SHARING_FD = 2 };

typedef struct fc_device_info {
    char name[128];
    char arch[32];          /* "x86-64", "sm_90", "gfx942" */
    uint32_t warp_size;     /* threads */
    uint32_t compute_units; /* multiprocessors, compute units, or cores */
    uint64_t memory_bytes;
    uint64_t clock_hz;      /* ticks a second of the clock that kernels read */
} fc_device_info;

/* ---- the library */
FC_API const char *fc_last_error(void);
FC_API const char *fc_version(void);

/* ---- drivers and devices */
FC_API int fc_driver_open(int target);                      /* idempotent; what is missing is in fc_last_error() */
FC_API int fc_device_count(int target, int *count);
FC_API int fc_device_query(int target, int device, fc_device_info *info);
FC_API int fc_synchronize(int target, int device);

/* ---- memory that peers may map (PROTOCOLS, "Memory") */
FC_API int fc_alloc(int target, int device, size_t bytes, int sharing, uint64_t *address); /* 4096-aligned, zeroed */
FC_API int fc_free(int target, int device, uint64_t address);
FC_API int fc_export(int target, int device, uint64_t address, uint8_t handle[FC_HANDLE_BYTES], size_t *length);
FC_API int fc_export_done(int target, int device, uint64_t address);              /* all peers have opened: unlink names */
FC_API int fc_open(int target, int device, const uint8_t *handle, size_t length, uint64_t *address);
FC_API int fc_close(int target, int device, uint64_t address);
FC_API int fc_peer_enable(int target, int device, int peer_device);               /* for memory of this process; idempotent */

/* ---- memory that the host reads while a kernel runs: the timeout record */
FC_API int fc_alloc_mapped(int target, int device, size_t bytes, void **host, uint64_t *address);
FC_API int fc_free_mapped(int target, int device, void *host);

/* ---- synchronous copies and fills; either side of a copy may be host memory */
FC_API int fc_copy(int target, int device, uint64_t destination, uint64_t source, size_t bytes);
FC_API int fc_fill32(int target, int device, uint64_t address, uint32_t word, size_t words);

#ifdef __cplusplus
}
#endif
#endif
