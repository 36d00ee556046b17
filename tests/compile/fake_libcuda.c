/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NVIDIA's driver with two devices, which writes down what the cuda target asks of it. Only what a test
 * reads is more than a success code: contexts, modules, kernels, launches, and three ways to fail.
 */
#include <stdarg.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define DRIVER __attribute__((visibility("default")))

enum { INVALID_VALUE = 1, INVALID_PTX = 218, NOT_FOUND = 500, CAPTURING = 900 };

static char written[1 << 16];
static int contexts[2];                   /* their addresses are the handles */
static struct module { int device; const char *image; } modules[64];
static struct function { char name[128]; struct module *module; int limit; } functions[64];
static int module_count, function_count;
static _Thread_local void *stack[16];
static _Thread_local int depth;

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&writing);
    size_t used = strlen(written);
    vsnprintf(written + used, sizeof written - used, format, arguments);
    pthread_mutex_unlock(&writing);
    va_end(arguments);
}

/* What was asked for since the last call, a line each. */
DRIVER const char *fake_take(void)
{
    static char taken[sizeof written];
    memcpy(taken, written, sizeof written);
    written[0] = '\0';
    return taken;
}

DRIVER int fake_capturing; /* set: loading a module is refused, as while a stream is captured */

static int device_now(void) { return depth ? (int)((int *)stack[depth - 1] - contexts) : -1; }

DRIVER int cuInit(unsigned flags) { return (int)flags; }
DRIVER int cuDeviceGetCount(int *count) { *count = 2; return 0; }
DRIVER int cuDeviceGetName(char *name, int length, int device) { snprintf(name, (size_t)length, "Fake %d", device); return 0; }
DRIVER int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 10 ? 32 : 132;
    return 0;
}
DRIVER int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 1 << 30; return 0; }
DRIVER int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return 0; }
DRIVER int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; note("retain %d\n", device); return 0; }
DRIVER int cuCtxGetCurrent(void **context) { *context = depth ? stack[depth - 1] : NULL; return 0; }
DRIVER int cuCtxPushCurrent_v2(void *context) { stack[depth++] = context; return 0; }
DRIVER int cuCtxPopCurrent_v2(void **context) { *context = stack[--depth]; return 0; }
DRIVER int cuGetErrorName(int code, const char **text)
{
    *text = code == INVALID_PTX ? "CUDA_ERROR_INVALID_PTX" : code == CAPTURING ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
DRIVER int cuGetErrorString(int code, const char **text) { *text = code == INVALID_VALUE ? "invalid argument" : "an error"; return 0; }

DRIVER int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values)
{
    if (fake_capturing)
        return CAPTURING;
    if (strstr(image, "broken") != NULL) {
        for (unsigned i = 0; i < count; i++)
            if (options[i] == 5)
                snprintf(values[i], 64, "ptxas fatal : line 7 is nonsense");
        return INVALID_PTX;
    }
    modules[module_count] = (struct module){device_now(), image};
    note("load on %d\n", device_now());
    *module = &modules[module_count++];
    return 0;
}
DRIVER int cuModuleUnload(void *module) { note("unload on %d\n", ((struct module *)module)->device); return 0; }
DRIVER int cuModuleGetFunction(void **function, void *module, const char *name)
{
    char entry[160];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (strstr(((struct module *)module)->image, entry) == NULL)
        return NOT_FOUND;
    struct function *found = &functions[function_count++];
    snprintf(found->name, sizeof found->name, "%s", name);
    found->module = module;
    found->limit = 49152;
    note("function %s on %d\n", name, found->module->device);
    *function = found;
    return 0;
}
DRIVER int cuFuncGetAttribute(int *value, int attribute, void *function)
{
    *value = attribute == 8 ? ((struct function *)function)->limit : 0;
    return 0;
}
DRIVER int cuFuncSetAttribute(void *function, int attribute, int value)
{
    if (attribute != 8 || value > 232448)
        return INVALID_VALUE;
    ((struct function *)function)->limit = value;
    note("allow %s %d\n", ((struct function *)function)->name, value);
    return 0;
}
DRIVER int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **extra)
{
    struct function *function = kernel;
    if (gx == 0 || bx * by * bz > 1024 || (int)shared > function->limit || extra != NULL ||
        function->module->device != device_now())
        return INVALID_VALUE;
    note("launch %s on %d: grid %u %u %u, block %u %u %u, shared %u, stream %#lx, first %#lx\n", function->name,
         device_now(), gx, gy, gz, bx, by, bz, shared, (unsigned long)stream, *(unsigned long *)arguments[0]);
    if (strncmp(function->name, "add_kernel", 10) == 0)
        note("more %d %g\n", *(int *)arguments[1], (double)*(float *)arguments[2]);
    return 0;
}

/* as in cuda.h */
struct launch_attribute { int id; char padding[4]; union { int allowed; char bytes[64]; } value; };
struct launch_config { unsigned grid[3], block[3], shared; void *stream; struct launch_attribute *attributes; unsigned count; };
DRIVER int fake_version = 13000;
DRIVER int cuDriverGetVersion(int *version)
{
    *version = fake_version;
    return 0;
}
DRIVER int fake_refuses_early; /* set: a launch with an attribute is refused */
DRIVER int cuLaunchKernelEx(const struct launch_config *c, void *kernel, void **arguments, void **extra)
{
    if (fake_refuses_early || c->count != 1 || c->attributes->id != 6 || c->attributes->value.allowed != 1)
        return INVALID_VALUE;
    note("early ");
    return cuLaunchKernel(kernel, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                          c->stream, arguments, extra);
}
DRIVER int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared)
{
    (void)function;
    *blocks = 2048 / threads;
    note("occupancy of %d threads, %zu bytes\n", threads, shared);
    return 0;
}

/* there, and never called by the tests */
#define UNUSED(name) DRIVER int name(void) { note("unexpected " #name "\n"); return INVALID_VALUE; }
UNUSED(cuCtxSynchronize) UNUSED(cuStreamSynchronize) UNUSED(cuMemFree_v2) UNUSED(cuIpcGetMemHandle)
UNUSED(cuIpcOpenMemHandle_v2) UNUSED(cuIpcCloseMemHandle) UNUSED(cuMemHostAlloc) UNUSED(cuMemHostGetDevicePointer_v2)
UNUSED(cuMemFreeHost) UNUSED(cuMemsetD32_v2) UNUSED(cuMemAlloc_v2) UNUSED(cuMemcpy) UNUSED(cuCtxEnablePeerAccess)
