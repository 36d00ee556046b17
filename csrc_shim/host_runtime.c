/* SPDX-License-Identifier: Apache-2.0
 *
 * The host target's scheduler: fibers, block barrier and warp shuffles.
 *
 * A worker (one OS thread inside one launch) owns whole blocks. It starts a block's threads one by one, runs each until
 * it ends or waits, and takes a further block only when all it has are waiting: so blocks that wait for each other
 * are all resident in the end, and blocks that do not wait reuse one block's stacks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "host_internal.h"

/* ---- stacks that fc_switch can resume */

enum { FC_DEFAULT_MXCSR = 0x1f80, FC_DEFAULT_X87 = 0x37f };

/* Kernels start with default rounding and denormals, whatever the launching thread has set. */
static void prepare_stack(fc_fiber *fiber) {
    uint64_t *sp = (uint64_t *)((uintptr_t)fiber & ~(uintptr_t)63);
    *--sp = (uint64_t)fc_fiber_entry;
    *--sp = 0;               /* rbp */
    *--sp = 0;               /* rbx */
    *--sp = (uint64_t)fiber; /* r12 */
    *--sp = 0;               /* r13 */
    *--sp = 0;               /* r14 */
    *--sp = 0;               /* r15 */
    *--sp = (uint64_t)FC_DEFAULT_X87 << 32 | FC_DEFAULT_MXCSR;
    fiber->sp = sp;
}

/* ---- queues */

static void push(fc_queue *queue, fc_fiber *fiber) {
    fiber->next = NULL;
    if (queue->tail)
        queue->tail->next = fiber;
    else
        queue->head = fiber;
    queue->tail = fiber;
    queue->count++;
}

static void push_front(fc_queue *queue, fc_fiber *fiber) {
    fiber->next = queue->head;
    queue->head = fiber;
    if (!queue->tail)
        queue->tail = fiber;
    queue->count++;
}

static fc_fiber *pop(fc_queue *queue) {
    fc_fiber *fiber = queue->head;
    if (fiber) {
        queue->head = fiber->next;
        if (!queue->head)
            queue->tail = NULL;
        queue->count--;
    }
    return fiber;
}

/* ---- what fibers do */

static void suspend(fc_fiber *fiber) {
    fc_switch(&fiber->sp, fiber->worker->sp);
}

static _Atomic int launch_order = FC_HOST_FAIR;

void fc_host_set_order(int32_t order) {
    atomic_store(&launch_order, order);
}

int fc_launch_order(void) {
    return atomic_load(&launch_order);
}

/* In a fair order behind all that are ready; else the warp goes on after its shuffle. */
static void wake(fc_fiber *fiber) {
    fiber->waiting = FC_RUNNABLE;
    if (fiber->worker->launch->order == FC_HOST_FAIR)
        push(&fiber->worker->ready, fiber);
    else
        push_front(&fiber->worker->ready, fiber);
}

/* All of a block's threads wait in its barrier. What is pushed to the front last runs first. */
static void wake_by_warps(fc_block *block, fc_worker *worker) {
    uint32_t n = block->num_warps, first = 0;
    if (worker->launch->order == FC_HOST_ROTATE)
        first = worker->turns++ % n;
    block->barrier = (fc_queue){0};
    for (uint32_t i = n; i-- > 0;) {
        uint32_t place = (first + i) % n;
        fc_warp *warp = block->warps + (worker->launch->order == FC_HOST_LAST_WARP ? n - 1 - place : place);
        for (uint32_t lane = warp->lanes; lane-- > 0;)
            if (warp->lane[lane])
                wake(warp->lane[lane]);
    }
}

static fc_warp *warp_of(const fc_fiber *fiber) {
    return fiber->block->warps + fiber->self.warp;
}

static void try_barrier(fc_block *block, uint32_t threads) {
    if (!block->barrier.count || block->barrier.count + block->finished != threads)
        return;
    for (uint32_t i = 0; i < block->num_warps; i++)
        block->warps[i].at_barrier = 0;
    fc_worker *worker = block->barrier.head->worker;
    if (worker->launch->order != FC_HOST_FAIR) {
        wake_by_warps(block, worker);
        return;
    }
    for (fc_fiber *fiber; (fiber = pop(&block->barrier));)
        wake(fiber);
}

/* A shuffle is done when all lanes take part, or have ended, or wait in the block barrier (a divergent branch). */
static void try_shuffle(fc_warp *warp) {
    if (!warp->in_shuffle || warp->in_shuffle + warp->at_barrier + warp->finished != warp->lanes)
        return;
    uint64_t ballot = 0;
    fc_fiber *first = NULL;
    uint64_t values[FC_HOST_MAX_WARP];
    for (uint32_t lane = 0; lane < warp->lanes; lane++) {
        fc_fiber *fiber = warp->lane[lane];
        if (!fiber || fiber->waiting != FC_IN_SHUFFLE)
            continue;
        values[lane] = fiber->exchange.value;
        ballot |= (uint64_t)(values[lane] & 1) << lane;
        first = first ? first : fiber;
    }
    for (uint32_t lane = 0; lane < warp->lanes; lane++) {
        fc_fiber *fiber = warp->lane[lane];
        if (!fiber || fiber->waiting != FC_IN_SHUFFLE)
            continue;
        int32_t width = fiber->width, begin = (int32_t)lane / width * width, from = (int32_t)lane;
        switch (fiber->mode) {
        case FC_HOST_XOR: from = (int32_t)lane ^ fiber->offset; break;
        case FC_HOST_UP: from = (int32_t)lane - fiber->offset; break;
        case FC_HOST_DOWN: from = (int32_t)lane + fiber->offset; break;
        case FC_HOST_IDX: from = fiber->offset, begin = 0; break;
        }
        int32_t end = (int32_t)lane / width * width + width;
        int inside = from >= begin && from < end && from < (int32_t)warp->lanes;
        fc_fiber *source = inside ? warp->lane[from] : NULL;
        if (fiber->mode == FC_HOST_BALLOT)
            fiber->exchange = (fc_host_shuffled){ballot, 1};
        else if (fiber->mode == FC_HOST_FIRST)
            fiber->exchange = (fc_host_shuffled){values[first->self.lane], 1};
        else if (source && (source->waiting == FC_IN_SHUFFLE))
            fiber->exchange = (fc_host_shuffled){values[from], 1};
        else
            fiber->exchange.valid = 0;
    }
    warp->in_shuffle = 0;
    for (uint32_t lane = 0; lane < warp->lanes; lane++)
        if (warp->lane[lane] && warp->lane[lane]->waiting == FC_IN_SHUFFLE)
            wake(warp->lane[lane]);
}

void fc_host_barrier(fc_host_thread *self) {
    fc_fiber *fiber = (fc_fiber *)self;
    fiber->waiting = FC_AT_BARRIER;
    fiber->worker->progress = 1;
    push(&fiber->block->barrier, fiber);
    warp_of(fiber)->at_barrier++;
    try_shuffle(warp_of(fiber));
    try_barrier(fiber->block, fiber->worker->launch->threads);
    suspend(fiber);
}

fc_host_shuffled fc_host_shuffle(fc_host_thread *self, uint64_t value, int32_t offset, int32_t width, int32_t mode) {
    fc_fiber *fiber = (fc_fiber *)self;
    fiber->exchange = (fc_host_shuffled){value, 0};
    fiber->offset = offset;
    fiber->width = width > 0 ? width : (int32_t)self->warp_size;
    fiber->mode = mode;
    fiber->waiting = FC_IN_SHUFFLE;
    fiber->worker->progress = 1;
    warp_of(fiber)->in_shuffle++;
    try_shuffle(warp_of(fiber));
    suspend(fiber);
    return fiber->exchange;
}

static uint64_t look(const void *address, int32_t bytes) {
    uint64_t bits = 0, more = 0;
    switch (bytes) {
    case 1: memcpy(&bits, address, 1); break;
    case 2: memcpy(&bits, address, 2); break;
    case 4: memcpy(&bits, address, 4); break;
    case 8: memcpy(&bits, address, 8); break;
    default:
        for (int32_t at = 0; at < bytes; at += 8) {
            more = 0;
            memcpy(&more, (const char *)address + at, bytes - at < 8 ? (size_t)(bytes - at) : 8);
            bits = bits * 0x9e3779b97f4a7c15u + more;
        }
    }
    return bits;
}

void fc_host_yield(fc_host_thread *self, const void *address, int32_t bytes) {
    fc_fiber *fiber = (fc_fiber *)self;
    fc_worker *worker = fiber->worker;
    fc_weak_chance(worker);
    fc_weak_settle(worker, (uint64_t)address, (uint64_t)bytes);
    if (!fiber->looks) /* what an earlier thread saw on this stack does not count */
        memset(fiber->watch, 0, sizeof fiber->watch);
    uint64_t at = (uint64_t)address, bits = look(address, bytes);
    fc_watch *set = fiber->watch[((at >> 2) * 0x9e3779b97f4a7c15u) >> 60], *known = NULL;
    for (int way = 0; way < FC_WATCH_WAYS && !known; way++)
        if (set[way].address == at)
            known = set + way;
    if (!known || known->bits != bits) {
        uint32_t turn = ++fiber->looks;
        if (!known)
            known = set + turn % FC_WATCH_WAYS;
        *known = (fc_watch){at, bits};
        worker->progress = 1;
        if (turn % 64) /* a fiber whose words keep changing lets others run now and then, too */
            return;
    }
    push(&worker->spinning, fiber);
    suspend(fiber);
}

int64_t fc_host_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void fc_host_printf(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    fflush(stdout);
}

/* ---- starting and ending threads */

/* Gives `fiber` the next thread of the block that is being started. */
static void assign_thread(fc_worker *worker, fc_fiber *fiber) {
    fc_launch *launch = worker->launch;
    fc_block *block = worker->starting;
    uint32_t t = block->started++;
    fc_host_thread *self = &fiber->self;
    self->thread[0] = t % launch->block[0];
    self->thread[1] = t / launch->block[0] % launch->block[1];
    self->thread[2] = t / launch->block[0] / launch->block[1];
    memcpy(self->block, block->index, sizeof self->block);
    memcpy(self->block_dim, launch->block, sizeof self->block_dim);
    memcpy(self->grid_dim, launch->grid, sizeof self->grid_dim);
    self->lane = t % launch->warp_size;
    self->warp = t / launch->warp_size;
    self->num_warps = block->num_warps;
    self->warp_size = launch->warp_size;
    self->shared = block->shared;
    fiber->block = block;
    fiber->worker = worker;
    fiber->serial = ++worker->serials;
    fiber->looks = 0;
    fiber->waiting = FC_RUNNABLE;
    block->warps[self->warp].lane[self->lane] = fiber;
    if (block->started == launch->threads)
        worker->starting = NULL;
}

static void end_thread(fc_worker *worker, fc_fiber *fiber) {
    fc_block *block = fiber->block;
    fc_warp *warp = warp_of(fiber);
    worker->progress = 1;
    warp->lane[fiber->self.lane] = NULL;
    warp->finished++;
    block->finished++;
    try_shuffle(warp);
    try_barrier(block, worker->launch->threads);
    if (block->finished == worker->launch->threads) {
        block->next = worker->blocks;
        worker->blocks = block;
        worker->live_blocks--;
    }
}

void fc_fiber_main(fc_fiber *fiber) {
    fc_worker *worker = fiber->worker; /* a fiber's stack serves one worker at a time, but many threads */
    for (;;) {
        worker->launch->entry(&fiber->self, worker->launch->params);
        end_thread(worker, fiber);
        if (worker->ready.head || !worker->starting)
            break;
        assign_thread(worker, fiber); /* the next thread runs on this stack at once */
    }
    fiber->next = worker->stacks;
    worker->stacks = fiber;
    suspend(fiber);
}

static fc_fiber *start_thread(fc_worker *worker) {
    if (!worker->starting)
        return NULL;
    fc_fiber *fiber = worker->stacks;
    if (fiber) {
        worker->stacks = fiber->next;
    } else {
        fiber = fc_stack_take();
        if (!fiber) {
            atomic_store(&worker->launch->failed, errno ? errno : ENOMEM);
            return NULL;
        }
        fiber->owned = worker->owned_stacks;
        worker->owned_stacks = fiber;
    }
    assign_thread(worker, fiber);
    prepare_stack(fiber);
    return fiber;
}

static size_t aligned(size_t bytes) {
    return (bytes + FC_SHARED_ALIGN - 1) & ~(size_t)(FC_SHARED_ALIGN - 1);
}

static int take_block(fc_worker *worker) {
    fc_launch *launch = worker->launch;
    if (atomic_load(&launch->next) >= launch->total)
        return 0;
    int64_t number = atomic_fetch_add(&launch->next, 1);
    if (number >= launch->total)
        return 0;
    uint32_t num_warps = (launch->threads + launch->warp_size - 1) / launch->warp_size;
    size_t head = aligned(sizeof(fc_block) + num_warps * sizeof(fc_warp));
    fc_block *block = worker->blocks;
    if (block) {
        worker->blocks = block->next;
    } else {
        block = aligned_alloc(FC_SHARED_ALIGN, head + aligned(launch->shared_bytes));
        if (!block) {
            atomic_store(&launch->failed, ENOMEM);
            return 0;
        }
        block->owned = worker->owned_blocks;
        worker->owned_blocks = block;
    }
    fc_block *owned = block->owned;
    memset(block, 0, head);
    block->owned = owned;
    block->index[0] = (uint32_t)(number % launch->grid[0]);
    block->index[1] = (uint32_t)(number / launch->grid[0] % launch->grid[1]);
    block->index[2] = (uint32_t)(number / launch->grid[0] / launch->grid[1]);
    block->num_warps = num_warps;
    block->shared = (char *)block + head;
    for (uint32_t i = 0; i < num_warps; i++) {
        uint32_t left = launch->threads - i * launch->warp_size;
        block->warps[i].lanes = left < launch->warp_size ? left : launch->warp_size;
    }
    worker->starting = block;
    worker->live_blocks++;
    return 1;
}

/* ---- the scheduler */

static void resume(fc_worker *worker, fc_fiber *fiber) {
    fc_switch(&worker->sp, fiber->sp);
}

/* Everything here waits for memory that others write: give the core away, for longer and longer, but never for more
 * than about an eighth of the time waited so far. */
static void idle(fc_worker *worker) {
    enum { FC_YIELD_TURNS = 64, FC_TURNS_A_DOUBLING = 8, FC_DOUBLINGS = 9, FC_SLACK_NS = 1000 };
    uint32_t turn = worker->idle_turns++;
    for (uint32_t i = 0; i <= turn / FC_YIELD_TURNS; i++)
        fc_weak_land_one(worker);
    if (turn < FC_YIELD_TURNS) {
        sched_yield();
        return;
    }
    if (!worker->slack_ns) { /* the default slack of 50 us would be added to every short sleep */
        worker->slack_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
        prctl(PR_SET_TIMERSLACK, FC_SLACK_NS, 0, 0, 0);
    }
    uint32_t doublings = (turn - FC_YIELD_TURNS) / FC_TURNS_A_DOUBLING;
    nanosleep(&(struct timespec){0, 1000l << (doublings < FC_DOUBLINGS ? doublings : FC_DOUBLINGS)}, NULL);
}

static void run_blocks(fc_worker *worker) {
    while (!atomic_load_explicit(&worker->launch->failed, memory_order_relaxed)) {
        fc_fiber *fiber = pop(&worker->ready);
        if (!fiber)
            fiber = start_thread(worker);
        if (fiber) {
            worker->idle_turns = 0;
            resume(worker, fiber);
            continue;
        }
        worker->progress = 0;
        for (size_t left = worker->spinning.count; left && !worker->ready.head; left--)
            resume(worker, pop(&worker->spinning));
        if (worker->progress) {
            worker->idle_turns = 0;
            continue;
        }
        if (take_block(worker))
            continue;
        if (!worker->live_blocks)
            return;
        idle(worker);
    }
}

void fc_join_launch(fc_launch *launch) {
    fc_worker worker = {.launch = launch};
    fc_weak_begin(&worker);
    run_blocks(&worker);
    if (worker.slack_ns > 0)
        prctl(PR_SET_TIMERSLACK, (unsigned long)worker.slack_ns, 0, 0, 0);
    fc_weak_end(&worker);
    fc_stacks_return(worker.owned_stacks);
    while (worker.owned_blocks) {
        fc_block *block = worker.owned_blocks;
        worker.owned_blocks = block->owned;
        free(block);
    }
}
