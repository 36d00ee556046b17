/* SPDX-License-Identifier: Apache-2.0
 *
 * The library's front: the last error, the version, and each call sent to its target.
 */
#include "shim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static _Thread_local char last_error[1024];

int fc_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return -1;
}

const char *fc_last_error(void) { return last_error; }

const char *fc_version(void) { return FC_VERSION; }

/* The opened driver of a GPU target, or NULL with the error set. */
static struct fc_driver *opened(int target)
{
    struct fc_driver *driver = target == FC_CUDA ? &fc_cuda : target == FC_HIP ? &fc_hip : NULL;
    if (driver == NULL) {
        fc_fail("target number %d is not one of 0 (host), 1 (cuda), 2 (hip)", target);
        return NULL;
    }
    return fc_driver_ready(driver) == 0 ? driver : NULL;
}

static int host_device(int device)
{
    return device == 0 ? 0 : fc_fail("device %d does not exist: the host target has one device, 0", device);
}

/* Evaluates `host` for the host target and `gpu`, which may use `driver`, for the others. */
#define TO_TARGET(host, gpu)                                                                                           \
    do {                                                                                                               \
        if (target == FC_HOST)                                                                                         \
            return host;                                                                                               \
        struct fc_driver *driver = opened(target);                                                                     \
        return driver == NULL ? -1 : gpu;                                                                              \
    } while (0)

#define TO_DEVICE(host, gpu) TO_TARGET((host_device(device) == 0 ? host : -1), gpu)

static int host_count(int *count)
{
    *count = 1;
    return 0;
}

static int host_free_mapped(void *host)
{
    free(host);
    return 0;
}

static int host_copy(uint64_t destination, uint64_t source, size_t bytes)
{
    memmove((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, bytes);
    return 0;
}

static int host_fill32(uint64_t address, uint32_t word, size_t words)
{
    uint32_t *at = (uint32_t *)(uintptr_t)address;
    for (size_t i = 0; i < words; i++)
        at[i] = word;
    return 0;
}

int fc_driver_open(int target) { TO_TARGET(0, 0); }

int fc_device_count(int target, int *count) { TO_TARGET(host_count(count), fc_gpu_device_count(driver, count)); }

int fc_device_query(int target, int device, fc_device_info *info)
{
    memset(info, 0, sizeof *info);
    TO_DEVICE(fc_host_device_query(info), fc_gpu_device_query(driver, device, info));
}

int fc_synchronize(int target, int device) { TO_DEVICE(0, fc_gpu_synchronize(driver, device)); }

int fc_alloc(int target, int device, size_t bytes, int sharing, uint64_t *address)
{
    if (bytes == 0)
        return fc_fail("an allocation of 0 bytes was asked for; ask for at least 1");
    TO_DEVICE(fc_host_alloc(bytes, address), fc_gpu_alloc(driver, device, bytes, sharing, address));
}

int fc_free(int target, int device, uint64_t address)
{
    TO_DEVICE(fc_host_free(address), fc_gpu_free(driver, device, address));
}

int fc_export(int target, int device, uint64_t address, uint8_t handle[FC_HANDLE_BYTES], size_t *length)
{
    TO_DEVICE(fc_host_export(address, handle, length), fc_gpu_export(driver, device, address, handle, length));
}

int fc_export_done(int target, int device, uint64_t address)
{
    TO_DEVICE(fc_host_export_done(address), fc_gpu_export_done(driver, device, address));
}

int fc_open(int target, int device, const uint8_t *handle, size_t length, uint64_t *address)
{
    TO_DEVICE(fc_host_open(handle, length, address), fc_gpu_open(driver, device, handle, length, address));
}

int fc_close(int target, int device, uint64_t address)
{
    TO_DEVICE(fc_host_close(address), fc_gpu_close(driver, device, address));
}

int fc_peer_enable(int target, int device, int peer_device)
{
    TO_DEVICE(host_device(peer_device), fc_gpu_peer_enable(driver, device, peer_device));
}

int fc_alloc_mapped(int target, int device, size_t bytes, void **host, uint64_t *address)
{
    if (bytes == 0)
        return fc_fail("an allocation of 0 bytes was asked for; ask for at least 1");
    TO_DEVICE(fc_host_alloc_mapped(bytes, host, address), fc_gpu_alloc_mapped(driver, device, bytes, host, address));
}

int fc_free_mapped(int target, int device, void *host)
{
    TO_DEVICE(host_free_mapped(host), fc_gpu_free_mapped(driver, device, host));
}

int fc_copy(int target, int device, uint64_t destination, uint64_t source, size_t bytes)
{
    TO_DEVICE(host_copy(destination, source, bytes), fc_gpu_copy(driver, device, destination, source, bytes));
}

int fc_fill32(int target, int device, uint64_t address, uint32_t word, size_t words)
{
    TO_DEVICE(host_fill32(address, word, words), fc_gpu_fill32(driver, device, address, word, words));
}
