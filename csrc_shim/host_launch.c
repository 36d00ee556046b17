/* SPDX-License-Identifier: Apache-2.0
 *
 * The host target's launches: the checks, the OS threads that help, and the error that is left for Python.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host_internal.h"

/* ---- the pool: OS threads that help with a grid's blocks while cores are free */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, left; /* a launch was queued or a core came free; a helper left a launch */
    fc_launch *queue;
    int started;
    _Atomic int limit;   /* 0: not known yet */
    _Atomic int running; /* workers of all launches */
    _Atomic int queued;  /* launches in the queue */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

static int pool_limit(void) {
    int limit = atomic_load(&pool.limit);
    if (!limit) {
        cpu_set_t cores; /* those that this process may use */
        limit = sched_getaffinity(0, sizeof cores, &cores) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&cores);
        atomic_store(&pool.limit, limit);
    }
    return limit;
}

static fc_launch *launch_to_help(void) {
    if (atomic_load(&pool.running) >= pool_limit())
        return NULL;
    for (fc_launch *launch = pool.queue; launch; launch = launch->queued)
        if (atomic_load(&launch->next) < launch->total && !atomic_load(&launch->failed))
            return launch;
    return NULL;
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        fc_launch *launch = launch_to_help();
        if (!launch) {
            pthread_cond_wait(&pool.work, &pool.lock);
            continue;
        }
        launch->helpers++;
        atomic_fetch_add(&pool.running, 1);
        pthread_mutex_unlock(&pool.lock);
        fc_join_launch(launch);
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_sub(&pool.running, 1);
        launch->helpers--;
        pthread_cond_broadcast(&pool.left);
    }
    return NULL;
}

static void forked(void) { /* in the child: the helpers and the launches are the parent's */
    fc_weak_forked();
    fc_stacks_forked();
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.left, NULL);
    pool.queue = NULL;
    pool.started = 0;
    atomic_store(&pool.running, 0);
    atomic_store(&pool.queued, 0);
}

static void __attribute__((constructor)) watch_forks(void) {
    pthread_atfork(NULL, NULL, forked);
}

static void start_helpers(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the process's own threads */
    while (pool.started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL))
            break; /* the launching thread runs all blocks alone */
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void ask_for_help(fc_launch *launch) {
    pthread_mutex_lock(&pool.lock);
    launch->queued = pool.queue;
    pool.queue = launch;
    atomic_fetch_add(&pool.queued, 1);
    if (pool.started < pool_limit() - 1)
        start_helpers(pool_limit() - 1);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
}

static void wait_for_helpers(fc_launch *launch) {
    pthread_mutex_lock(&pool.lock);
    for (fc_launch **at = &pool.queue; *at; at = &(*at)->queued)
        if (*at == launch) {
            *at = launch->queued;
            atomic_fetch_sub(&pool.queued, 1);
            break;
        }
    while (launch->helpers)
        pthread_cond_wait(&pool.left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

void fc_host_set_threads(int32_t threads) {
    atomic_store(&pool.limit, threads > 0 ? threads : 0);
}

/* ---- launch */

static __thread char launch_error[512];

static void __attribute__((format(printf, 2, 3))) fail(const char *name, const char *format, ...) {
    if (launch_error[0])
        return; /* the first error is the one to tell */
    int length = snprintf(launch_error, sizeof launch_error, "host launch of kernel %s: ", name);
    va_list args;
    va_start(args, format);
    vsnprintf(launch_error + length, sizeof launch_error - (size_t)length, format, args);
    va_end(args);
    fprintf(stderr, "flycomm: %s\n", launch_error);
}

const char *fc_host_take_error(void) {
    static __thread char taken[sizeof launch_error];
    if (!launch_error[0])
        return NULL;
    memcpy(taken, launch_error, sizeof taken);
    launch_error[0] = 0;
    return taken;
}

static int geometry_ok(const char *name, const int64_t grid[3], const int64_t block[3], int64_t shared) {
    const int64_t most = 0x7fffffff;
    for (int i = 0; i < 3; i++)
        if (grid[i] < 0 || grid[i] > most || block[i] < 1 || block[i] > FC_HOST_MAX_THREADS) {
            fail(name, "grid (%lld, %lld, %lld) of blocks (%lld, %lld, %lld) is not one: a grid side is 0 to 2147483647 "
                 "blocks, a block side 1 to %d threads", (long long)grid[0], (long long)grid[1], (long long)grid[2],
                 (long long)block[0], (long long)block[1], (long long)block[2], FC_HOST_MAX_THREADS);
            return 0;
        }
    int64_t threads = block[0] * block[1] * block[2];
    if (threads > FC_HOST_MAX_THREADS) {
        fail(name, "a block of %lld threads is over the limit of %d; launch more, smaller blocks", (long long)threads,
             FC_HOST_MAX_THREADS);
        return 0;
    }
    if (shared < 0 || shared > FC_HOST_MAX_SHARED) {
        fail(name, "%lld bytes of shared memory a block are over the limit of %d; allocate less", (long long)shared,
             FC_HOST_MAX_SHARED);
        return 0;
    }
    if (grid[0] * grid[1] > most || grid[0] * grid[1] * grid[2] > most) {
        fail(name, "a grid of (%lld, %lld, %lld) blocks is over the limit of 2147483647 in all; loop in the kernel",
             (long long)grid[0], (long long)grid[1], (long long)grid[2]);
        return 0;
    }
    return 1;
}

void fc_host_launch(fc_host_kernel entry, void **params, int64_t grid_x, int64_t grid_y, int64_t grid_z,
                    int64_t block_x, int64_t block_y, int64_t block_z, int64_t static_shared, int64_t dynamic_shared,
                    int32_t warp_size, const char *name) {
    const int64_t grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    if (!geometry_ok(name, grid, block, dynamic_shared < 0 ? dynamic_shared : static_shared + dynamic_shared))
        return;
    fc_launch launch = {
        .entry = entry,
        .params = params,
        .name = name,
        .grid = {(uint32_t)grid_x, (uint32_t)grid_y, (uint32_t)grid_z},
        .block = {(uint32_t)block_x, (uint32_t)block_y, (uint32_t)block_z},
        .threads = (uint32_t)(block_x * block_y * block_z),
        .warp_size = (uint32_t)warp_size,
        .shared_bytes = (size_t)(static_shared + dynamic_shared),
        .total = grid_x * grid_y * grid_z,
        .seed = fc_weak_launch_seed(),
        .order = fc_launch_order(),
    };
    if (!launch.total)
        return;
    launch.remote = fc_ranges_acquire();
    atomic_fetch_add(&pool.running, 1);
    int shared_work = launch.total > 1 && pool_limit() > 1;
    if (shared_work)
        ask_for_help(&launch);
    fc_join_launch(&launch);
    if (shared_work)
        wait_for_helpers(&launch);
    atomic_fetch_sub(&pool.running, 1);
    if (atomic_load(&pool.queued)) { /* the core that comes free may help another launch */
        pthread_mutex_lock(&pool.lock);
        pthread_cond_signal(&pool.work);
        pthread_mutex_unlock(&pool.lock);
    }
    fc_ranges_release(launch.remote);
    if (launch.failed)
        fail(name, "there are no more stacks (%s) for %lld blocks of %u threads that wait for each other; up to %d threads "
             "of a process can wait at one time: launch fewer", strerror(launch.failed), (long long)launch.total,
             launch.threads, FC_HOST_MAX_FIBERS);
}
