/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of this library share and nobody outside sees.
 */
#ifndef FLYCOMM_SHIM_INTERNAL_H
#define FLYCOMM_SHIM_INTERNAL_H

#include "flycomm_shim.h"

/* The first byte of a handle says how its memory is shared: another way is another kind. */
enum fc_handle_kind { FC_HANDLE_SHM = 1, FC_HANDLE_CUDA_IPC = 2, FC_HANDLE_HIP_IPC = 3 };

/* Sets this thread's fc_last_error() and returns -1. One sentence: value, limit, remedy. */
int fc_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

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
