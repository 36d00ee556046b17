/* SPDX-License-Identifier: Apache-2.0
 *
 * HIP's rows of the driver table, and the calls in which it differs from CUDA.
 */
#include <stdio.h>
#include <string.h>

#include "driver.h"

enum { MULTIPROCESSORS = 63, WARP_SIZE = 87, WALL_CLOCK_KHZ = 10017 }; /* hipDeviceAttribute_t */
enum { HOST_PORTABLE = 1, HOST_MAPPED = 2, HOST_COHERENT = 0x40000000 };
enum { MALLOC_UNCACHED = 3, MEMCPY_DEFAULT = 4 };

static struct {
    int (*device_get)(int *device);
    int (*device_set)(int device);
    int (*alloc)(uint64_t *address, size_t bytes, unsigned flags);
    int (*copy)(uint64_t destination, uint64_t source, size_t bytes, int kind);
    int (*peer_enable)(int peer_device, unsigned flags);
    int (*properties)(void *properties, int device);
} own;

/* hipDeviceProp_tR0600, of which only the name of the architecture has no attribute. The symbol carries the layout's
 * version, so the offset is fixed; the room behind it is for a later member. */
struct properties {
    uint8_t before[1160];
    char arch_name[256]; /* "gfx942:sramecc+:xnack-" */
    uint8_t after[2680];
};

static int enter(int device, int *previous)
{
    int code = own.device_get(previous);
    return code == 0 ? own.device_set(device) : code;
}

static int leave(int previous) { return own.device_set(previous); }

/* Uncached, since a dirty line of cached memory can land on a peer's data later. */
static int alloc(uint64_t *address, size_t bytes) { return own.alloc(address, bytes, MALLOC_UNCACHED); }

static int copy(uint64_t destination, uint64_t source, size_t bytes)
{
    return own.copy(destination, source, bytes, MEMCPY_DEFAULT);
}

static int peer_enable(int peer_device) { return own.peer_enable(peer_device, 0); }

static int query(int device, fc_device_info *info)
{
    struct properties properties;
    memset(&properties, 0, sizeof properties);
    int units = 0, warp = 0, wall_clock_khz = 0;
    int code = fc_hip.row.attribute(&units, MULTIPROCESSORS, device);
    if (code == 0)
        code = fc_hip.row.attribute(&warp, WARP_SIZE, device);
    if (code == 0)
        code = own.properties(&properties, device);
    if (code != 0)
        return code;
    size_t length = strcspn(properties.arch_name, ":");
    snprintf(info->arch, sizeof info->arch, "%.*s", (int)length, properties.arch_name);
    info->compute_units = (uint32_t)units;
    info->warp_size = (uint32_t)warp;
    /* s_memrealtime; runtimes that do not know the attribute run on chips with 100 MHz */
    int unknown = fc_hip.row.attribute(&wall_clock_khz, WALL_CLOCK_KHZ, device);
    info->clock_hz = unknown != 0 || wall_clock_khz <= 0 ? 100000000 : (uint64_t)wall_clock_khz * 1000;
    return 0;
}

#define ROW(symbol, field) {symbol, &fc_hip.row.field}
#define OWN(symbol, field) {symbol, &own.field}

static const struct fc_symbol symbols[] = {
    ROW("hipInit", init),
    ROW("hipGetDeviceCount", device_count),
    ROW("hipDeviceGetName", device_name),
    ROW("hipDeviceGetAttribute", attribute),
    ROW("hipDeviceTotalMem", total_memory),
    ROW("hipDeviceCanAccessPeer", can_access_peer),
    ROW("hipDeviceSynchronize", synchronize),
    ROW("hipStreamSynchronize", stream_synchronize),
    ROW("hipFree", free),
    ROW("hipIpcGetMemHandle", ipc_get),
    ROW("hipIpcOpenMemHandle", ipc_open),
    ROW("hipIpcCloseMemHandle", ipc_close),
    ROW("hipHostMalloc", host_alloc),
    ROW("hipHostGetDevicePointer", host_address),
    ROW("hipHostFree", host_free),
    ROW("hipMemsetD32", fill32),
    ROW("hipDrvGetErrorName", error_name),
    ROW("hipDrvGetErrorString", error_string),
    OWN("hipGetDevice", device_get),
    OWN("hipSetDevice", device_set),
    OWN("hipExtMallocWithFlags", alloc),
    OWN("hipMemcpy", copy),
    OWN("hipDeviceEnablePeerAccess", peer_enable),
    OWN("hipGetDevicePropertiesR0600", properties),
    {NULL, NULL},
};

static const char *const sonames[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", NULL};

struct fc_driver fc_hip = {
    .name = "HIP",
    .remedy = "install ROCm 6 or later, or use target host",
    .prefix = "libamdhip64",
    .sonames = sonames,
    .symbols = symbols,
    .handle_kind = FC_HANDLE_HIP_IPC,
    .granule = 4096,
    .host_flags = HOST_PORTABLE | HOST_MAPPED | HOST_COHERENT,
    .enter = enter,
    .leave = leave,
    .alloc = alloc,
    .copy = copy,
    .peer_enable = peer_enable,
    .query = query,
};
