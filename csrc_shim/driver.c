/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

struct wanted {
    const char *prefix;
    char path[512];
};

static int match_loaded(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct wanted *wanted = data;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *file = slash != NULL ? slash + 1 : info->dlpi_name;
    if (strncmp(file, wanted->prefix, strlen(wanted->prefix)) != 0)
        return 0;
    snprintf(wanted->path, sizeof wanted->path, "%s", info->dlpi_name);
    return 1;
}

/* The copy that the process has: by soname, then by file name, since torch ships a HIP runtime under names of its own. */
static void *already_loaded(const struct fc_driver *driver)
{
    for (const char *const *soname = driver->sonames; *soname != NULL; soname++) {
        void *library = dlopen(*soname, RTLD_NOLOAD | RTLD_NOW);
        if (library != NULL)
            return library;
    }
    struct wanted wanted = {.prefix = driver->prefix};
    return dl_iterate_phdr(match_loaded, &wanted) != 0 ? dlopen(wanted.path, RTLD_NOLOAD | RTLD_NOW) : NULL;
}

static void append(char *text, size_t bytes, const char *separator, const char *more)
{
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s", used != 0 ? separator : "", more);
}

static int open_library(struct fc_driver *driver)
{
    driver->library = already_loaded(driver);
    char tried[256] = "", first_error[256] = "";
    for (const char *const *soname = driver->sonames; driver->library == NULL && *soname != NULL; soname++) {
        /* Global, as torch loads it: libraries that come later must bind to this copy. */
        driver->library = dlopen(*soname, RTLD_NOW | RTLD_GLOBAL);
        const char *error = driver->library == NULL ? dlerror() : NULL;
        append(tried, sizeof tried, ", ", *soname);
        if (error != NULL && first_error[0] == '\0')
            snprintf(first_error, sizeof first_error, "%s", error);
    }
    if (driver->library == NULL)
        return fc_fail("%s's driver library was not found: tried %s (%s); %s", driver->name, tried, first_error,
                       driver->remedy);
    return 0;
}

int fc_driver_load(struct fc_driver *driver, const struct fc_symbol *symbols)
{
    char missing[256] = "";
    for (; symbols->name != NULL; symbols++) {
        void *address = dlsym(driver->library, symbols->name);
        if (address == NULL)
            append(missing, sizeof missing, ", ", symbols->name);
        else
            memcpy(symbols->slot, &address, sizeof address);
    }
    if (missing[0] != '\0')
        return fc_fail("%s's driver library has no %s: it is too old for flycomm; %s", driver->name, missing,
                       driver->remedy);
    return 0;
}

static int initialise(struct fc_driver *driver)
{
    if (driver->library == NULL && open_library(driver) != 0)
        return -1;
    if (fc_driver_load(driver, driver->symbols) != 0)
        return -1;
    int code = driver->row.init(0);
    if (code == 0)
        code = driver->row.device_count(&driver->devices);
    if (code != 0)
        return fc_driver_fail(driver, code, "%s's driver was found but does not start", driver->name);
    if (driver->devices == 0)
        return fc_fail("%s's driver was found but sees no device; check which devices are visible to this process",
                       driver->name);
    return 0;
}

int fc_driver_ready(struct fc_driver *driver)
{
    if (atomic_load_explicit(&driver->ready, memory_order_acquire))
        return 0;
    pthread_mutex_lock(&opening);
    int result = atomic_load(&driver->ready) ? 0 : initialise(driver);
    if (result == 0)
        atomic_store_explicit(&driver->ready, true, memory_order_release);
    pthread_mutex_unlock(&opening);
    return result;
}

int fc_driver_fail(struct fc_driver *driver, int code, const char *format, ...)
{
    char sentence[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    const char *name = NULL, *text = NULL;
    driver->row.error_name(code, &name);
    driver->row.error_string(code, &text);
    return fc_fail("%s: %s (%s, code %d)", sentence, text != NULL ? text : "an error without words",
                   name != NULL ? name : "unnamed", code);
}
