/* SPDX-License-Identifier: Apache-2.0
 *
 * The host target's memory: POSIX shared memory, mode 0600.
 *
 * A name exists from fc_alloc until all peers have mapped it (fc_export_done). What a killed process leaves in /dev/shm
 * goes with the next call here (names.c).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "host_runtime.h"
#include "shim.h"

#define FOLDER FC_NAMES_FOLDER /* where libc's shm_open puts names */
enum { NAME_BYTES = 64, PAGE = 4096 };

struct shm_handle {
    uint8_t kind; /* FC_HANDLE_SHM */
    uint8_t reserved[7];
    uint64_t bytes;
    char name[NAME_BYTES]; /* "/flycomm.<pid>.<random>" */
};

_Static_assert(sizeof(struct shm_handle) <= FC_HANDLE_BYTES, "a handle fits its bytes");

struct mapping {
    struct mapping *next;
    void *address;
    size_t bytes;
    int lock;              /* while the name exists: the descriptor that holds its lock, else -1 */
    pid_t owner;           /* a forked child has a copy of this list but owns nothing in it */
    char name[NAME_BYTES]; /* "" for a peer's memory */
};

static struct mapping *mappings;
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

static void insert(struct mapping *mapping)
{
    pthread_mutex_lock(&mappings_lock);
    mapping->next = mappings;
    mappings = mapping;
    pthread_mutex_unlock(&mappings_lock);
}

/* The mapping at `address` that is, or is not, a peer's; taken out of the list if `remove`. Under the lock. */
static struct mapping *find(uint64_t address, int peers, int remove)
{
    for (struct mapping **at = &mappings; *at != NULL; at = &(*at)->next) {
        struct mapping *mapping = *at;
        if ((uint64_t)(uintptr_t)mapping->address != address || (mapping->name[0] == '\0') != peers)
            continue;
        if (remove)
            *at = mapping->next;
        return mapping;
    }
    return NULL;
}

static void remove_name(struct mapping *mapping)
{
    if (mapping->lock < 0)
        return;
    shm_unlink(mapping->name);
    close(mapping->lock);
    mapping->lock = -1;
}

/* A process that ends before its peers have mapped its memory takes the names along. */
__attribute__((destructor)) static void remove_names_at_exit(void)
{
    if (pthread_mutex_trylock(&mappings_lock) != 0)
        return; /* a thread is in here still: the next process removes what it leaves */
    for (struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next)
        if (mapping->owner == getpid())
            remove_name(mapping);
    pthread_mutex_unlock(&mappings_lock);
}

/* A new, locked, empty shared-memory file, or -1 with the error set. */
static int create(char name[NAME_BYTES])
{
    for (;;) {
        name[0] = '/';
        if (fc_name_make(name + 1, NAME_BYTES - 1) != 0)
            return -1;
        int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (file < 0 && errno == EEXIST)
            continue;
        if (file < 0)
            return fc_fail("shared memory %s cannot be created: %s; check that " FOLDER " is there and writable", name,
                           strerror(errno));
        struct stat status;
        if (fc_name_lock(file) != 0 || fstat(file, &status) != 0) {
            int error = errno;
            shm_unlink(name);
            close(file);
            return fc_fail("shared memory %s cannot be locked: %s", name, strerror(error));
        }
        if (status.st_nlink != 0)
            return file;
        close(file); /* another process swept it between its creation and its lock */
    }
}

static void *map(int file, size_t bytes)
{
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}

static int no_space(const char *name, size_t bytes, int error)
{
    struct statvfs space;
    unsigned long long available = statvfs(FOLDER, &space) == 0 ? (unsigned long long)space.f_bavail * space.f_frsize : 0;
    if (error != ENOSPC)
        return fc_fail("shared memory %s of %zu bytes cannot be allocated: %s", name, bytes, strerror(error));
    return fc_fail("%zu bytes of shared memory do not fit into " FOLDER ", which has %llu bytes left; make it larger (in "
                   "a container: --shm-size) or ask for less",
                   bytes, available);
}

int fc_host_alloc(size_t bytes, uint64_t *address)
{
    fc_names_sweep();
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping == NULL)
        return fc_fail("out of memory");
    mapping->bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    mapping->owner = getpid();
    mapping->lock = create(mapping->name);
    if (mapping->lock < 0) {
        free(mapping);
        return -1;
    }
    /* Takes the pages now: a full file system is an error here and not a SIGBUS at the first touch. */
    int error;
    do
        error = posix_fallocate(mapping->lock, 0, (off_t)mapping->bytes);
    while (error == EINTR);
    if (error == 0) {
        mapping->address = map(mapping->lock, mapping->bytes);
        error = mapping->address == MAP_FAILED ? errno : 0;
    }
    if (error != 0) {
        no_space(mapping->name, mapping->bytes, error);
        remove_name(mapping);
        free(mapping);
        return -1;
    }
    *address = (uint64_t)(uintptr_t)mapping->address;
    insert(mapping);
    return 0;
}

int fc_host_free(uint64_t address)
{
    pthread_mutex_lock(&mappings_lock);
    struct mapping *mapping = find(address, 0, 1);
    pthread_mutex_unlock(&mappings_lock);
    if (mapping == NULL)
        return fc_fail("address 0x%llx was not allocated here, or is freed already", (unsigned long long)address);
    remove_name(mapping);
    munmap(mapping->address, mapping->bytes);
    free(mapping);
    fc_names_sweep(); /* when an exchange failed because a peer was killed, its names go now */
    return 0;
}

int fc_host_export(uint64_t address, uint8_t handle[FC_HANDLE_BYTES], size_t *length)
{
    struct shm_handle made = {.kind = FC_HANDLE_SHM};
    pthread_mutex_lock(&mappings_lock);
    const struct mapping *mapping = find(address, 0, 0);
    if (mapping != NULL && mapping->lock >= 0) {
        made.bytes = mapping->bytes;
        memcpy(made.name, mapping->name, sizeof made.name);
    }
    pthread_mutex_unlock(&mappings_lock);
    if (made.name[0] == '\0')
        return fc_fail("address 0x%llx is not an allocation that can still be shared; export it once, before all peers "
                       "have opened it",
                       (unsigned long long)address);
    memcpy(handle, &made, sizeof made);
    *length = sizeof made;
    return 0;
}

int fc_host_export_done(uint64_t address)
{
    pthread_mutex_lock(&mappings_lock);
    struct mapping *mapping = find(address, 0, 0);
    if (mapping != NULL)
        remove_name(mapping);
    pthread_mutex_unlock(&mappings_lock);
    return mapping != NULL ? 0 : fc_fail("address 0x%llx was not allocated here", (unsigned long long)address);
}

/* Peers are of the same user, and still a handle opens nothing but this library's own kind of name. */
static int valid(const struct shm_handle *handle)
{
    return handle->name[0] == '/' && fc_name_valid(handle->name + 1, NAME_BYTES - 1);
}

int fc_host_open(const uint8_t *handle, size_t length, uint64_t *address)
{
    struct shm_handle got;
    if (length != sizeof got || handle[0] != FC_HANDLE_SHM)
        return fc_fail("a memory handle of %zu bytes and kind %d is not one of the host target's (%zu bytes, kind %d); "
                       "all ranks must use the same target",
                       length, length != 0 ? handle[0] : 0, sizeof got, FC_HANDLE_SHM);
    memcpy(&got, handle, sizeof got);
    if (!valid(&got))
        return fc_fail("a memory handle names no shared memory of flycomm");
    int file = shm_open(got.name, O_RDWR | O_NOFOLLOW, 0);
    if (file < 0)
        return fc_fail("a peer's shared memory %s cannot be opened: %s; ranks must share " FOLDER " and a user", got.name,
                       strerror(errno));
    struct stat status;
    struct mapping *mapping = NULL;
    int result = -1;
    if (fstat(file, &status) != 0 || (uint64_t)status.st_size != got.bytes)
        fc_fail("a peer's shared memory %s has not the %llu bytes that its handle says", got.name,
                (unsigned long long)got.bytes);
    else if ((mapping = calloc(1, sizeof *mapping)) == NULL)
        fc_fail("out of memory");
    else if ((mapping->address = map(file, got.bytes)) == MAP_FAILED)
        fc_fail("a peer's shared memory %s of %llu bytes cannot be mapped: %s", got.name, (unsigned long long)got.bytes,
                strerror(errno));
    else
        result = 0;
    close(file);
    if (result != 0) {
        free(mapping);
        return -1;
    }
    mapping->bytes = got.bytes;
    mapping->lock = -1;
    *address = (uint64_t)(uintptr_t)mapping->address;
    insert(mapping);
    fc_host_remote_add(*address, mapping->bytes);
    return 0;
}

int fc_host_close(uint64_t address)
{
    pthread_mutex_lock(&mappings_lock);
    struct mapping *mapping = find(address, 1, 1);
    pthread_mutex_unlock(&mappings_lock);
    if (mapping == NULL)
        return fc_fail("address 0x%llx is not a peer's memory, or is closed already", (unsigned long long)address);
    fc_host_remote_remove(address);
    munmap(mapping->address, mapping->bytes);
    free(mapping);
    return 0;
}

int fc_host_alloc_mapped(size_t bytes, void **host, uint64_t *address)
{
    *host = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    if (*host == NULL)
        return fc_fail("%zu bytes of memory cannot be allocated", bytes);
    memset(*host, 0, bytes);
    *address = (uint64_t)(uintptr_t)*host;
    return 0;
}
