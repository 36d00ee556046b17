/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices, memory and errors of the stand-in.
 */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { UNCACHED = 3, LAZY_PEER_ACCESS = 1, COPY_DEFAULT = 4, HOST_FLAGS = 0x40000003 };
enum { COMPUTE_UNITS = 304, WAVE = 64, PROPERTIES_BYTES = 1472, ARCH_AT = 1160 };

HIP struct counts standin_counts;
pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- errors */

static const struct error {
    int code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {NO_BINARY_FOR_GPU, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {PEER_ACCESS_UNSUPPORTED, "hipErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {PEER_ACCESS_ALREADY_ENABLED, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {LAUNCH_FAILURE, "hipErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
};

static const struct error *error_of(int code)
{
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

HIP const char *hipGetErrorName(int code) { return error_of(code) != NULL ? error_of(code)->name : "hipErrorUnknown"; }

HIP int hipDrvGetErrorName(int code, const char **text)
{
    *text = error_of(code) != NULL ? error_of(code)->name : NULL;
    return *text != NULL ? SUCCESS : INVALID_VALUE;
}

HIP int hipDrvGetErrorString(int code, const char **text)
{
    *text = error_of(code) != NULL ? error_of(code)->text : NULL;
    return *text != NULL ? SUCCESS : INVALID_VALUE;
}

HIP int hipGetLastError(void) { return SUCCESS; }

void standin_say(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "stand-in HIP: %s\n", line);
}

int standin_fails(const char *function)
{
    static char last[128];
    static int calls; /* of that function, since the variable changed */
    const char *wanted = getenv("STANDIN_HIP_FAIL");
    size_t length = strlen(function);
    if (wanted == NULL || strncmp(wanted, function, length) != 0 || wanted[length] != ':')
        return SUCCESS;
    char *rest;
    long nth = strtol(wanted + length + 1, &rest, 10);
    int code = *rest == ':' ? atoi(rest + 1) : OUT_OF_MEMORY;
    pthread_mutex_lock(&standin_lock);
    if (strcmp(last, wanted) != 0) {
        snprintf(last, sizeof last, "%s", wanted);
        calls = 0;
    }
    int call = ++calls;
    pthread_mutex_unlock(&standin_lock);
    return nth == 0 || call == nth ? code : SUCCESS;
}

/* ---- devices */

static _Thread_local int current;
static unsigned char peers[MAX_DEVICES][MAX_DEVICES];

int standin_current(void) { return current; }

int standin_devices(void)
{
    const char *text = getenv("STANDIN_HIP_DEVICES");
    int count = text != NULL ? atoi(text) : 8;
    return count < MAX_DEVICES ? count : MAX_DEVICES;
}

const char *standin_arch(void)
{
    const char *text = getenv("STANDIN_HIP_ARCH");
    return text != NULL ? text : "gfx942";
}

static int is_device(int device) { return device >= 0 && device < standin_devices(); }

HIP int hipInit(unsigned flags)
{
    BEGIN;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

HIP int hipGetDeviceCount(int *count)
{
    BEGIN;
    *count = standin_devices();
    return SUCCESS;
}

HIP int hipGetDevice(int *device)
{
    BEGIN;
    *device = current;
    return SUCCESS;
}

HIP int hipSetDevice(int device)
{
    BEGIN;
    if (!is_device(device))
        return INVALID_DEVICE;
    current = device;
    return SUCCESS;
}

HIP int hipDeviceGetName(char *name, int length, int device)
{
    BEGIN;
    snprintf(name, (size_t)length, "Stand-in %s", standin_arch());
    return is_device(device) ? SUCCESS : INVALID_DEVICE;
}

HIP int hipDeviceTotalMem(size_t *bytes, int device)
{
    BEGIN;
    *bytes = (size_t)192 << 30;
    return is_device(device) ? SUCCESS : INVALID_DEVICE;
}

HIP int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN;
    if (!is_device(device))
        return INVALID_DEVICE;
    switch (attribute) {
    case 63: *value = COMPUTE_UNITS; return SUCCESS; /* multiprocessors */
    case 87: *value = WAVE; return SUCCESS;
    case 10017: *value = 1000000; return SUCCESS; /* wall clock, kHz: kernels read the host's nanoseconds */
    default: return INVALID_VALUE;
    }
}

HIP int hipGetDevicePropertiesR0600(void *properties, int device)
{
    BEGIN;
    memset(properties, 0, PROPERTIES_BYTES);
    snprintf((char *)properties + ARCH_AT, 256, "%s:sramecc+:xnack-", standin_arch());
    return is_device(device) ? SUCCESS : INVALID_DEVICE;
}

HIP int hipDeviceCanAccessPeer(int *can, int device, int peer)
{
    BEGIN;
    if (!is_device(device) || !is_device(peer))
        return INVALID_DEVICE;
    *can = device != peer && getenv("STANDIN_HIP_NO_PEER") == NULL;
    return SUCCESS;
}

HIP int hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
    BEGIN;
    if (!is_device(peer) || peer == current)
        return INVALID_DEVICE;
    if (flags != 0)
        return INVALID_VALUE;
    if (getenv("STANDIN_HIP_NO_PEER") != NULL)
        return PEER_ACCESS_UNSUPPORTED;
    pthread_mutex_lock(&standin_lock);
    int before = peers[current][peer];
    peers[current][peer] = 1;
    pthread_mutex_unlock(&standin_lock);
    return before ? PEER_ACCESS_ALREADY_ENABLED : SUCCESS;
}

/* ---- memory: a region is one mapping of a named piece of shared memory */

enum kind { UNUSED, DEVICE, OPENED, MAPPED };

static struct region {
    enum kind kind;
    int device;
    unsigned flags;
    char *address; /* as kernels use it */
    char *host;    /* of MAPPED: the host's own mapping, somewhere else */
    size_t bytes;
    char name[48];
} regions[1024];

struct handle {
    char name[48];
    uint64_t bytes;
    uint32_t owner;
    uint32_t check;
};
_Static_assert(sizeof(struct handle) == 64, "as large as hipIpcMemHandle_t");
typedef struct handle hipIpcMemHandle_t;

static int *counter(enum kind kind)
{
    return kind == DEVICE ? &standin_counts.allocated : kind == OPENED ? &standin_counts.opened : &standin_counts.mapped;
}

static int keep(struct region made)
{
    pthread_mutex_lock(&standin_lock);
    size_t i = 0;
    while (i < sizeof regions / sizeof regions[0] && regions[i].kind != UNUSED)
        i++;
    int fits = i < sizeof regions / sizeof regions[0];
    if (fits) {
        regions[i] = made;
        ++*counter(made.kind);
    }
    pthread_mutex_unlock(&standin_lock);
    return fits ? SUCCESS : OUT_OF_MEMORY;
}

/* Takes the region that begins at `address` (MAPPED: at the host's) out of the table. */
static int take(enum kind kind, const char *address, struct region *found)
{
    int result = INVALID_VALUE;
    pthread_mutex_lock(&standin_lock);
    for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++)
        if (regions[i].kind == kind && (kind == MAPPED ? regions[i].host : regions[i].address) == address) {
            *found = regions[i];
            regions[i].kind = UNUSED;
            --*counter(kind);
            result = SUCCESS;
            break;
        }
    pthread_mutex_unlock(&standin_lock);
    return result;
}

/* 1: all of [address, +bytes) is in one region; 0: no byte is in any; -1: it begins or ends outside. */
static int inside(uint64_t address, size_t bytes, struct region *found)
{
    int result = 0;
    pthread_mutex_lock(&standin_lock);
    for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++) {
        uint64_t begin = (uint64_t)(uintptr_t)regions[i].address, end = begin + regions[i].bytes;
        if (regions[i].kind == UNUSED || address >= end || address + bytes <= begin)
            continue;
        result = address >= begin && address + bytes <= end ? 1 : -1;
        *found = regions[i];
    }
    pthread_mutex_unlock(&standin_lock);
    return result;
}

static char *map(int file, size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return at != MAP_FAILED ? at : NULL;
}

static int allocate(enum kind kind, size_t bytes, unsigned flags, struct region *made)
{
    static int serial;
    *made = (struct region){.kind = kind, .device = current, .flags = flags, .bytes = bytes};
    snprintf(made->name, sizeof made->name, "/standin-hip.%d.%d", (int)getpid(), __atomic_add_fetch(&serial, 1, 5));
    int file = shm_open(made->name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0)
        return OUT_OF_MEMORY;
    made->address = map(file, bytes);
    made->host = kind == MAPPED ? map(file, bytes) : NULL;
    close(file);
    if (made->address == NULL || (kind == MAPPED && made->host == NULL))
        return OUT_OF_MEMORY;
    memset(made->address, 0x5a, bytes); /* a GPU's memory is not zero */
    return keep(*made);
}

static void unmap(const struct region *region)
{
    munmap(region->address, region->bytes);
    if (region->host != NULL)
        munmap(region->host, region->bytes);
    if (region->kind != OPENED)
        shm_unlink(region->name);
}

HIP int hipExtMallocWithFlags(void **address, size_t bytes, unsigned flags)
{
    BEGIN;
    struct region made;
    int code = allocate(DEVICE, bytes, flags, &made);
    *address = made.address;
    return code;
}

HIP int hipMalloc(void **address, size_t bytes)
{
    BEGIN;
    struct region made;
    int code = allocate(DEVICE, bytes, 0, &made);
    *address = made.address;
    return code;
}

HIP int hipFree(void *address)
{
    BEGIN;
    struct region found;
    int code = standin_drain(NULL);
    if (code == SUCCESS)
        code = take(DEVICE, address, &found);
    if (code == SUCCESS)
        unmap(&found);
    return code;
}

/* Memory that peers write has to be uncached: a cached export is a defect of the library, not of HIP. */
HIP int hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *address)
{
    BEGIN;
    struct region found;
    if (inside((uint64_t)(uintptr_t)address, 1, &found) != 1 || found.kind != DEVICE || found.address != address)
        return INVALID_VALUE;
    if (found.flags != UNCACHED) {
        standin_say("memory that is not uncached (flags %u) is exported", found.flags);
        return NOT_SUPPORTED;
    }
    *handle = (struct handle){.bytes = found.bytes, .owner = (uint32_t)getpid(), .check = 0x48495031};
    memcpy(handle->name, found.name, sizeof found.name);
    return SUCCESS;
}

HIP int hipIpcOpenMemHandle(void **address, hipIpcMemHandle_t handle, unsigned flags)
{
    BEGIN;
    if (flags != LAZY_PEER_ACCESS || handle.check != 0x48495031)
        return INVALID_VALUE;
    if (handle.owner == (uint32_t)getpid())
        return INVALID_CONTEXT; /* as the real one says it */
    struct region made = {.kind = OPENED, .device = current, .bytes = handle.bytes};
    memcpy(made.name, handle.name, sizeof made.name);
    int file = shm_open(handle.name, O_RDWR, 0);
    if (file < 0)
        return INVALID_VALUE;
    made.address = map(file, handle.bytes);
    close(file);
    int code = made.address != NULL ? keep(made) : OUT_OF_MEMORY;
    if (code != SUCCESS)
        return code;
    ((void (*)(uint64_t, size_t))standin_host("fc_host_remote_add"))((uint64_t)(uintptr_t)made.address, made.bytes);
    *address = made.address;
    return SUCCESS;
}

HIP int hipIpcCloseMemHandle(void *address)
{
    BEGIN;
    struct region found;
    int code = standin_drain(NULL);
    if (code == SUCCESS)
        code = take(OPENED, address, &found);
    if (code != SUCCESS)
        return code;
    ((void (*)(uint64_t))standin_host("fc_host_remote_remove"))((uint64_t)(uintptr_t)address);
    unmap(&found);
    return SUCCESS;
}

HIP int hipHostMalloc(void **host, size_t bytes, unsigned flags)
{
    BEGIN;
    if (flags != HOST_FLAGS)
        return INVALID_VALUE;
    struct region made;
    int code = allocate(MAPPED, bytes, flags, &made);
    *host = made.host;
    return code;
}

HIP int hipHostGetDevicePointer(void **address, void *host, unsigned flags)
{
    BEGIN;
    int code = flags == 0 ? INVALID_VALUE : NOT_SUPPORTED;
    pthread_mutex_lock(&standin_lock);
    for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++)
        if (regions[i].kind == MAPPED && regions[i].host == host && flags == 0) {
            *address = regions[i].address;
            code = SUCCESS;
        }
    pthread_mutex_unlock(&standin_lock);
    return code;
}

HIP int hipHostFree(void *host)
{
    BEGIN;
    struct region found;
    int code = take(MAPPED, host, &found);
    if (code == SUCCESS)
        unmap(&found);
    return code;
}

HIP int hipMemcpy(void *destination, const void *source, size_t bytes, int kind)
{
    BEGIN;
    struct region unused;
    int to = inside((uint64_t)(uintptr_t)destination, bytes, &unused);
    int from = inside((uint64_t)(uintptr_t)source, bytes, &unused);
    if (kind != COPY_DEFAULT || to < 0 || from < 0 || (to == 0 && from == 0))
        return INVALID_VALUE;
    int code = standin_drain(NULL);
    memcpy(destination, source, bytes);
    return code;
}

HIP int hipMemsetD32(void *address, int word, size_t words)
{
    BEGIN;
    struct region unused;
    if (inside((uint64_t)(uintptr_t)address, 4 * words, &unused) != 1)
        return INVALID_VALUE;
    int code = standin_drain(NULL);
    for (size_t i = 0; i < words; i++)
        ((int *)address)[i] = word;
    return code;
}

/* ---- what FlyDSL's runtime library binds to, and flycomm's kernels never call */

#define ABSENT(name)                                                                                                   \
    HIP int name(void)                                                                                                 \
    {                                                                                                                  \
        standin_say(#name " is not there");                                                                            \
        return NOT_SUPPORTED;                                                                                          \
    }
ABSENT(hipEventCreateWithFlags)
ABSENT(hipEventDestroy)
ABSENT(hipEventRecord)
ABSENT(hipEventSynchronize)
ABSENT(hipHostRegister)
ABSENT(hipHostUnregister)
ABSENT(hipMemcpyAsync)
ABSENT(hipMemset)
ABSENT(hipMemsetD16Async)
ABSENT(hipMemsetD32Async)
ABSENT(hipStreamWaitEvent)

/* ---- the host runtime, and the report */

void *standin_host(const char *name)
{
    static void *library;
    const char *path = getenv("STANDIN_HIP_HOST");
    if (library == NULL)
        library = path != NULL ? dlopen(path, RTLD_NOW) : NULL;
    void *found = library != NULL ? dlsym(library, name) : NULL;
    if (found == NULL) {
        standin_say("STANDIN_HIP_HOST=%s has no %s", path != NULL ? path : "", name);
        abort();
    }
    return found;
}

static void __attribute__((destructor)) report(void)
{
    const char *folder = getenv("STANDIN_HIP_REPORT");
    char path[512];
    snprintf(path, sizeof path, "%s/%d", folder != NULL ? folder : "", (int)getpid());
    FILE *file = folder != NULL ? fopen(path, "w") : NULL;
    if (file != NULL) {
        fprintf(file, "allocated %d opened %d mapped %d\n", standin_counts.allocated, standin_counts.opened,
                standin_counts.mapped);
        fclose(file);
    }
    for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++) /* a driver takes everything back */
        if (regions[i].kind != UNUSED && regions[i].kind != OPENED)
            shm_unlink(regions[i].name);
}
