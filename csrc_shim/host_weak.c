/* SPDX-License-Identifier: Apache-2.0
 *
 * The weak mode: stores into peers' memory are kept back and land late and out of order, by a seed, until their fiber
 * releases or their kernel ends. x86 keeps stores in order, so without this a dropped release would never be seen.
 *
 * Stores that overlap land in program order. A store is split into pieces of 8 bytes, which land separately.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

/* ---- remote ranges: an immutable list in order of address, replaced at every change; a launch holds the one it began with */

static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static fc_ranges *ranges_now;

static void drop_locked(fc_ranges *ranges) {
    if (ranges && --ranges->references == 0)
        free(ranges);
}

/* Replaces the list by one without the range at `removed` (0: none) and with `added` in its place by address. */
static void change_ranges(uint64_t removed, struct fc_range added) {
    pthread_mutex_lock(&ranges_lock);
    size_t count = ranges_now ? ranges_now->count : 0;
    fc_ranges *changed = malloc(sizeof *changed + (count + 1) * sizeof changed->range[0]);
    if (!changed)
        abort(); /* a store that wrongly counts as local would hide the very bug the mode looks for */
    changed->references = 1;
    changed->count = 0;
    for (size_t i = 0; i < count; i++) {
        struct fc_range old = ranges_now->range[i];
        if (added.begin && added.begin < old.begin) {
            changed->range[changed->count++] = added;
            added.begin = 0;
        }
        if (old.begin != removed)
            changed->range[changed->count++] = old;
    }
    if (added.begin)
        changed->range[changed->count++] = added;
    drop_locked(ranges_now);
    ranges_now = changed;
    pthread_mutex_unlock(&ranges_lock);
}

void fc_host_remote_add(uint64_t address, size_t bytes) {
    change_ranges(0, (struct fc_range){address, address + bytes});
}

void fc_host_remote_remove(uint64_t address) {
    change_ranges(address, (struct fc_range){0, 0});
}

fc_ranges *fc_ranges_acquire(void) {
    pthread_mutex_lock(&ranges_lock);
    fc_ranges *ranges = ranges_now;
    if (ranges)
        ranges->references++;
    pthread_mutex_unlock(&ranges_lock);
    return ranges;
}

void fc_ranges_release(fc_ranges *ranges) {
    pthread_mutex_lock(&ranges_lock);
    drop_locked(ranges);
    pthread_mutex_unlock(&ranges_lock);
}

static int is_remote(const fc_ranges *ranges, uint64_t address) {
    size_t low = 0, high = ranges ? ranges->count : 0;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (address < ranges->range[middle].begin)
            high = middle;
        else if (address >= ranges->range[middle].end)
            low = middle + 1;
        else
            return 1;
    }
    return 0;
}

/* ---- the order: a xorshift sequence for every (seed, launching OS thread, its launch, worker) */

static pthread_mutex_t seed_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t weak_seed = 1, seedings = 1, threads_seen; /* under seed_lock */

void fc_host_set_weak_seed(uint64_t seed) {
    pthread_mutex_lock(&seed_lock);
    weak_seed = seed;
    seedings++; /* threads and launches are counted anew, so that a seed can be tried again */
    threads_seen = 0;
    pthread_mutex_unlock(&seed_lock);
}

static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t fc_weak_launch_seed(void) {
    static __thread uint64_t seeding, thread, launches;
    pthread_mutex_lock(&seed_lock);
    if (seeding != seedings) {
        seeding = seedings;
        thread = threads_seen++;
        launches = 0;
    }
    uint64_t seed = weak_seed;
    pthread_mutex_unlock(&seed_lock);
    return mixed(mixed(mixed(seed) + thread) + launches++);
}

static uint64_t next_random(fc_worker *worker) {
    uint64_t x = worker->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    worker->random = x;
    return (x * 0x2545f4914f6cdd1du) >> 32;
}

void fc_weak_begin(fc_worker *worker) {
    uint64_t number = (uint64_t)atomic_fetch_add(&worker->launch->workers, 1);
    worker->random = mixed(worker->launch->seed + number) | 1;
    worker->laziness = (4u << (2 * (next_random(worker) % 3))) - 1; /* one in 4, 16 or 64 */
}

void fc_weak_forked(void) {
    pthread_mutex_init(&ranges_lock, NULL);
    pthread_mutex_init(&seed_lock, NULL);
}

/* ---- stores that are kept back */

static void store_bytes(uint64_t address, const void *value, uint32_t bytes) {
    switch (bytes) { /* one instruction each, as the store would have been */
    case 1: memcpy((void *)address, value, 1); break;
    case 2: memcpy((void *)address, value, 2); break;
    case 4: memcpy((void *)address, value, 4); break;
    case 8: memcpy((void *)address, value, 8); break;
    case 16: memcpy((void *)address, value, 16); break;
    default: memcpy((void *)address, value, bytes);
    }
}

static int overlap(const fc_pending *store, uint64_t address, uint64_t bytes) {
    return store->address < address + bytes && address < store->address + store->bytes;
}

static uint16_t *granule(fc_buffer *buffer, uint64_t word) {
    return buffer->in_granule + ((word * 0x9e3779b97f4a7c15u) >> 51);
}

static void count(fc_buffer *buffer, const fc_pending *store, int change) {
    for (uint64_t word = store->address / 8; word <= (store->address + store->bytes - 1) / 8; word++)
        *granule(buffer, word) = (uint16_t)(*granule(buffer, word) + change);
}

/* False only if no more than `known` stores touch [address, +bytes). */
static int may_overlap(fc_buffer *buffer, uint64_t address, uint64_t bytes, int known) {
    for (uint64_t word = address / 8; word <= (address + bytes - 1) / 8; word++)
        if (*granule(buffer, word) > known)
            return 1;
    return 0;
}

/* The oldest store that must land before the one at `index`, or that one. */
static uint32_t oldest(const fc_worker *worker, uint32_t index) {
    const fc_pending *stores = worker->buffer->store;
    for (uint32_t i = 0; i < worker->num_pending; i++)
        if (stores[i].sequence < stores[index].sequence && overlap(stores + i, stores[index].address, stores[index].bytes)) {
            index = i;
            i = (uint32_t)-1;
        }
    return index;
}

/* Lands the store at `index`, or one that must land before it; the last store takes its place, which is returned. */
static uint32_t land(fc_worker *worker, uint32_t index) {
    fc_buffer *buffer = worker->buffer;
    if (may_overlap(buffer, buffer->store[index].address, buffer->store[index].bytes, 1))
        index = oldest(worker, index);
    fc_pending store = buffer->store[index];
    count(buffer, &store, -1);
    buffer->store[index] = buffer->store[--worker->num_pending];
    store_bytes(store.address, &store.value, store.bytes);
    return index;
}

void fc_weak_land_one(fc_worker *worker) {
    if (worker->num_pending)
        land(worker, (uint32_t)(next_random(worker) % worker->num_pending));
}

void fc_weak_chance(fc_worker *worker) {
    if (worker->num_pending && (next_random(worker) & worker->laziness) == 0)
        fc_weak_land_one(worker);
}

void fc_weak_drain(fc_worker *worker, uint64_t owner) {
    for (uint32_t i = 0; i < worker->num_pending;)
        if (worker->buffer->store[i].owner == owner) {
            uint32_t changed = land(worker, i);
            i = changed < i ? changed : i;
        } else {
            i++;
        }
}

void fc_weak_settle(fc_worker *worker, uint64_t address, uint64_t bytes) {
    if (!worker->num_pending || !may_overlap(worker->buffer, address, bytes, 0))
        return;
    for (uint32_t i = 0; i < worker->num_pending;)
        if (overlap(worker->buffer->store + i, address, bytes)) {
            uint32_t changed = land(worker, i);
            i = changed < i ? changed : i;
        } else {
            i++;
        }
}

void fc_weak_end(fc_worker *worker) {
    while (worker->num_pending)
        fc_weak_land_one(worker);
    free(worker->buffer);
}

void fc_host_settle(fc_host_thread *self, const void *address, int32_t bytes) {
    fc_weak_settle(((fc_fiber *)self)->worker, (uint64_t)address, (uint64_t)bytes);
}

void fc_host_release(fc_host_thread *self) {
    fc_fiber *fiber = (fc_fiber *)self;
    fc_weak_drain(fiber->worker, fiber->serial);
}

void fc_host_store(fc_host_thread *self, void *address, const void *value, int32_t bytes) {
    fc_fiber *fiber = (fc_fiber *)self;
    fc_worker *worker = fiber->worker;
    fc_weak_chance(worker);
    if (!is_remote(worker->launch->remote, (uint64_t)address)) {
        store_bytes((uint64_t)address, value, (uint32_t)bytes);
        return;
    }
    if (!worker->buffer && !(worker->buffer = calloc(1, sizeof *worker->buffer)))
        abort();
    fc_buffer *buffer = worker->buffer;
    for (int32_t at = 0; at < bytes; at += 8) {
        if (worker->num_pending == FC_PENDING_MAX)
            fc_weak_land_one(worker);
        fc_pending *store = buffer->store + worker->num_pending++;
        uint32_t piece = bytes - at < 8 ? (uint32_t)(bytes - at) : 8;
        *store = (fc_pending){fiber->serial, ++buffer->sequences, (uint64_t)address + (uint64_t)at, 0, piece};
        memcpy(&store->value, (const char *)value + at, piece);
        count(buffer, store, 1);
    }
}
