/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the host runtime share: fibers, blocks, workers and launches.
 */
#ifndef FLYCOMM_HOST_INTERNAL_H
#define FLYCOMM_HOST_INTERNAL_H

#include <stdatomic.h>

#include "host_runtime.h"

enum {
    FC_WATCH_SETS = 16,
    FC_WATCH_WAYS = 4,
    FC_STACK_BYTES = 128 << 10, /* of address space; touched pages count */
    FC_SHARED_ALIGN = 1024, /* what the start of shared memory is aligned to; no array asks for more */
    FC_PENDING_MAX = 256,
    FC_GRANULES = 8192
};

/* What a fiber saw at an address it polls: unchanged means that it spins. */
typedef struct fc_watch {
    uint64_t address, bits;
} fc_watch;

/* One GPU thread. It lies at the top of its own stack mapping. */
typedef struct fc_fiber {
    fc_host_thread self; /* first: generated code holds this pointer */
    void *sp;
    struct fc_fiber *next;  /* in a queue, or in a free list */
    struct fc_fiber *owned; /* next of all the stacks that one worker holds */
    struct fc_block *block;
    struct fc_worker *worker;
    fc_host_shuffled exchange;
    int32_t offset, width, mode;
    uint32_t waiting; /* enum fc_waiting */
    uint32_t looks;
    uint64_t serial; /* of the GPU thread it runs now, among those of its worker */
    fc_watch watch[FC_WATCH_SETS][FC_WATCH_WAYS];
} fc_fiber;

enum fc_waiting { FC_RUNNABLE, FC_AT_BARRIER, FC_IN_SHUFFLE };

typedef struct fc_queue {
    fc_fiber *head, *tail;
    size_t count;
} fc_queue;

typedef struct fc_warp {
    uint32_t lanes, finished, at_barrier, in_shuffle;
    fc_fiber *lane[FC_HOST_MAX_WARP]; /* NULL: not started, or finished */
} fc_warp;

typedef struct fc_block {
    struct fc_block *next; /* free list */
    struct fc_block *owned;
    uint32_t index[3];
    uint32_t started, finished, num_warps;
    fc_queue barrier;
    char *shared;
    fc_warp warps[];
} fc_block;

/* A store of at most 8 bytes that has not landed. */
typedef struct fc_pending {
    uint64_t owner;    /* serial of its thread, which may have ended */
    uint64_t sequence; /* its place in program order */
    uint64_t address, value;
    uint32_t bytes;
} fc_pending;

typedef struct fc_buffer {
    uint16_t in_granule[FC_GRANULES]; /* stores that touch an aligned word of 8 bytes, by a hash of its address */
    uint64_t sequences;
    fc_pending store[FC_PENDING_MAX];
} fc_buffer;

typedef struct fc_ranges {
    int references;
    size_t count;
    struct fc_range {
        uint64_t begin, end;
    } range[];
} fc_ranges;

typedef struct fc_launch {
    fc_host_kernel entry;
    void **params;
    const char *name;
    uint32_t grid[3], block[3];
    uint32_t threads, warp_size;
    size_t shared_bytes;
    int64_t total;
    _Atomic int64_t next; /* first block that no worker has taken */
    _Atomic int failed;   /* an errno: stop and drop everything */
    _Atomic int workers;  /* that ever joined; numbers their random sequences */
    int helpers;          /* pool threads inside; under the pool's lock */
    struct fc_launch *queued;
    fc_ranges *remote;
    uint64_t seed;
    int order; /* enum fc_host_order */
} fc_launch;

/* One OS thread inside one launch. */
typedef struct fc_worker {
    fc_launch *launch;
    void *sp; /* the scheduler's */
    fc_queue ready, spinning;
    fc_fiber *stacks, *owned_stacks;
    fc_block *blocks, *owned_blocks;
    fc_block *starting; /* has threads that were not started yet */
    int64_t live_blocks;
    uint64_t serials;
    uint32_t turns; /* barriers that were passed, for FC_HOST_ROTATE */
    int progress; /* a fiber did more than find a polled word unchanged */
    uint32_t idle_turns;
    int slack_ns; /* the thread's own timer slack, once it was changed */
    fc_buffer *buffer; /* NULL until a store is kept back */
    uint32_t num_pending;
    uint32_t laziness; /* one in laziness + 1 chances lets a store land; a power of two less one */
    uint64_t random;
} fc_worker;

/* ---- host_switch.c */
void fc_switch(void **save, void *load); /* saves the stack pointer in *save and continues at load */
void fc_fiber_entry(void);               /* where a new stack continues: calls fc_fiber_main(r12) */

/* ---- host_runtime.c */
void fc_fiber_main(fc_fiber *fiber);
int fc_launch_order(void);
void fc_join_launch(fc_launch *launch); /* runs blocks until none is left to take and all taken are done */

/* ---- host_weak.c */
void fc_weak_begin(fc_worker *worker);
void fc_weak_end(fc_worker *worker);                                             /* everything lands */
void fc_weak_chance(fc_worker *worker);                                          /* maybe lets one store land */
void fc_weak_land_one(fc_worker *worker);                                        /* lets one land if there is any */
void fc_weak_drain(fc_worker *worker, uint64_t owner);                           /* all of one thread's */
void fc_weak_settle(fc_worker *worker, uint64_t address, uint64_t bytes);        /* all that overlap */
fc_ranges *fc_ranges_acquire(void);
void fc_ranges_release(fc_ranges *ranges);
uint64_t fc_weak_launch_seed(void);

void fc_weak_forked(void); /* in a forked child, where the parent's other threads held locks */

/* ---- host_stacks.c */
fc_fiber *fc_stack_take(void); /* NULL with errno */
void fc_stacks_return(fc_fiber *owned);
void fc_stacks_forked(void);

#endif
