/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA's rows of the driver table, from the driver API, and the calls in which it differs from HIP.
 */
#include <pthread.h>
#include <stdio.h>

#include "driver.h"

enum { MULTIPROCESSORS = 16, WARP_SIZE = 10, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 }; /* CUdevice_attribute */
enum { HOST_PORTABLE = 1, HOST_DEVICE_MAP = 2 };
enum { ERROR_OUT_OF_MEMORY = 2, MAX_DEVICES = 64 };

static struct {
    int (*context_retain)(void **context, int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*alloc)(uint64_t *address, size_t bytes);
    int (*copy)(uint64_t destination, uint64_t source, size_t bytes);
    int (*peer_enable)(void *peer_context, unsigned flags);
} own;

/* Primary contexts, the ones torch uses. Retained once and never released: releasing the last one would destroy
 * memory under kernels that still run while the process ends. */
static void *contexts[MAX_DEVICES];
static pthread_mutex_t retaining = PTHREAD_MUTEX_INITIALIZER;

static int context_of(int device, void **context)
{
    if (device >= MAX_DEVICES)
        return ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&retaining);
    int code = contexts[device] != NULL ? 0 : own.context_retain(&contexts[device], device);
    *context = contexts[device];
    pthread_mutex_unlock(&retaining);
    return code;
}

static int enter(int device, int *previous)
{
    *previous = 0; /* the driver keeps a stack of contexts */
    void *context;
    int code = context_of(device, &context);
    return code == 0 ? own.context_push(context) : code;
}

static int leave(int previous)
{
    (void)previous;
    void *context;
    return own.context_pop(&context);
}

static int alloc(uint64_t *address, size_t bytes) { return own.alloc(address, bytes); }

static int copy(uint64_t destination, uint64_t source, size_t bytes) { return own.copy(destination, source, bytes); }

static int peer_enable(int peer_device)
{
    void *context;
    int code = context_of(peer_device, &context);
    return code == 0 ? own.peer_enable(context, 0) : code;
}

static int query(int device, fc_device_info *info)
{
    int units = 0, warp = 0, major = 0, minor = 0;
    int code = fc_cuda.row.attribute(&units, MULTIPROCESSORS, device);
    if (code == 0)
        code = fc_cuda.row.attribute(&warp, WARP_SIZE, device);
    if (code == 0)
        code = fc_cuda.row.attribute(&major, CAPABILITY_MAJOR, device);
    if (code == 0)
        code = fc_cuda.row.attribute(&minor, CAPABILITY_MINOR, device);
    snprintf(info->arch, sizeof info->arch, "sm_%d%d", major, minor);
    info->compute_units = (uint32_t)units;
    info->warp_size = (uint32_t)warp;
    info->clock_hz = 1000000000; /* %globaltimer counts nanoseconds */
    return code;
}

#define ROW(symbol, field) {symbol, &fc_cuda.row.field}
#define OWN(symbol, field) {symbol, &own.field}

static const struct fc_symbol symbols[] = {
    ROW("cuInit", init),
    ROW("cuDeviceGetCount", device_count),
    ROW("cuDeviceGetName", device_name),
    ROW("cuDeviceGetAttribute", attribute),
    ROW("cuDeviceTotalMem_v2", total_memory),
    ROW("cuDeviceCanAccessPeer", can_access_peer),
    ROW("cuCtxSynchronize", synchronize),
    ROW("cuStreamSynchronize", stream_synchronize),
    ROW("cuMemFree_v2", free),
    ROW("cuIpcGetMemHandle", ipc_get),
    ROW("cuIpcOpenMemHandle_v2", ipc_open),
    ROW("cuIpcCloseMemHandle", ipc_close),
    ROW("cuMemHostAlloc", host_alloc),
    ROW("cuMemHostGetDevicePointer_v2", host_address),
    ROW("cuMemFreeHost", host_free),
    ROW("cuMemsetD32_v2", fill32),
    ROW("cuGetErrorName", error_name),
    ROW("cuGetErrorString", error_string),
    OWN("cuDevicePrimaryCtxRetain", context_retain),
    OWN("cuCtxPushCurrent_v2", context_push),
    OWN("cuCtxPopCurrent_v2", context_pop),
    OWN("cuMemAlloc_v2", alloc),
    OWN("cuMemcpy", copy),
    OWN("cuCtxEnablePeerAccess", peer_enable),
    {NULL, NULL},
};

static const char *const sonames[] = {"libcuda.so.1", "libcuda.so", NULL};

struct fc_driver fc_cuda = {
    .name = "CUDA",
    .remedy = "install NVIDIA's driver, or use target host",
    .prefix = "libcuda.so",
    .sonames = sonames,
    .symbols = symbols,
    .handle_kind = FC_HANDLE_CUDA_IPC,
    .fd = &fc_cuda_fd,
    /* The driver cuts small allocations from blocks of 2 MiB, and a handle shares the whole block. */
    .granule = 2 << 20,
    .host_flags = HOST_PORTABLE | HOST_DEVICE_MAP,
    .enter = enter,
    .leave = leave,
    .alloc = alloc,
    .copy = copy,
    .peer_enable = peer_enable,
    .query = query,
};
