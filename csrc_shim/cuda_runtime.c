/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches of the cuda target, their errors, and occupancy; cuda_runtime.h is the contract.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda_internal.h"

enum { LAUNCH_CLUSTER_DIMENSION = 4, LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6 }; /* CUlaunchAttributeID */
enum { EDGES_IN_GRAPHS = 12030 }; /* of the driver: before 12.3 such a launch would end a capture */

typedef struct launch_attribute { /* CUlaunchAttribute */
    int id;
    int padding;
    union {
        struct {
            unsigned x, y, z;
        } cluster;
        int allowed; /* programmatic stream serialization */
        char bytes[64];
    } value;
} launch_attribute;

typedef struct launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

static struct {
    int (*function_set)(void *function, int attribute, int value);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra);
    int (*occupancy)(int *blocks, void *function, int threads, size_t shared_bytes);
    int (*launch_ex)(const launch_config *config, void *function, void **parameters, void **extra); /* or NULL */
    int (*version)(int *version);
} cu;

static const struct fc_symbol symbols[] = {
    {"cuFuncSetAttribute", &cu.function_set},
    {"cuLaunchKernel", &cu.launch},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", &cu.occupancy},
    {"cuDriverGetVersion", &cu.version},
    {NULL, NULL},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int loaded = -1;

static void load(void)
{
    loaded = fc_driver_load(&fc_cuda, symbols);
    void *newer = dlsym(fc_cuda.library, "cuLaunchKernelEx");
    memcpy(&cu.launch_ex, &newer, sizeof newer);
}

static _Thread_local bool failed;
static _Thread_local char first_error[1024];

const char *fc_cuda_take_error(void)
{
    const char *error = failed ? first_error : NULL;
    failed = false;
    return error;
}

void fc_cuda_keep_error(void)
{
    if (failed)
        return;
    failed = true;
    snprintf(first_error, sizeof first_error, "%s", fc_last_error());
    fprintf(stderr, "flycomm: %s\n", first_error); /* an ordinary FlyDSL call asks nobody */
}

bool fc_cuda_kept(int code, const char *what)
{
    if (code == 0)
        return true;
    fc_driver_fail(&fc_cuda, code, "%s failed", what);
    fc_cuda_keep_error();
    return false;
}

fc_cuda_kernel *mgpuModuleGetFunction(fc_cuda_module *module, const char *name)
{
    if (module == NULL)
        return NULL; /* its error is kept already */
    fc_cuda_kernel *kernel = fc_cuda_kernel_here(module, name);
    if (kernel != NULL && pthread_once(&once, load) == 0 && loaded == 0)
        return kernel;
    fc_cuda_keep_error();
    return NULL;
}

/* More than 48 KiB of dynamic shared memory has to be asked for once a kernel. */
static int allow_shared(fc_cuda_kernel *kernel, int32_t bytes)
{
    if (bytes <= atomic_load_explicit(&kernel->dynamic_limit, memory_order_relaxed))
        return 0;
    int code = cu.function_set(kernel->function, FC_CUDA_DYNAMIC_SHARED_LIMIT, bytes);
    if (code == 0)
        atomic_store_explicit(&kernel->dynamic_limit, bytes, memory_order_relaxed);
    return code;
}

static void refuse(fc_cuda_kernel *kernel, int code, const launch_config *config)
{
    const unsigned *grid = config->grid, *block = config->block;
    fc_driver_fail(&fc_cuda, code, "CUDA refused to launch %s (grid %u x %u x %u, block %u x %u x %u, %u bytes of "
                                   "dynamic shared memory)",
                   kernel->name, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared_bytes);
    fc_cuda_keep_error();
}

static atomic_bool may_start_early, early_refused;

void fc_cuda_start_early(bool allowed)
{
    int version = 0;
    if (allowed && pthread_once(&once, load) == 0 && loaded == 0)
        cu.version(&version);
    allowed = allowed && version >= EDGES_IN_GRAPHS;
    atomic_store_explicit(&may_start_early, allowed, memory_order_relaxed);
}

/* A launch that may start before the kernel ahead of it on the stream has ended; in a graph, an edge that says so. Behind
 * what is no kernel, and as the first of a graph, it starts as any other. False where it was not launched: who asks then
 * launches plainly, and nothing is launched this way any more. */
static bool launched_early(fc_cuda_kernel *kernel, const launch_config *config, void **parameters, void **extra)
{
    if (!kernel->waits || !atomic_load_explicit(&may_start_early, memory_order_relaxed) ||
        atomic_load_explicit(&early_refused, memory_order_relaxed) || cu.launch_ex == NULL)
        return false;
    launch_attribute early = {.id = LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION};
    early.value.allowed = 1;
    launch_config with = *config;
    with.attributes = &early;
    with.attribute_count = 1;
    if (cu.launch_ex(&with, kernel->function, parameters, extra) == 0)
        return true;
    atomic_store_explicit(&early_refused, true, memory_order_relaxed);
    return false;
}

void mgpuLaunchKernel(fc_cuda_kernel *kernel, intptr_t grid_x, intptr_t grid_y, intptr_t grid_z, intptr_t block_x,
                      intptr_t block_y, intptr_t block_z, int32_t shared_bytes, void *stream, void **parameters,
                      void **extra, size_t count)
{
    (void)count;
    if (kernel == NULL)
        return; /* the error is kept */
    launch_config config = {
        .grid = {(unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z},
        .block = {(unsigned)block_x, (unsigned)block_y, (unsigned)block_z},
        .shared_bytes = (unsigned)shared_bytes,
        .stream = stream,
    };
    int code = allow_shared(kernel, shared_bytes);
    if (code == 0 && !launched_early(kernel, &config, parameters, extra))
        code = cu.launch(kernel->function, config.grid[0], config.grid[1], config.grid[2], config.block[0],
                         config.block[1], config.block[2], config.shared_bytes, stream, parameters, extra);
    if (code != 0)
        refuse(kernel, code, &config);
}

void mgpuLaunchClusterKernel(fc_cuda_kernel *kernel, intptr_t cluster_x, intptr_t cluster_y, intptr_t cluster_z,
                             intptr_t grid_x, intptr_t grid_y, intptr_t grid_z, intptr_t block_x, intptr_t block_y,
                             intptr_t block_z, int32_t shared_bytes, void *stream, void **parameters, void **extra,
                             size_t count)
{
    (void)count;
    if (kernel == NULL)
        return;
    launch_attribute cluster = {.id = LAUNCH_CLUSTER_DIMENSION};
    cluster.value.cluster.x = (unsigned)cluster_x;
    cluster.value.cluster.y = (unsigned)cluster_y;
    cluster.value.cluster.z = (unsigned)cluster_z;
    launch_config config = {
        .grid = {(unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z},
        .block = {(unsigned)block_x, (unsigned)block_y, (unsigned)block_z},
        .shared_bytes = (unsigned)shared_bytes,
        .stream = stream,
        .attributes = &cluster,
        .attribute_count = 1,
    };
    if (cu.launch_ex == NULL) {
        fc_fail("kernel %s is launched in clusters, which this CUDA driver is too old for; install a newer one",
                kernel->name);
        fc_cuda_keep_error();
        return;
    }
    int code = allow_shared(kernel, shared_bytes);
    if (code == 0)
        code = cu.launch_ex(&config, kernel->function, parameters, extra);
    if (code != 0)
        refuse(kernel, code, &config);
}

int mgpuModuleOccupancyMaxActiveBlocks(const void *image, const char *name, int threads, int shared_bytes)
{
    int blocks = 0;
    fc_cuda_module *known = fc_cuda_same_image(image);
    fc_cuda_module *module = known != NULL ? known : mgpuModuleLoadJIT(image, 0);
    fc_cuda_kernel *kernel = mgpuModuleGetFunction(module, name);
    if (kernel != NULL && fc_cuda_kept(allow_shared(kernel, shared_bytes), "asking for dynamic shared memory"))
        fc_cuda_kept(cu.occupancy(&blocks, kernel->function, threads, (size_t)shared_bytes), "the occupancy query");
    if (known == NULL)
        mgpuModuleUnload(module);
    return blocks;
}
