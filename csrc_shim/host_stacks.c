/* SPDX-License-Identifier: Apache-2.0
 *
 * Fibers' stacks: each one mapping with a guard page below, reused last in, first out while its pages are warm.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "host_internal.h"

enum { FC_GUARD_BYTES = 4096, FC_STACKS_KEPT = 8192 };

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static fc_fiber *free_stacks;
static size_t num_free_stacks, num_stacks;

static char *mapping_of(fc_fiber *fiber) {
    return (char *)fiber + sizeof(fc_fiber) - FC_STACK_BYTES;
}

static fc_fiber *map_stack(void) {
    char *base = mmap(NULL, FC_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (mprotect(base, FC_GUARD_BYTES, PROT_NONE)) {
        int error = errno;
        munmap(base, FC_STACK_BYTES);
        errno = error;
        return NULL;
    }
    return (fc_fiber *)(base + FC_STACK_BYTES - sizeof(fc_fiber));
}

fc_fiber *fc_stack_take(void) {
    pthread_mutex_lock(&stacks_lock);
    fc_fiber *fiber = free_stacks;
    if (fiber) {
        free_stacks = fiber->next;
        num_free_stacks--;
    } else if (num_stacks >= FC_HOST_MAX_FIBERS) {
        errno = EAGAIN;
    } else if ((fiber = map_stack())) {
        num_stacks++;
    }
    pthread_mutex_unlock(&stacks_lock);
    return fiber;
}

void fc_stacks_return(fc_fiber *owned) {
    fc_fiber *surplus = NULL;
    pthread_mutex_lock(&stacks_lock);
    while (owned) {
        fc_fiber *fiber = owned;
        owned = fiber->owned;
        if (num_free_stacks >= FC_STACKS_KEPT) {
            fiber->next = surplus;
            surplus = fiber;
            num_stacks--;
            continue;
        }
        fiber->next = free_stacks;
        free_stacks = fiber;
        num_free_stacks++;
    }
    pthread_mutex_unlock(&stacks_lock);
    while (surplus) {
        fc_fiber *fiber = surplus;
        surplus = fiber->next;
        munmap(mapping_of(fiber), FC_STACK_BYTES);
    }
}

void fc_stacks_forked(void) {
    pthread_mutex_init(&stacks_lock, NULL);
    free_stacks = NULL; /* the list may have been half changed; the mappings are left alone */
    num_free_stacks = 0;
}
