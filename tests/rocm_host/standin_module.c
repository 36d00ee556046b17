/* SPDX-License-Identifier: Apache-2.0
 *
 * Code objects of the stand-in: read as LLVM's "User Guide for AMDGPU Backend" lays them out, checked, and run as the
 * host build of the same kernels.
 */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The host build's own table (host_builds.py writes it): what it takes, and how it is entered. */
struct standin_build {
    const char *name;
    void (*entry)(void *self, void **params);
    int64_t static_shared;
    int32_t warp_size;
    int32_t count;
    const int32_t *sizes; /* bytes of each argument */
};

struct kernel {
    char name[128];
    int arguments; /* without the compiler's hidden ones */
    struct {
        uint32_t offset, size;
    } argument[MAX_ARGUMENTS];
    uint32_t argument_bytes, shared, max_threads, required[3], wave;
};

struct module;
struct function {
    struct kernel kernel;
    const struct standin_build *build;
    struct module *module;
};

struct module {
    int device;
    void *library;
    int count;
    struct function functions[8];
};

/* ---- MessagePack, of the kinds that LLVM writes */

struct reader {
    const uint8_t *at, *end;
};

enum type { NIL, NUMBER, TEXT, LIST, MAP, DAMAGED };

struct value {
    enum type type;
    uint64_t number; /* or how many entries, or how many bytes of text */
    const char *text;
};

static uint64_t big_endian(struct reader *reader, int bytes)
{
    uint64_t value = 0;
    if (reader->end - reader->at < bytes) {
        reader->at = reader->end;
        return 0;
    }
    while (bytes-- > 0)
        value = value << 8 | *reader->at++;
    return value;
}

static struct value read_value(struct reader *reader)
{
    if (reader->at >= reader->end)
        return (struct value){.type = DAMAGED};
    uint8_t head = *reader->at++;
    struct value value = {.type = NUMBER, .number = head};
    if (head <= 0x7f)
        return value;
    if (head >= 0xe0)
        return (struct value){NUMBER, (uint64_t)(int64_t)(int8_t)head, NULL};
    if (head == 0xc0 || head == 0xc2 || head == 0xc3)
        return (struct value){head == 0xc0 ? NIL : NUMBER, head == 0xc3, NULL};
    if (head <= 0x8f)
        return (struct value){MAP, head & 0xf, NULL};
    if (head <= 0x9f)
        return (struct value){LIST, head & 0xf, NULL};
    if (head >= 0xcc && head <= 0xd3) {
        value.number = big_endian(reader, 1 << ((head - 0xcc) & 3));
        return value;
    }
    if (head == 0xdc || head == 0xdd)
        return (struct value){LIST, big_endian(reader, head == 0xdc ? 2 : 4), NULL};
    if (head == 0xde || head == 0xdf)
        return (struct value){MAP, big_endian(reader, head == 0xde ? 2 : 4), NULL};
    if (head <= 0xbf)
        value.number = head & 0x1f;
    else if (head >= 0xd9 && head <= 0xdb)
        value.number = big_endian(reader, 1 << (head - 0xd9));
    else
        return (struct value){.type = DAMAGED};
    value.type = TEXT;
    value.text = (const char *)reader->at;
    if ((uint64_t)(reader->end - reader->at) < value.number)
        return (struct value){.type = DAMAGED};
    reader->at += value.number;
    return value;
}

static void skip(struct reader *reader)
{
    struct value value = read_value(reader);
    uint64_t parts = value.type == LIST ? value.number : value.type == MAP ? 2 * value.number : 0;
    while (parts-- > 0 && reader->at < reader->end)
        skip(reader);
}

static bool is(struct value value, const char *text)
{
    return value.type == TEXT && value.number == strlen(text) && memcmp(value.text, text, value.number) == 0;
}

/* ---- a code object */

static bool hidden(struct value kind) { return kind.number > 7 && memcmp(kind.text, "hidden_", 7) == 0; }

static void read_argument(struct reader *reader, struct kernel *kernel)
{
    struct value map = read_value(reader), kind = {.text = ""};
    uint32_t offset = 0, size = 0;
    while (map.number-- > 0) {
        struct value key = read_value(reader);
        if (is(key, ".offset"))
            offset = (uint32_t)read_value(reader).number;
        else if (is(key, ".size"))
            size = (uint32_t)read_value(reader).number;
        else if (is(key, ".value_kind"))
            kind = read_value(reader);
        else
            skip(reader);
    }
    if (hidden(kind) || kernel->arguments == MAX_ARGUMENTS)
        return;
    kernel->argument[kernel->arguments].offset = offset;
    kernel->argument[kernel->arguments++].size = size;
}

static void read_kernel(struct reader *reader, struct kernel *kernel)
{
    struct value map = read_value(reader);
    while (map.number-- > 0) {
        struct value key = read_value(reader);
        if (is(key, ".name")) {
            struct value name = read_value(reader);
            snprintf(kernel->name, sizeof kernel->name, "%.*s", (int)name.number, name.text);
        } else if (is(key, ".args")) {
            for (uint64_t left = read_value(reader).number; left > 0; left--)
                read_argument(reader, kernel);
        } else if (is(key, ".reqd_workgroup_size")) {
            for (uint64_t i = 0, sides = read_value(reader).number; i < sides; i++)
                kernel->required[i < 3 ? i : 2] = (uint32_t)read_value(reader).number;
        } else if (is(key, ".kernarg_segment_size")) {
            kernel->argument_bytes = (uint32_t)read_value(reader).number;
        } else if (is(key, ".group_segment_fixed_size")) {
            kernel->shared = (uint32_t)read_value(reader).number;
        } else if (is(key, ".max_flat_workgroup_size")) {
            kernel->max_threads = (uint32_t)read_value(reader).number;
        } else if (is(key, ".wavefront_size")) {
            kernel->wave = (uint32_t)read_value(reader).number;
        } else {
            skip(reader);
        }
    }
}

/* The kernels of the metadata note's map. */
static int read_note(struct reader reader, struct module *module)
{
    struct value map = read_value(&reader);
    while (map.type == MAP && map.number-- > 0) {
        struct value key = read_value(&reader);
        if (!is(key, "amdhsa.kernels")) {
            skip(&reader);
            continue;
        }
        for (uint64_t left = read_value(&reader).number; left > 0 && module->count < 8; left--)
            read_kernel(&reader, &module->functions[module->count++].kernel);
    }
    return module->count != 0 ? SUCCESS : INVALID_IMAGE;
}

/* EF_AMDGPU_MACH, the low byte of e_flags. */
static bool for_this_chip(uint32_t flags)
{
    static const struct {
        const char *arch;
        uint32_t mach;
    } chips[] = {{"gfx942", 0x4c}, {"gfx950", 0x4f}, {"gfx1250", 0x49}};
    for (size_t i = 0; i < sizeof chips / sizeof chips[0]; i++)
        if (strcmp(chips[i].arch, standin_arch()) == 0)
            return (flags & 0xff) == chips[i].mach;
    return false;
}

static int read_code_object(const uint8_t *image, size_t *bytes, struct module *module)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_machine != 224 || header->e_ident[EI_OSABI] != 64 ||
        header->e_ident[EI_ABIVERSION] != 4 || header->e_type != ET_DYN)
        return INVALID_IMAGE;
    if (!for_this_chip(header->e_flags))
        return NO_BINARY_FOR_GPU;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    *bytes = header->e_shoff + (size_t)header->e_shnum * sizeof *sections;
    int code = INVALID_IMAGE;
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_NOTE)
            continue;
        const Elf64_Nhdr *note = (const Elf64_Nhdr *)(image + sections[i].sh_offset);
        const uint8_t *text = (const uint8_t *)(note + 1) + (note->n_namesz + 3) / 4 * 4;
        if (note->n_type == 32)
            code = read_note((struct reader){text, text + note->n_descsz}, module);
    }
    return code;
}

/* ---- its host build */

static uint64_t hash_of(const uint8_t *image, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ image[i]) * 0x100000001b3;
    return hash;
}

/* What the GPU's kernel reads from its argument block has to be what the host's build takes. */
static bool same_arguments(const struct kernel *kernel, const struct standin_build *build)
{
    uint32_t end = 0;
    if (kernel->arguments != build->count)
        return false;
    for (int i = 0; i < build->count; i++) {
        uint32_t offset = kernel->argument[i].offset, size = kernel->argument[i].size;
        if (size != (uint32_t)build->sizes[i] || offset < end || offset % size != 0)
            return false;
        end = offset + size;
    }
    return end <= kernel->argument_bytes && kernel->wave == (uint32_t)build->warp_size;
}

static int find_builds(struct module *module, uint64_t hash)
{
    char path[512];
    const char *folder = getenv("STANDIN_HIP_KERNELS");
    snprintf(path, sizeof path, "%s/%016llx.so", folder != NULL ? folder : "", (unsigned long long)hash);
    module->library = dlopen(path, RTLD_NOW);
    const struct standin_build *builds = module->library != NULL ? dlsym(module->library, "standin_builds") : NULL;
    if (builds == NULL) {
        standin_say("kernel %s has no host build: %s", module->functions[0].kernel.name, dlerror());
        return NOT_FOUND;
    }
    for (int i = 0; i < module->count; i++) {
        struct function *function = &module->functions[i];
        for (const struct standin_build *one = builds; one->name != NULL; one++)
            if (strcmp(one->name, function->kernel.name) == 0)
                function->build = one;
        if (function->build == NULL || !same_arguments(&function->kernel, function->build)) {
            standin_say("the arguments of kernel %s are not those of its host build", function->kernel.name);
            return INVALID_IMAGE;
        }
        function->module = module;
    }
    return SUCCESS;
}

HIP int hipModuleLoadData(void **result, const void *image)
{
    BEGIN;
    struct module *module = calloc(1, sizeof *module);
    size_t bytes = 0;
    module->device = standin_current();
    int code = read_code_object(image, &bytes, module);
    if (code == SUCCESS)
        code = find_builds(module, hash_of(image, bytes));
    if (code != SUCCESS) {
        free(module);
        return code;
    }
    *result = module;
    __atomic_add_fetch(&standin_counts.modules, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

HIP int hipModuleUnload(void *module)
{
    BEGIN;
    if (module == NULL)
        return INVALID_HANDLE;
    free(module); /* the host build stays: a launch may be on its way */
    __atomic_sub_fetch(&standin_counts.modules, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

HIP int hipModuleGetFunction(void **function, void *handle, const char *name)
{
    BEGIN;
    struct module *module = handle;
    if (module == NULL)
        return INVALID_HANDLE;
    for (int i = 0; i < module->count; i++)
        if (strcmp(module->functions[i].kernel.name, name) == 0) {
            *function = &module->functions[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

HIP int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared)
{
    BEGIN;
    if (function == NULL || threads <= 0)
        return INVALID_VALUE;
    *blocks = shared <= 65536 ? 2048 / threads : 0;
    return SUCCESS;
}

/* ---- launches */

struct host_launch {
    struct launch launch;
    const struct standin_build *build;
    unsigned grid[3], block[3], shared;
    void *params[MAX_ARGUMENTS];
    uint64_t block_of_arguments[];
};

typedef void host_launch_function(void (*entry)(void *, void **), void **, int64_t, int64_t, int64_t, int64_t, int64_t,
                                  int64_t, int64_t, int64_t, int32_t, const char *);

static void run(struct launch *launch)
{
    struct host_launch *one = (struct host_launch *)launch;
    const struct standin_build *build = one->build;
    host_launch_function *start = (host_launch_function *)standin_host("fc_host_launch");
    start(build->entry, one->params, one->grid[0], one->grid[1], one->grid[2], one->block[0], one->block[1],
          one->block[2], build->static_shared, one->shared, build->warp_size, build->name);
}

HIP int hipModuleLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                              void **extra)
{
    BEGIN;
    struct function *function = handle;
    if (function == NULL)
        return INVALID_HANDLE;
    const struct kernel *kernel = &function->kernel;
    if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z > kernel->max_threads || extra != NULL ||
        (kernel->required[0] != 0 && (kernel->required[0] != block_x || kernel->required[1] != block_y ||
                                      kernel->required[2] != block_z)) ||
        kernel->shared + shared > 65536)
        return INVALID_VALUE;
    if (function->module->device != standin_stream_device(stream))
        return INVALID_DEVICE; /* a module belongs to the device that was current when it was loaded */
    struct host_launch *launch = calloc(1, sizeof *launch + kernel->argument_bytes + sizeof(uint64_t));
    launch->launch.run = run;
    launch->build = function->build;
    memcpy(launch->grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof launch->grid);
    memcpy(launch->block, (unsigned[]){block_x, block_y, block_z}, sizeof launch->block);
    launch->shared = shared;
    for (int i = 0; i < kernel->arguments; i++) { /* copied as the runtime copies: size bytes to offset */
        launch->params[i] = (char *)launch->block_of_arguments + kernel->argument[i].offset;
        memcpy(launch->params[i], arguments[i], kernel->argument[i].size);
    }
    standin_enqueue(stream, &launch->launch);
    return SUCCESS;
}
