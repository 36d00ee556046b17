/* SPDX-License-Identifier: Apache-2.0
 *
 * What FlyDSL's compiled launchers call on target cuda, and what flycomm asks of the same runtime.
 *
 * A launcher names a kernel and launches it on whatever device is current, so a module here is the image (PTX or a
 * cubin) that the launcher carries. It is loaded once a context: by fc_cuda_preload, else by its first launch there.
 * Loading can wait for kernels that run, so what may wait for a peer is preloaded (PROTOCOLS rule 13).
 *
 * Launchers return nothing: what went wrong is kept per thread for fc_cuda_take_error(), and the launch is skipped.
 */
#ifndef FLYCOMM_CUDA_RUNTIME_H
#define FLYCOMM_CUDA_RUNTIME_H

#include <stdbool.h>

#include "flycomm_shim.h"

typedef struct fc_cuda_module fc_cuda_module; /* an image, and what was loaded from it */
typedef struct fc_cuda_kernel fc_cuda_kernel; /* one kernel of it in one context */

/* ---- for flycomm */
FC_API const char *fc_cuda_take_error(void); /* this thread's first error since the last call, or NULL */
FC_API int fc_cuda_preload(int device);      /* load every image of this process, and its kernels, on the device */
/* Whether kernels that wait for the one ahead of them (PTX griddepcontrol.wait) may start before it has ended, from the
 * next launch on; at first they may not. Other kernels never do, and none with a driver of before CUDA 12.3. */
FC_API void fc_cuda_start_early(bool allowed);

/* ---- for FlyDSL */
FC_API int mgpuModuleOccupancyMaxActiveBlocks(const void *image, const char *name, int threads, int shared_bytes);

/* ---- for compiled launchers; names and signatures are those of MLIR's GPU lowering */
FC_API fc_cuda_module *mgpuModuleLoadJIT(const char *ptx, int optimisation_level);
FC_API fc_cuda_module *mgpuModuleLoad(const void *image, size_t bytes);
FC_API void mgpuModuleUnload(fc_cuda_module *module);
FC_API fc_cuda_kernel *mgpuModuleGetFunction(fc_cuda_module *module, const char *name);
FC_API void mgpuLaunchKernel(fc_cuda_kernel *kernel, intptr_t grid_x, intptr_t grid_y, intptr_t grid_z, intptr_t block_x,
                             intptr_t block_y, intptr_t block_z, int32_t shared_bytes, void *stream, void **parameters,
                             void **extra, size_t count);
FC_API void mgpuLaunchClusterKernel(fc_cuda_kernel *kernel, intptr_t cluster_x, intptr_t cluster_y, intptr_t cluster_z,
                                    intptr_t grid_x, intptr_t grid_y, intptr_t grid_z, intptr_t block_x,
                                    intptr_t block_y, intptr_t block_z, int32_t shared_bytes, void *stream,
                                    void **parameters, void **extra, size_t count);
FC_API void *mgpuStreamCreate(void);
FC_API void mgpuStreamDestroy(void *stream);
FC_API void mgpuStreamSynchronize(void *stream);
FC_API void mgpuStreamWaitEvent(void *stream, void *event);
FC_API void *mgpuEventCreate(void);
FC_API void mgpuEventDestroy(void *event);
FC_API void mgpuEventSynchronize(void *event);
FC_API void mgpuEventRecord(void *event, void *stream);
FC_API void *mgpuMemAlloc(uint64_t bytes, void *stream, bool host_shared);
FC_API void mgpuMemFree(void *address, void *stream);
FC_API void mgpuMemcpy(void *destination, void *source, size_t bytes, void *stream);
FC_API void mgpuMemset32(void *address, unsigned word, size_t count, void *stream);
FC_API void mgpuMemset16(void *address, unsigned short word, size_t count, void *stream);

#endif
