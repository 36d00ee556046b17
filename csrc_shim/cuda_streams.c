/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, events and copies, where MLIR's lowering of `gpu` operations on the host side asks for them. Errors are kept
 * as those of launches are.
 */
#include <pthread.h>
#include <stddef.h>

#include "cuda_internal.h"

enum { STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2 }; /* of cuda.h */

static struct {
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_synchronize)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*alloc)(uint64_t *address, size_t bytes);
    int (*copy)(uint64_t destination, uint64_t source, size_t bytes, void *stream);
    int (*fill32)(uint64_t address, unsigned word, size_t count, void *stream);
    int (*fill16)(uint64_t address, unsigned short word, size_t count, void *stream);
} cu;

static const struct fc_symbol symbols[] = {
    {"cuStreamCreate", &cu.stream_create},
    {"cuStreamDestroy_v2", &cu.stream_destroy},
    {"cuStreamWaitEvent", &cu.stream_wait},
    {"cuEventCreate", &cu.event_create},
    {"cuEventDestroy_v2", &cu.event_destroy},
    {"cuEventSynchronize", &cu.event_synchronize},
    {"cuEventRecord", &cu.event_record},
    {"cuMemAlloc_v2", &cu.alloc},
    {"cuMemcpyAsync", &cu.copy},
    {"cuMemsetD32Async", &cu.fill32},
    {"cuMemsetD16Async", &cu.fill16},
    {NULL, NULL},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int loaded = -1;

static void load(void) { loaded = fc_driver_load(&fc_cuda, symbols); }

/* Whether calls can be made, with a current context; otherwise the error is kept. */
static bool usable(void)
{
    void *context;
    if (fc_cuda_context(&context) == 0 && pthread_once(&once, load) == 0 && loaded == 0)
        return true;
    fc_cuda_keep_error();
    return false;
}

#define KEPT(call, what)                                                                                               \
    do {                                                                                                               \
        if (usable())                                                                                                  \
            fc_cuda_kept(call, what);                                                                                  \
    } while (0)

void *mgpuStreamCreate(void)
{
    void *stream = NULL;
    KEPT(cu.stream_create(&stream, STREAM_NON_BLOCKING), "creating a stream");
    return stream;
}

void mgpuStreamDestroy(void *stream) { KEPT(cu.stream_destroy(stream), "destroying a stream"); }

void mgpuStreamSynchronize(void *stream) { KEPT(fc_cuda.row.stream_synchronize(stream), "waiting for a stream"); }

void mgpuStreamWaitEvent(void *stream, void *event)
{
    KEPT(cu.stream_wait(stream, event, 0), "making a stream wait for an event");
}

void *mgpuEventCreate(void)
{
    void *event = NULL;
    KEPT(cu.event_create(&event, EVENT_DISABLE_TIMING), "creating an event");
    return event;
}

void mgpuEventDestroy(void *event) { KEPT(cu.event_destroy(event), "destroying an event"); }

void mgpuEventSynchronize(void *event) { KEPT(cu.event_synchronize(event), "waiting for an event"); }

void mgpuEventRecord(void *event, void *stream) { KEPT(cu.event_record(event, stream), "recording an event"); }

void *mgpuMemAlloc(uint64_t bytes, void *stream, bool host_shared)
{
    (void)stream;
    (void)host_shared; /* never managed memory */
    uint64_t address = 0;
    KEPT(cu.alloc(&address, bytes), "allocating device memory");
    return (void *)(uintptr_t)address;
}

void mgpuMemFree(void *address, void *stream)
{
    (void)stream;
    KEPT(fc_cuda.row.free((uint64_t)(uintptr_t)address), "freeing device memory");
}

void mgpuMemcpy(void *destination, void *source, size_t bytes, void *stream)
{
    KEPT(cu.copy((uint64_t)(uintptr_t)destination, (uint64_t)(uintptr_t)source, bytes, stream), "an asynchronous copy");
}

void mgpuMemset32(void *address, unsigned word, size_t count, void *stream)
{
    KEPT(cu.fill32((uint64_t)(uintptr_t)address, word, count, stream), "an asynchronous fill");
}

void mgpuMemset16(void *address, unsigned short word, size_t count, void *stream)
{
    KEPT(cu.fill16((uint64_t)(uintptr_t)address, word, count, stream), "an asynchronous fill");
}
