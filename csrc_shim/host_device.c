/* SPDX-License-Identifier: Apache-2.0
 *
 * The host target's one device: the cores that this process may use.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "shim.h"

static void cpu_name(char *name, size_t bytes)
{
    snprintf(name, bytes, "CPU");
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (file == NULL)
        return;
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        const char *value = strncmp(line, "model name", strlen("model name")) == 0 ? strstr(line, ": ") : NULL;
        if (value != NULL) {
            snprintf(name, bytes, "%.*s", (int)strcspn(value + 2, "\n"), value + 2);
            break;
        }
    }
    fclose(file);
}

int fc_host_device_query(fc_device_info *info)
{
    cpu_name(info->name, sizeof info->name);
#if defined(__x86_64__)
    snprintf(info->arch, sizeof info->arch, "x86-64");
#elif defined(__aarch64__)
    snprintf(info->arch, sizeof info->arch, "aarch64");
#else
    snprintf(info->arch, sizeof info->arch, "unknown");
#endif
    cpu_set_t cores;
    int known = sched_getaffinity(0, sizeof cores, &cores) == 0; /* not on a machine with over 1024 cores */
    info->compute_units = known ? (uint32_t)CPU_COUNT(&cores) : (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    info->warp_size = 32;
    info->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    info->clock_hz = 1000000000;
    return 0;
}
