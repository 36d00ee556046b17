/* SPDX-License-Identifier: Apache-2.0
 *
 * The host target's runtime: what kernels compiled for CPU cores call, and what its Python side calls.
 *
 * Every GPU thread is a fiber: a small stack, switched by hand. A block's fibers stay on one OS thread (a worker). The
 * thread that launches runs blocks itself until all are done, so that no launch depends on another thread's help.
 */
#ifndef FLYCOMM_HOST_RUNTIME_H
#define FLYCOMM_HOST_RUNTIME_H

#include "flycomm_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FC_HOST_MAX_THREADS = 1024,      /* of a block */
    FC_HOST_MAX_SHARED = 256 << 10,  /* bytes of a block */
    FC_HOST_MAX_WARP = 64,           /* threads */
    FC_HOST_MAX_FIBERS = 28 << 10    /* threads that wait at one time; two mappings each, of Linux's 65530 a process */
};

/* One GPU thread as generated code sees it: flycomm/targets/_host_lowering/_kernels.py loads these by offset. */
typedef struct fc_host_thread {
    uint32_t thread[3];    /* byte 0 */
    uint32_t block[3];     /* byte 12 */
    uint32_t block_dim[3]; /* byte 24 */
    uint32_t grid_dim[3];  /* byte 36 */
    uint32_t lane;         /* byte 48: position in its warp */
    uint32_t warp;         /* byte 52: warp in its block */
    uint32_t num_warps;    /* byte 56 */
    uint32_t warp_size;    /* byte 60 */
    char *shared;          /* byte 64: the block's shared memory: the static part, then the dynamic one */
} fc_host_thread;

typedef void (*fc_host_kernel)(fc_host_thread *self, void **params);

enum fc_host_shuffle_mode {
    FC_HOST_XOR = 0,
    FC_HOST_UP = 1,
    FC_HOST_DOWN = 2,
    FC_HOST_IDX = 3,
    FC_HOST_BALLOT = 4, /* the value is a predicate; the result has a bit for every lane that takes part and holds true */
    FC_HOST_FIRST = 5   /* the value of the lowest lane that takes part */
};

/* Which warp of a block runs on first after a block barrier. In a fair order all run in turn, up to the next shuffle. */
enum fc_host_order {
    FC_HOST_FAIR = 0,
    FC_HOST_FIRST_WARP = 1, /* warps one after the other, each up to the next barrier */
    FC_HOST_LAST_WARP = 2,  /* the last one first */
    FC_HOST_ROTATE = 3      /* begun by another warp after each barrier */
};

typedef struct fc_host_shuffled {
    uint64_t value; /* the own value where the source lane is outside its segment or does not take part */
    uint64_t valid; /* 1 when the value is the source lane's */
} fc_host_shuffled;

/* ---- called by generated code */

/* Run a grid and return when it is done. Bad geometry or a lack of stacks is left for fc_host_take_error(). */
FC_API void fc_host_launch(fc_host_kernel entry, void **params, int64_t grid_x, int64_t grid_y, int64_t grid_z,
                           int64_t block_x, int64_t block_y, int64_t block_z, int64_t static_shared,
                           int64_t dynamic_shared, int32_t warp_size, const char *name);
FC_API void fc_host_barrier(fc_host_thread *self);
FC_API fc_host_shuffled fc_host_shuffle(fc_host_thread *self, uint64_t value, int32_t offset, int32_t width,
                                        int32_t mode);
/* Before an atomic or volatile read of [address, +bytes): lets others run when it has not changed since the last look. */
FC_API void fc_host_yield(fc_host_thread *self, const void *address, int32_t bytes);
FC_API int64_t fc_host_clock(void); /* nanoseconds, monotonic */
FC_API void fc_host_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- called by generated code in the weak mode only */

/* A plain, volatile or relaxed store of `bytes` from `value`; one into a remote range is kept back. */
FC_API void fc_host_store(fc_host_thread *self, void *address, const void *value, int32_t bytes);
/* Before any other access: kept-back stores that overlap [address, +bytes) land first. */
FC_API void fc_host_settle(fc_host_thread *self, const void *address, int32_t bytes);
FC_API void fc_host_release(fc_host_thread *self); /* this fiber's kept-back stores land now, in order */

/* ---- called by the shim's memory code */
FC_API void fc_host_remote_add(uint64_t address, size_t bytes); /* a peer's memory was mapped here */
FC_API void fc_host_remote_remove(uint64_t address);

/* ---- called by Python */
FC_API const char *fc_host_take_error(void);        /* this OS thread's first launch error since the last call, or NULL */
FC_API void fc_host_set_weak_seed(uint64_t seed);   /* order in which kept-back stores land; used from the next launch */
FC_API void fc_host_set_order(int32_t order);       /* enum fc_host_order; used from the next launch */
FC_API void fc_host_set_threads(int32_t threads);   /* OS threads that may run blocks at one time; 0: the cores it may use */

#ifdef __cplusplus
}
#endif
#endif
