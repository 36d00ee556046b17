/* SPDX-License-Identifier: Apache-2.0
 *
 * A GPU driver of two devices whose memory is the host's, for test_drivers.py: built with -DCUDA or -DHIP. It checks
 * that every call that needs a device has one, and answers FAKE_FAIL=<function>=<code> with that code.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t address;
    uint8_t rest[56];
} handle;

static int current = -1; /* device; CUDA: of the context on top of the stack */
static int live, opened, peers[2][2];

int fake_current(void) { return current; }
int fake_live(void) { return live; }
int fake_opened(void) { return opened; }
int fake_peer(int device, int peer) { return peers[device][peer]; }

static int answer(const char *function, int needs_device)
{
    const char *fail = getenv("FAKE_FAIL");
    size_t length = strlen(function);
    if (fail != NULL && strncmp(fail, function, length) == 0 && fail[length] == '=')
        return atoi(fail + length + 1);
    return needs_device && current < 0 ? 201 : 0;
}

#define CALL(needs_device)                                                                                             \
    do {                                                                                                               \
        int code = answer(__func__, needs_device);                                                                     \
        if (code != 0)                                                                                                 \
            return code;                                                                                               \
    } while (0)

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

static int allocate(uint64_t *address, size_t bytes)
{
    void *memory = aligned_alloc(4096, bytes);
    memset(memory, 0x5a, bytes);
    live++;
    *address = (uint64_t)(uintptr_t)memory;
    return 0;
}

static int release(uint64_t address)
{
    live--;
    free((void *)(uintptr_t)address);
    return 0;
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
static int stack[8], depth;

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
    opened--;
    return 0;
}
int BOTH(cuMemHostAlloc, hipHostMalloc)(void **host, size_t bytes, unsigned flags)
{
    CALL(1);
    *host = malloc(bytes);
    live++;
    return (flags & 3) != 3;
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
