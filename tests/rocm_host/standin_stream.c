/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams of the stand-in: a queue of launches and a thread that runs them in order. The null stream is one a device.
 */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct launch *first, *last;
    int device, busy, ending, code;
};

static struct stream *null_streams[MAX_DEVICES];

static void *serve(void *argument)
{
    struct stream *stream = argument;
    const char *(*take_error)(void) = (const char *(*)(void))standin_host("fc_host_take_error");
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->first == NULL && !stream->ending)
            pthread_cond_wait(&stream->changed, &stream->lock);
        if (stream->first == NULL)
            break;
        struct launch *launch = stream->first;
        stream->first = launch->next;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        launch->run(launch);
        const char *error = take_error();
        if (error != NULL)
            standin_say("%s", error);
        free(launch);
        __atomic_add_fetch(&standin_counts.launches, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        if (error != NULL)
            stream->code = LAUNCH_FAILURE;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    free(stream);
    return NULL;
}

static struct stream *make(int device)
{
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    stream->device = device;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&thread, NULL, serve, stream);
    pthread_detach(thread);
    return stream;
}

static struct stream *of(void *handle)
{
    if (handle != NULL)
        return handle;
    pthread_mutex_lock(&standin_lock);
    struct stream **null = &null_streams[standin_current()];
    if (*null == NULL)
        *null = make(standin_current());
    pthread_mutex_unlock(&standin_lock);
    return *null;
}

int standin_stream_device(void *stream) { return of(stream)->device; }

void standin_enqueue(void *handle, struct launch *launch)
{
    struct stream *stream = of(handle);
    launch->next = NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->first == NULL)
        stream->first = launch;
    else
        stream->last->next = launch;
    stream->last = launch;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

int standin_drain(void *handle)
{
    struct stream *stream = of(handle);
    pthread_mutex_lock(&stream->lock);
    while (stream->first != NULL || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    int code = stream->code;
    stream->code = SUCCESS;
    pthread_mutex_unlock(&stream->lock);
    return code;
}

HIP int hipStreamCreate(void **stream)
{
    BEGIN;
    *stream = make(standin_current());
    __atomic_add_fetch(&standin_counts.streams, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

HIP int hipStreamDestroy(void *handle)
{
    BEGIN;
    struct stream *stream = handle;
    if (stream == NULL)
        return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    __atomic_sub_fetch(&standin_counts.streams, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

HIP int hipStreamSynchronize(void *stream)
{
    BEGIN;
    return standin_drain(stream);
}

/* Streams of a device other than the null stream are waited for by those who made them. */
HIP int hipDeviceSynchronize(void)
{
    BEGIN;
    return standin_drain(NULL);
}
