/* SPDX-License-Identifier: Apache-2.0
 *
 * One table of driver entry points a GPU target, filled at run time. No driver is linked, so one build of this library
 * serves every machine, and a driver that the process has already is never loaded a second time.
 *
 * Rows have one signature for both drivers. Where CUDA and HIP differ, the table has a function of ours (ipc_cuda.c,
 * ipc_hip.c); ipc_gpu.c uses the table and asks nowhere which driver it is.
 */
#ifndef FLYCOMM_DRIVER_H
#define FLYCOMM_DRIVER_H

#include <stdatomic.h>

#include "shim.h"

typedef struct fc_ipc_handle {
    uint8_t bytes[64];
} fc_ipc_handle;

/* A function of the driver by name, and where its address goes. Tables end with a NULL name. */
struct fc_symbol {
    const char *name;
    void *slot;
};

/* Every function returns the driver's own code: 0 is success in both. */
struct fc_rows {
    int (*init)(unsigned flags);
    int (*device_count)(int *count);
    int (*device_name)(char *name, int length, int device);
    int (*attribute)(int *value, int attribute, int device);
    int (*total_memory)(size_t *bytes, int device);
    int (*can_access_peer)(int *can, int device, int peer_device);
    int (*synchronize)(void);
    int (*stream_synchronize)(void *stream);
    int (*free)(uint64_t address);
    int (*ipc_get)(fc_ipc_handle *handle, uint64_t address);
    int (*ipc_open)(uint64_t *address, fc_ipc_handle handle, unsigned flags);
    int (*ipc_close)(uint64_t address);
    int (*host_alloc)(void **host, size_t bytes, unsigned flags);
    int (*host_address)(uint64_t *address, void *host, unsigned flags);
    int (*host_free)(void *host);
    int (*fill32)(uint64_t address, unsigned word, size_t words);
    int (*error_name)(int code, const char **text);
    int (*error_string)(int code, const char **text);
};

/* Memory that is shared by file descriptor and not by IPC; what it has, the driver's ordinary calls do not know. Memory
 * is this process's own, or its peers'. Calls return 0, or -1 with the error set, unless something else is said. */
struct fc_fd_memory {
    enum fc_handle_kind kind;
    int (*alloc)(int device, size_t bytes, uint64_t *address); /* not zeroed */
    bool (*has)(uint64_t address, bool peers);
    int (*release)(uint64_t address, bool peers); /* frees or unmaps; returns the driver's code */
    int (*export)(uint64_t address, uint8_t *handle, size_t *length);
    void (*export_done)(uint64_t address); /* of any address */
    int (*open)(int device, const uint8_t *handle, size_t length, uint64_t *address);
    int (*peer_enable)(int device, int peer_device); /* returns the driver's code */
};

struct fc_driver {
    /* constant */
    const char *name;                /* "CUDA" */
    const char *remedy;              /* what to do when the library is not there */
    const char *prefix;              /* how the file name of a copy already in the process begins */
    const char *const *sonames;      /* tried in this order; ends with NULL */
    const struct fc_symbol *symbols; /* rows, and the driver's own */
    enum fc_handle_kind handle_kind; /* of IPC */
    const struct fc_fd_memory *fd;   /* NULL where there is IPC alone */
    size_t granule;                  /* allocations are rounded up to this many bytes */
    unsigned host_flags; /* of mapped host memory: usable on every device, and read while a kernel writes it */

    /* where the drivers differ; enter makes the device current, leave restores what was current before */
    int (*enter)(int device, int *previous);
    int (*leave)(int previous);
    int (*alloc)(uint64_t *address, size_t bytes);
    int (*copy)(uint64_t destination, uint64_t source, size_t bytes);
    int (*peer_enable)(int peer_device);
    int (*query)(int device, fc_device_info *info);

    /* filled by fc_driver_ready */
    struct fc_rows row;
    int devices;
    void *library;
    atomic_bool ready;
};

extern struct fc_driver fc_cuda, fc_hip;
extern const struct fc_fd_memory fc_cuda_fd;

/* Both drivers use CUDA's numbers here. */
enum { FC_PEER_ACCESS_ALREADY_ENABLED = 704, FC_IPC_LAZY_PEER_ACCESS = 1 };

/* Opens the driver once, fills its table, initialises it and counts devices. After a failure, may be tried again. */
int fc_driver_ready(struct fc_driver *driver);

/* Fills the slots of one more table from an opened driver; what is missing is in the error. */
int fc_driver_load(struct fc_driver *driver, const struct fc_symbol *symbols);

/* fc_fail with the driver's words for `code` after the sentence; returns -1. */
int fc_driver_fail(struct fc_driver *driver, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ipc_gpu.c: the calls of flycomm_shim.h over a driver's table. */
int fc_gpu_device_count(struct fc_driver *driver, int *count);
int fc_gpu_device_query(struct fc_driver *driver, int device, fc_device_info *info);
int fc_gpu_synchronize(struct fc_driver *driver, int device);
int fc_gpu_alloc(struct fc_driver *driver, int device, size_t bytes, int sharing, uint64_t *address);
int fc_gpu_free(struct fc_driver *driver, int device, uint64_t address);
int fc_gpu_export(struct fc_driver *driver, int device, uint64_t address, uint8_t *handle, size_t *length);
int fc_gpu_export_done(struct fc_driver *driver, int device, uint64_t address);
int fc_gpu_open(struct fc_driver *driver, int device, const uint8_t *handle, size_t length, uint64_t *address);
int fc_gpu_close(struct fc_driver *driver, int device, uint64_t address);
int fc_gpu_peer_enable(struct fc_driver *driver, int device, int peer_device);
int fc_gpu_alloc_mapped(struct fc_driver *driver, int device, size_t bytes, void **host, uint64_t *address);
int fc_gpu_free_mapped(struct fc_driver *driver, int device, void *host);
int fc_gpu_copy(struct fc_driver *driver, int device, uint64_t destination, uint64_t source, size_t bytes);
int fc_gpu_fill32(struct fc_driver *driver, int device, uint64_t address, uint32_t word, size_t words);

#endif
