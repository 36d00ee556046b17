/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the cuda runtime share: cuda_modules.c loads, cuda_runtime.c launches, cuda_streams.c does the rest.
 */
#ifndef FLYCOMM_CUDA_INTERNAL_H
#define FLYCOMM_CUDA_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "cuda_runtime.h"
#include "driver.h"

struct fc_cuda_kernel {
    void *function;
    atomic_int dynamic_limit; /* bytes of dynamic shared memory that a launch may ask for so far */
    bool waits;               /* for the kernel ahead of it, by itself: its launches may start early */
    fc_cuda_kernel *next;
    char name[];
};

enum { FC_CUDA_DYNAMIC_SHARED_LIMIT = 8 }; /* CUfunction_attribute */

/* The current context of this thread, with the driver open; device 0's becomes current if there is none. */
int fc_cuda_context(void **context);

/* The kernel in the current context, loaded if need be; NULL with the error set. Takes no lock once it is loaded. */
fc_cuda_kernel *fc_cuda_kernel_here(fc_cuda_module *module, const char *name);

/* A module of this process with that PTX, or NULL. */
fc_cuda_module *fc_cuda_same_image(const char *ptx);

/* Keeps fc_last_error() for fc_cuda_take_error(), unless an earlier one waits there. */
void fc_cuda_keep_error(void);

/* Whether a driver's code is success; otherwise the error is kept: `what` failed. */
bool fc_cuda_kept(int code, const char *what);

#endif
