/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and devices over a driver's table: one implementation for CUDA and HIP.
 *
 * Copies and fills go through the null stream and wait for that stream alone: a kernel on another stream that waits
 * for a peer must not hold up the host.
 */
#include <string.h>

#include "driver.h"

struct ipc_handle {
    uint8_t kind; /* enum fc_handle_kind */
    uint8_t reserved[7];
    fc_ipc_handle ipc;
};

_Static_assert(sizeof(struct ipc_handle) <= FC_HANDLE_BYTES, "a handle fits its bytes");

static int check_device(struct fc_driver *driver, int device)
{
    if (device >= 0 && device < driver->devices)
        return 0;
    return fc_fail("device %d does not exist: %s's driver shows %d to this process; use 0 to %d", device, driver->name,
                   driver->devices, driver->devices - 1);
}

static int enter(struct fc_driver *driver, int device, int *previous)
{
    if (check_device(driver, device) != 0)
        return -1;
    int code = driver->enter(device, previous);
    return code == 0 ? 0 : fc_driver_fail(driver, code, "device %d of %s cannot be used", device, driver->name);
}

int fc_gpu_device_count(struct fc_driver *driver, int *count)
{
    *count = driver->devices;
    return 0;
}

int fc_gpu_device_query(struct fc_driver *driver, int device, fc_device_info *info)
{
    if (check_device(driver, device) != 0)
        return -1;
    size_t memory = 0;
    int code = driver->row.device_name(info->name, sizeof info->name, device);
    if (code == 0)
        code = driver->row.total_memory(&memory, device);
    if (code == 0)
        code = driver->query(device, info);
    info->memory_bytes = memory;
    return code == 0 ? 0 : fc_driver_fail(driver, code, "device %d of %s cannot be described", device, driver->name);
}

int fc_gpu_synchronize(struct fc_driver *driver, int device)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = driver->row.synchronize();
    driver->leave(previous);
    return code == 0 ? 0 : fc_driver_fail(driver, code, "waiting for device %d failed", device);
}

static int fill_and_wait(struct fc_driver *driver, uint64_t address, uint32_t word, size_t words)
{
    int code = driver->row.fill32(address, word, words);
    return code == 0 ? driver->row.stream_synchronize(NULL) : code;
}

static bool by_fd(const struct fc_driver *driver, uint64_t address, bool peers)
{
    return driver->fd != NULL && driver->fd->has(address, peers);
}

static int no_memory(struct fc_driver *driver, int code, size_t bytes, int device)
{
    return fc_driver_fail(driver, code, "allocating %zu bytes on device %d failed", bytes, device);
}

/* Not zeroed yet. Whether IPC is refused, as in some virtual machines and on some chips, is known only by asking. */
static int allocate(struct fc_driver *driver, int device, size_t bytes, int sharing, uint64_t *address)
{
    if (sharing == FC_SHARING_FD)
        return driver->fd->alloc(device, bytes, address);
    fc_ipc_handle unused;
    int code = driver->alloc(address, bytes);
    if (code == 0 && sharing == FC_SHARING_AUTO && driver->fd != NULL && driver->row.ipc_get(&unused, *address) != 0) {
        driver->row.free(*address);
        if (driver->fd->alloc(device, bytes, address) == 0)
            return 0;
        code = driver->alloc(address, bytes); /* enough for one process: fc_export says the rest */
    }
    return code == 0 ? 0 : no_memory(driver, code, bytes, device);
}

static int release(struct fc_driver *driver, uint64_t address)
{
    return by_fd(driver, address, false) ? driver->fd->release(address, false) : driver->row.free(address);
}

int fc_gpu_alloc(struct fc_driver *driver, int device, size_t bytes, int sharing, uint64_t *address)
{
    if (sharing == FC_SHARING_FD && driver->fd == NULL)
        return fc_fail("%s shares memory by IPC alone; sharing by file descriptor is for CUDA", driver->name);
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    size_t rounded = (bytes + driver->granule - 1) / driver->granule * driver->granule;
    int result = allocate(driver, device, rounded, sharing, address);
    int code = result == 0 ? fill_and_wait(driver, *address, 0, rounded / 4) : 0;
    if (code != 0) {
        release(driver, *address);
        result = no_memory(driver, code, rounded, device);
    }
    driver->leave(previous);
    return result;
}

int fc_gpu_free(struct fc_driver *driver, int device, uint64_t address)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = release(driver, address);
    driver->leave(previous);
    return code == 0 ? 0
                     : fc_driver_fail(driver, code, "freeing 0x%llx on device %d failed", (unsigned long long)address,
                                      device);
}

/* IPC that only the peer is refused (in containers with process namespaces of their own, say) comes too late for
 * another allocation, so the user has to ask for it. */
static const char *other_way(const struct fc_driver *driver)
{
    return driver->fd != NULL ? " by IPC; set FLYCOMM_CUDA_SHARING=fd on all ranks to do without" : "";
}

int fc_gpu_export(struct fc_driver *driver, int device, uint64_t address, uint8_t *handle, size_t *length)
{
    if (by_fd(driver, address, false))
        return check_device(driver, device) == 0 ? driver->fd->export(address, handle, length) : -1;
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    struct ipc_handle made = {.kind = (uint8_t)driver->handle_kind};
    int code = driver->row.ipc_get(&made.ipc, address);
    driver->leave(previous);
    if (code != 0)
        return fc_driver_fail(driver, code, "memory 0x%llx of device %d cannot be shared between processes%s",
                              (unsigned long long)address, device, other_way(driver));
    memcpy(handle, &made, sizeof made);
    *length = sizeof made;
    return 0;
}

int fc_gpu_export_done(struct fc_driver *driver, int device, uint64_t address)
{
    if (driver->fd != NULL)
        driver->fd->export_done(address);
    return check_device(driver, device);
}

int fc_gpu_open(struct fc_driver *driver, int device, const uint8_t *handle, size_t length, uint64_t *address)
{
    struct ipc_handle got;
    int previous;
    if (driver->fd != NULL && length != 0 && handle[0] == driver->fd->kind) {
        if (enter(driver, device, &previous) != 0)
            return -1;
        int result = driver->fd->open(device, handle, length, address);
        driver->leave(previous);
        return result;
    }
    if (length != sizeof got || handle[0] != driver->handle_kind)
        return fc_fail("a memory handle of %zu bytes and kind %d is not one of %s's (%zu bytes, kind %d); all ranks must "
                       "use the same target",
                       length, length != 0 ? handle[0] : 0, driver->name, sizeof got, driver->handle_kind);
    memcpy(&got, handle, sizeof got);
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = driver->row.ipc_open(address, got.ipc, FC_IPC_LAZY_PEER_ACCESS);
    driver->leave(previous);
    return code == 0 ? 0 : fc_driver_fail(driver, code, "a peer's memory cannot be mapped on device %d%s", device,
                                          other_way(driver));
}

int fc_gpu_close(struct fc_driver *driver, int device, uint64_t address)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = by_fd(driver, address, true) ? driver->fd->release(address, true) : driver->row.ipc_close(address);
    driver->leave(previous);
    return code == 0 ? 0
                     : fc_driver_fail(driver, code, "unmapping a peer's memory 0x%llx from device %d failed",
                                      (unsigned long long)address, device);
}

int fc_gpu_peer_enable(struct fc_driver *driver, int device, int peer_device)
{
    if (check_device(driver, peer_device) != 0)
        return -1;
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int can = device == peer_device;
    int code = can ? 0 : driver->row.can_access_peer(&can, device, peer_device);
    if (code == 0 && can && device != peer_device)
        code = driver->peer_enable(peer_device);
    if (code == FC_PEER_ACCESS_ALREADY_ENABLED)
        code = 0;
    if (code == 0 && can && device != peer_device && driver->fd != NULL)
        code = driver->fd->peer_enable(device, peer_device);
    driver->leave(previous);
    if (code != 0)
        return fc_driver_fail(driver, code, "device %d cannot use the memory of device %d", device, peer_device);
    return can ? 0
               : fc_fail("device %d has no peer access to device %d; use devices that a direct link connects", device,
                         peer_device);
}

int fc_gpu_alloc_mapped(struct fc_driver *driver, int device, size_t bytes, void **host, uint64_t *address)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = driver->row.host_alloc(host, bytes, driver->host_flags);
    if (code == 0) {
        memset(*host, 0, bytes);
        code = driver->row.host_address(address, *host, 0);
        if (code != 0)
            driver->row.host_free(*host);
    }
    driver->leave(previous);
    return code == 0 ? 0 : fc_driver_fail(driver, code, "allocating %zu bytes of mapped host memory failed", bytes);
}

int fc_gpu_free_mapped(struct fc_driver *driver, int device, void *host)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = driver->row.host_free(host);
    driver->leave(previous);
    return code == 0 ? 0 : fc_driver_fail(driver, code, "freeing mapped host memory %p failed", host);
}

int fc_gpu_copy(struct fc_driver *driver, int device, uint64_t destination, uint64_t source, size_t bytes)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = driver->copy(destination, source, bytes);
    if (code == 0) /* a copy from pageable memory may return before its bytes have arrived */
        code = driver->row.stream_synchronize(NULL);
    driver->leave(previous);
    return code == 0 ? 0
                     : fc_driver_fail(driver, code, "copying %zu bytes from 0x%llx to 0x%llx on device %d failed", bytes,
                                      (unsigned long long)source, (unsigned long long)destination, device);
}

int fc_gpu_fill32(struct fc_driver *driver, int device, uint64_t address, uint32_t word, size_t words)
{
    int previous;
    if (enter(driver, device, &previous) != 0)
        return -1;
    int code = fill_and_wait(driver, address, word, words);
    driver->leave(previous);
    return code == 0 ? 0
                     : fc_driver_fail(driver, code, "filling %zu words from 0x%llx on device %d failed", words,
                                      (unsigned long long)address, device);
}
