/* SPDX-License-Identifier: Apache-2.0
 *
 * A GPU driver of two devices whose memory is the host's, for test_drivers.py: built with -DCUDA or -DHIP. It checks
 * that every call that needs a device has one, and answers FAKE_FAIL=<function>=<code>,… with these codes. Memory of
 * cuMemCreate is a memfd, so that processes really share it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    uint64_t address;
    uint8_t rest[56];
} handle;

static _Thread_local int current = -1; /* device; CUDA: of the context on top of the stack */
static int live, opened, peers[2][2];

int fake_current(void) { return current; }
int fake_live(void) { return live; }
int fake_opened(void) { return opened; }
int fake_peer(int device, int peer) { return peers[device][peer]; }

static int answer(const char *function, int needs_device)
{
    const char *fail = getenv("FAKE_FAIL");
    const char *found = fail != NULL ? strstr(fail, function) : NULL;
    size_t length = strlen(function);
    if (found != NULL && found[length] == '=')
        return atoi(found + length + 1);
    return needs_device && current < 0 ? 201 : 0;
}

static pthread_mutex_t calling = PTHREAD_MUTEX_INITIALIZER;

static void end_call(int *begun)
{
    (void)begun;
    pthread_mutex_unlock(&calling);
}

/* One call at a time, to its end. */
#define CALL(needs_device)                                                                                             \
    __attribute__((cleanup(end_call))) int begun = pthread_mutex_lock(&calling);                                       \
    int failure = begun != 0 ? begun : answer(__func__, needs_device);                                                 \
    if (failure != 0)                                                                                                  \
        return failure

static int attribute(int *value, int index, int device)
{
    (void)device;
    switch (index) {
    case 16: case 63: *value = 132; return 0;
    case 10: *value = 32; return 0;
    case 87: *value = 64; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
    case 10017: *value = 100000; return 0;
    default: return 1;
    }
}

static uint64_t allocated[64];

static int note(void *memory)
{
    for (size_t i = 0; memory != NULL && i < sizeof allocated / sizeof allocated[0]; i++)
        if (allocated[i] == 0) {
            allocated[i] = (uint64_t)(uintptr_t)memory;
            live++;
            return 0;
        }
    return 2;
}

static int allocate(uint64_t *address, size_t bytes)
{
    void *memory = aligned_alloc(4096, bytes);
    memset(memory, 0x5a, bytes);
    *address = (uint64_t)(uintptr_t)memory;
    return note(memory);
}

static int release(uint64_t address)
{
    for (size_t i = 0; i < sizeof allocated / sizeof allocated[0]; i++)
        if (address != 0 && allocated[i] == address) {
            allocated[i] = 0;
            live--;
            free((void *)(uintptr_t)address);
            return 0;
        }
    return 1;
}

static int fill(uint64_t address, unsigned word, size_t words)
{
    for (size_t i = 0; i < words; i++)
        ((uint32_t *)(uintptr_t)address)[i] = word;
    return 0;
}

static int name_of(int code, const char **text)
{
    *text = code == 2 ? "ERROR_OUT_OF_MEMORY" : "ERROR_OTHER";
    return 0;
}

static int words_of(int code, const char **text)
{
    *text = code == 2 ? "out of memory" : "something else";
    return 0;
}

#ifdef CUDA
#define BOTH(cuda, hip) cuda
static _Thread_local int stack[8], depth;

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    CALL(0);
    *context = (void *)(uintptr_t)(device + 1);
    return 0;
}
int cuCtxPushCurrent_v2(void *context)
{
    CALL(0);
    stack[depth++] = current;
    current = (int)(uintptr_t)context - 1;
    return 0;
}
int cuCtxPopCurrent_v2(void **context)
{
    CALL(1);
    *context = (void *)(uintptr_t)(current + 1);
    current = stack[--depth];
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    CALL(1);
    return bytes % (2 << 20) != 0 ? 1 : allocate(address, bytes);
}
int cuMemcpy(uint64_t to, uint64_t from, size_t bytes)
{
    CALL(1);
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return 0;
}
int cuCtxEnablePeerAccess(void *context, unsigned flags)
{
    CALL(1);
    (void)flags;
    return peers[current][(uintptr_t)context - 1]++ ? 704 : 0;
}

/* cuMem: a handle is a memfd's number, an address range is one mapping. What is accessible to nobody faults. */
enum { GRANULE = 2 << 20, RANGES = 16 };
struct properties { int type, handle_types, place, device; void *reserved; uint8_t flags[8]; };
struct access_from { int place, device, flags; };
static struct range { uint64_t address; size_t bytes; int mapped, devices; } ranges[RANGES];

static struct range *range_at(uint64_t address, size_t bytes)
{
    for (struct range *range = ranges; range < ranges + RANGES; range++)
        if (address != 0 && range->address == address && range->bytes == bytes)
            return range;
    return NULL;
}

/* Bit d: device d may use the memory that is mapped there. */
int fake_devices_of(uint64_t address)
{
    for (struct range *range = ranges; range < ranges + RANGES; range++)
        if (address != 0 && range->address == address)
            return range->devices;
    return 0;
}

int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *wanted, int option)
{
    CALL(0);
    *bytes = GRANULE;
    return wanted->type != 1 || option != 0;
}
int cuMemCreate(uint64_t *made, size_t bytes, const struct properties *wanted, unsigned long long flags)
{
    CALL(0);
    if (bytes % GRANULE != 0 || flags != 0 || wanted->handle_types != 1 || wanted->place != 1 || wanted->device > 1)
        return 1;
    int file = memfd_create("fake", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0 || pwrite(file, "\x5a", 1, (off_t)bytes / 2) != 1)
        return 2;
    live++;
    *made = (uint64_t)file;
    return 0;
}
int cuMemRelease(uint64_t memory)
{
    CALL(0);
    live--;
    return close((int)memory) != 0;
}
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags)
{
    CALL(0);
    struct range *range = ranges;
    while (range < ranges + RANGES && range->address != 0)
        range++;
    if (range == ranges + RANGES || bytes % GRANULE != 0 || alignment != 0 || wanted != 0 || flags != 0)
        return 1;
    void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED)
        return 2;
    live++;
    *range = (struct range){.address = (uint64_t)(uintptr_t)reserved, .bytes = bytes};
    *address = range->address;
    return 0;
}
int cuMemAddressFree(uint64_t address, size_t bytes)
{
    CALL(0);
    struct range *range = range_at(address, bytes);
    if (range == NULL || range->mapped)
        return 1;
    live--;
    range->address = 0;
    return munmap((void *)(uintptr_t)address, bytes) != 0;
}
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t memory, unsigned long long flags)
{
    CALL(0);
    struct range *range = range_at(address, bytes);
    if (range == NULL || range->mapped || offset != 0 || flags != 0 || lseek((int)memory, 0, SEEK_END) != (off_t)bytes)
        return 1;
    live++;
    range->mapped = 1;
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)memory, 0) == MAP_FAILED;
}
int cuMemUnmap(uint64_t address, size_t bytes)
{
    CALL(0);
    struct range *range = range_at(address, bytes);
    if (range == NULL || !range->mapped)
        return 1;
    live--;
    range->mapped = range->devices = 0;
    const int private = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, private, -1, 0) == MAP_FAILED;
}
int cuMemSetAccess(uint64_t address, size_t bytes, const struct access_from *from, size_t count)
{
    CALL(0);
    struct range *range = range_at(address, bytes);
    if (range == NULL || !range->mapped || count != 1 || from->place != 1 || from->flags != 3)
        return 1;
    range->devices |= 1 << from->device;
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) != 0;
}
int cuMemExportToShareableHandle(void *made, uint64_t memory, int kind, unsigned long long flags)
{
    CALL(0);
    *(int *)made = dup((int)memory);
    return kind != 1 || flags != 0 || *(int *)made < 0;
}
int cuMemImportFromShareableHandle(uint64_t *memory, void *got, int kind)
{
    CALL(0);
    int file = dup((int)(intptr_t)got);
    live++;
    *memory = (uint64_t)file;
    return kind != 1 || file < 0;
}
#else
#define BOTH(cuda, hip) hip
int hipGetDevice(int *device)
{
    CALL(0);
    *device = current < 0 ? 0 : current;
    return 0;
}
int hipSetDevice(int device)
{
    CALL(0);
    current = device;
    return 0;
}
int hipExtMallocWithFlags(uint64_t *address, size_t bytes, unsigned flags)
{
    CALL(1);
    return flags != 3 ? 1 : allocate(address, bytes);
}
int hipMemcpy(uint64_t to, uint64_t from, size_t bytes, int kind)
{
    CALL(1);
    if (kind != 4)
        return 1;
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return 0;
}
int hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
    CALL(1);
    (void)flags;
    return peers[current][peer]++ ? 704 : 0;
}
int hipGetDevicePropertiesR0600(char *properties, int device)
{
    CALL(0);
    (void)device;
    strcpy(properties + 1160, "gfx942:sramecc+:xnack-");
    return 0;
}
#endif

int BOTH(cuInit, hipInit)(unsigned flags)
{
    CALL(0);
    return flags != 0;
}
int BOTH(cuDeviceGetCount, hipGetDeviceCount)(int *count)
{
    CALL(0);
    *count = 2;
    return 0;
}
int BOTH(cuDeviceGetName, hipDeviceGetName)(char *name, int length, int device)
{
    CALL(0);
    snprintf(name, (size_t)length, "Fake %d", device);
    return 0;
}
int BOTH(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *value, int index, int device)
{
    CALL(0);
    return attribute(value, index, device);
}
int BOTH(cuDeviceTotalMem_v2, hipDeviceTotalMem)(size_t *bytes, int device)
{
    CALL(0);
    (void)device;
    *bytes = (size_t)1 << 37;
    return 0;
}
int BOTH(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer)(int *can, int device, int peer)
{
    CALL(0);
    *can = getenv("FAKE_NO_PEER") == NULL && device != peer;
    return 0;
}
int BOTH(cuCtxSynchronize, hipDeviceSynchronize)(void)
{
    CALL(1);
    return 0;
}
int BOTH(cuStreamSynchronize, hipStreamSynchronize)(void *stream)
{
    CALL(1);
    return stream != NULL;
}
int BOTH(cuMemFree_v2, hipFree)(uint64_t address)
{
    CALL(1);
    return release(address);
}
int BOTH(cuIpcGetMemHandle, hipIpcGetMemHandle)(handle *made, uint64_t address)
{
    CALL(1);
    memset(made, 0x77, sizeof *made);
    made->address = address;
    return 0;
}
int BOTH(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(uint64_t *address, handle got, unsigned flags)
{
    CALL(1);
    *address = got.address;
    opened++;
    return flags != 1 || got.rest[55] != 0x77;
}
int BOTH(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(uint64_t address)
{
    CALL(1);
    (void)address;
    if (opened == 0)
        return 1;
    opened--;
    return 0;
}
int BOTH(cuMemHostAlloc, hipHostMalloc)(void **host, size_t bytes, unsigned flags)
{
    CALL(1);
    *host = malloc(bytes);
    return (flags & 3) != 3 ? 1 : note(*host);
}
int BOTH(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer)(uint64_t *address, void *host, unsigned flags)
{
    CALL(1);
    *address = (uint64_t)(uintptr_t)host;
    return (int)flags;
}
int BOTH(cuMemFreeHost, hipHostFree)(void *host)
{
    CALL(1);
    return release((uint64_t)(uintptr_t)host);
}
int BOTH(cuMemsetD32_v2, hipMemsetD32)(uint64_t address, unsigned word, size_t words)
{
    CALL(1);
    return fill(address, word, words);
}
int BOTH(cuGetErrorName, hipDrvGetErrorName)(int code, const char **text) { return name_of(code, text); }
int BOTH(cuGetErrorString, hipDrvGetErrorString)(int code, const char **text) { return words_of(code, text); }
