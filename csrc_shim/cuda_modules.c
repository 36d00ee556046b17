/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules of the cuda target: an image a launcher, loaded once a context.
 *
 * Kernels are looked up at every launch, from any thread: lists only grow at their heads, so readers take no lock. What
 * loads or unloads holds one.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

/* numbers of cuda.h */
enum { NOT_FOUND = 500, FIRST_CAPTURE_ERROR = 900, LAST_CAPTURE_ERROR = 908 };
enum { JIT_INFO_LOG = 3, JIT_INFO_LOG_BYTES = 4, JIT_ERROR_LOG = 5, JIT_ERROR_LOG_BYTES = 6 };

/* of PTX */
#define ENTRY ".entry "
#define WAIT_FOR_PREVIOUS "griddepcontrol.wait"

static struct {
    int (*context_current)(void **context);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*load)(void **module, const void *image, unsigned count, int *options, void **values);
    int (*unload)(void *module);
    int (*function)(void **function, void *module, const char *name);
    int (*function_get)(int *value, int attribute, void *function);
    int (*function_load)(void *function); /* of newer drivers; NULL elsewhere */
} cu;

static const struct fc_symbol symbols[] = {
    {"cuCtxGetCurrent", &cu.context_current},
    {"cuCtxPushCurrent_v2", &cu.context_push},
    {"cuCtxPopCurrent_v2", &cu.context_pop},
    {"cuModuleLoadDataEx", &cu.load},
    {"cuModuleUnload", &cu.unload},
    {"cuModuleGetFunction", &cu.function},
    {"cuFuncGetAttribute", &cu.function_get},
    {NULL, NULL},
};

struct loaded { /* an image in one context */
    void *context;
    void *module;
    _Atomic(fc_cuda_kernel *) kernels;
    struct loaded *next;
};

struct fc_cuda_module {
    const void *image; /* in the launcher's own memory, which outlives this */
    bool is_ptx;
    _Atomic(struct loaded *) loaded;
    fc_cuda_module *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fc_cuda_module *modules; /* of this process; under the lock */
static atomic_bool ready;

static int open_runtime(void)
{
    if (atomic_load_explicit(&ready, memory_order_acquire))
        return 0;
    if (fc_driver_ready(&fc_cuda) != 0)
        return -1;
    pthread_mutex_lock(&lock);
    int result = fc_driver_load(&fc_cuda, symbols);
    void *newer = dlsym(fc_cuda.library, "cuFuncLoad");
    memcpy(&cu.function_load, &newer, sizeof newer);
    atomic_store_explicit(&ready, result == 0, memory_order_release);
    pthread_mutex_unlock(&lock);
    return result;
}

int fc_cuda_context(void **context)
{
    if (open_runtime() != 0)
        return -1;
    int code = cu.context_current(context), previous;
    if (code == 0 && *context == NULL) { /* a thread that never chose a device is on device 0, as in the runtime API */
        code = fc_cuda.enter(0, &previous);
        if (code == 0)
            code = cu.context_current(context);
    }
    return code == 0 ? 0 : fc_driver_fail(&fc_cuda, code, "the current CUDA context cannot be used");
}

/* ---- loading; callers hold the lock and have the context current */

static int load_image(void **module, const void *image, bool is_ptx)
{
    char log[640] = "", notes[64] = "";
    int options[] = {JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES, JIT_INFO_LOG, JIT_INFO_LOG_BYTES};
    void *values[] = {log, (void *)(uintptr_t)sizeof log, notes, (void *)(uintptr_t)sizeof notes};
    int code = cu.load(module, image, is_ptx ? 4 : 0, options, values);
    if (code == 0)
        return 0;
    log[sizeof log - 1] = '\0';
    const char *name = NULL, *text = NULL;
    fc_cuda.row.error_name(code, &name);
    fc_cuda.row.error_string(code, &text);
    bool capturing = code >= FIRST_CAPTURE_ERROR && code <= LAST_CAPTURE_ERROR;
    return fc_fail("a CUDA module could not be loaded: %s (%s, code %d)%s%s%s",
                   text != NULL ? text : "an error without words", name != NULL ? name : "unnamed", code,
                   log[0] != '\0' ? "; the assembler says: " : "", log,
                   capturing ? "; launch it, or preload it, before a stream is captured" : "");
}

static fc_cuda_kernel *find_kernel(struct loaded *loaded, const char *name)
{
    fc_cuda_kernel *kernel = atomic_load_explicit(&loaded->kernels, memory_order_acquire);
    while (kernel != NULL && strcmp(kernel->name, name) != 0)
        kernel = kernel->next;
    return kernel;
}

static int add_kernel(struct loaded *loaded, const char *name, size_t length, bool waits)
{
    fc_cuda_kernel *kernel = calloc(1, sizeof *kernel + length + 1);
    if (kernel == NULL)
        return fc_fail("out of memory for the name of a kernel");
    memcpy(kernel->name, name, length);
    kernel->waits = waits;
    int limit = 0, code = cu.function(&kernel->function, loaded->module, kernel->name);
    /* The driver loads kernels lazily, at their first launch, and that may wait for kernels that run. */
    if (code == 0 && cu.function_load != NULL)
        code = cu.function_load(kernel->function);
    if (code == 0)
        code = cu.function_get(&limit, FC_CUDA_DYNAMIC_SHARED_LIMIT, kernel->function);
    if (code != 0) {
        fc_driver_fail(&fc_cuda, code, "kernel %s could not be loaded", kernel->name);
        free(kernel);
        return code;
    }
    atomic_init(&kernel->dynamic_limit, limit);
    kernel->next = atomic_load_explicit(&loaded->kernels, memory_order_relaxed);
    atomic_store_explicit(&loaded->kernels, kernel, memory_order_release);
    return 0;
}

/* Every kernel that PTX names. What only looks like one is not found, and is nobody's error. Machine code does not say
 * whether a kernel waits for the one ahead of it: such a kernel is launched as one that does not. */
static int add_kernels(struct loaded *loaded, const char *ptx)
{
    const char *at = strstr(ptx, ENTRY);
    while (at != NULL) {
        at += strlen(ENTRY);
        at += strspn(at, " \t\r\n");
        const char *next = strstr(at, ENTRY), *wait = strstr(at, WAIT_FOR_PREVIOUS);
        size_t length = strcspn(at, " \t\r\n(;,");
        bool waits = wait != NULL && (next == NULL || wait < next);
        int code = length != 0 ? add_kernel(loaded, at, length, waits) : NOT_FOUND;
        if (code != 0 && code != NOT_FOUND)
            return -1;
        at = next;
    }
    return 0;
}

static struct loaded *find_loaded(fc_cuda_module *module, void *context)
{
    struct loaded *loaded = atomic_load_explicit(&module->loaded, memory_order_acquire);
    while (loaded != NULL && loaded->context != context)
        loaded = loaded->next;
    return loaded;
}

static void free_loaded(struct loaded *loaded)
{
    fc_cuda_kernel *next, *kernel = atomic_load(&loaded->kernels);
    for (; kernel != NULL; kernel = next) {
        next = kernel->next;
        free(kernel);
    }
    free(loaded);
}

static struct loaded *load_for(fc_cuda_module *module, void *context)
{
    struct loaded *loaded = find_loaded(module, context);
    if (loaded != NULL)
        return loaded;
    loaded = calloc(1, sizeof *loaded);
    if (loaded == NULL) {
        fc_fail("out of memory for a CUDA module");
        return NULL;
    }
    loaded->context = context;
    if (load_image(&loaded->module, module->image, module->is_ptx) != 0) {
        free(loaded);
        return NULL;
    }
    if (module->is_ptx && add_kernels(loaded, module->image) != 0) {
        cu.unload(loaded->module);
        free_loaded(loaded);
        return NULL;
    }
    loaded->next = atomic_load_explicit(&module->loaded, memory_order_relaxed);
    atomic_store_explicit(&module->loaded, loaded, memory_order_release);
    return loaded;
}

fc_cuda_kernel *fc_cuda_kernel_here(fc_cuda_module *module, const char *name)
{
    void *context;
    if (fc_cuda_context(&context) != 0)
        return NULL;
    struct loaded *loaded = find_loaded(module, context);
    fc_cuda_kernel *kernel = loaded != NULL ? find_kernel(loaded, name) : NULL;
    if (kernel != NULL)
        return kernel;
    pthread_mutex_lock(&lock);
    loaded = load_for(module, context);
    kernel = loaded != NULL ? find_kernel(loaded, name) : NULL;
    if (loaded != NULL && kernel == NULL && add_kernel(loaded, name, strlen(name), false) == 0)
        kernel = find_kernel(loaded, name);
    pthread_mutex_unlock(&lock);
    return kernel;
}

int fc_cuda_preload(int device)
{
    int count, previous, result = 0;
    if (open_runtime() != 0 || fc_gpu_device_count(&fc_cuda, &count) != 0)
        return -1;
    if (device < 0 || device >= count)
        return fc_fail("device %d does not exist: CUDA sees %d, from 0", device, count);
    int code = fc_cuda.enter(device, &previous);
    if (code != 0)
        return fc_driver_fail(&fc_cuda, code, "device %d cannot be used", device);
    void *context;
    result = fc_cuda_context(&context);
    pthread_mutex_lock(&lock);
    for (fc_cuda_module *module = modules; result == 0 && module != NULL; module = module->next)
        result = load_for(module, context) != NULL ? 0 : -1;
    pthread_mutex_unlock(&lock);
    fc_cuda.leave(previous);
    return result;
}

static fc_cuda_module *new_module(const void *image, bool is_ptx)
{
    fc_cuda_module *module = calloc(1, sizeof *module);
    if (module == NULL) {
        fc_fail("out of memory for a CUDA module");
        fc_cuda_keep_error();
        return NULL;
    }
    module->image = image;
    module->is_ptx = is_ptx;
    pthread_mutex_lock(&lock);
    module->next = modules;
    modules = module;
    pthread_mutex_unlock(&lock);
    return module;
}

fc_cuda_module *mgpuModuleLoadJIT(const char *ptx, int optimisation_level)
{
    (void)optimisation_level; /* PTX is optimised already, and the driver's assembler does its best by default */
    return new_module(ptx, true);
}

fc_cuda_module *mgpuModuleLoad(const void *image, size_t bytes)
{
    (void)bytes;
    return new_module(image, false);
}

/* Called when a launcher goes, at the latest while the process ends: the driver may be gone by then. */
void mgpuModuleUnload(fc_cuda_module *module)
{
    if (module == NULL)
        return;
    pthread_mutex_lock(&lock);
    fc_cuda_module **link = &modules;
    while (*link != NULL && *link != module)
        link = &(*link)->next;
    if (*link != NULL)
        *link = module->next;
    struct loaded *next, *loaded = atomic_load(&module->loaded);
    for (; loaded != NULL; loaded = next) {
        next = loaded->next;
        void *context;
        if (cu.context_push(loaded->context) == 0) {
            cu.unload(loaded->module);
            cu.context_pop(&context);
        }
        free_loaded(loaded);
    }
    pthread_mutex_unlock(&lock);
    free(module);
}

fc_cuda_module *fc_cuda_same_image(const char *ptx)
{
    pthread_mutex_lock(&lock);
    fc_cuda_module *module = modules;
    while (module != NULL && !(module->is_ptx && strcmp(module->image, ptx) == 0))
        module = module->next;
    pthread_mutex_unlock(&lock);
    return module;
}
