/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA memory that processes share by a file descriptor (cuMemCreate), where CUDA IPC is refused or not wanted.
 *
 * The list below is of all such memory that this process maps, its own and its peers': an address that is not in it is
 * shared by IPC. A handle names a socket and says no device, so ranks may count their devices differently.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "fd_socket.h"

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, POSIX_FD = 1, MINIMUM = 0 }; /* of cuda.h */
enum { ERROR_INVALID_VALUE = 1, MAX_DEVICES = 64 };

typedef struct place { /* CUmemLocation */
    int type, device;
} place;

typedef struct properties { /* CUmemAllocationProp */
    int type, handle_types;
    place place;
    void *reserved;
    uint8_t flags[8];
} properties;

typedef struct access_from { /* CUmemAccessDesc */
    place place;
    int flags;
} access_from;

_Static_assert(sizeof(properties) == 32 && sizeof(access_from) == 12, "the layouts of cuda.h");

static struct {
    int (*granularity)(size_t *bytes, const properties *wanted, int option);
    int (*create)(uint64_t *handle, size_t bytes, const properties *wanted, unsigned long long flags);
    int (*release)(uint64_t handle);
    int (*reserve)(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags);
    int (*unreserve)(uint64_t address, size_t bytes);
    int (*map)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
    int (*unmap)(uint64_t address, size_t bytes);
    int (*allow)(uint64_t address, size_t bytes, const access_from *from, size_t count);
    int (*export)(void *made, uint64_t handle, int kind, unsigned long long flags);
    int (*import)(uint64_t *handle, void *got, int kind);
} cu;

static const struct fc_symbol symbols[] = {
    {"cuMemGetAllocationGranularity", &cu.granularity},
    {"cuMemCreate", &cu.create},
    {"cuMemRelease", &cu.release},
    {"cuMemAddressReserve", &cu.reserve},
    {"cuMemAddressFree", &cu.unreserve},
    {"cuMemMap", &cu.map},
    {"cuMemUnmap", &cu.unmap},
    {"cuMemSetAccess", &cu.allow},
    {"cuMemExportToShareableHandle", &cu.export},
    {"cuMemImportFromShareableHandle", &cu.import},
    {NULL, NULL},
};

struct fd_handle {
    uint8_t kind; /* FC_HANDLE_CUDA_FD */
    uint8_t reserved[7];
    uint64_t bytes;
    char name[FC_FD_NAME_BYTES]; /* where the descriptor is offered */
};

_Static_assert(sizeof(struct fd_handle) <= FC_HANDLE_BYTES, "a handle fits its bytes");

struct memory {
    struct memory *next;
    bool peers;
    int device; /* whose memory it is; a peer's: on which it is mapped */
    size_t bytes;
    uint64_t handle, address;
    bool has_handle, has_address, mapped; /* how far it is made */
    fc_fd_offer *offer;                   /* from export to export_done */
    char name[FC_FD_NAME_BYTES];          /* of the offer */
};

static struct memory *memories;
static uint64_t users[MAX_DEVICES]; /* bit d: device d may use what this process has on the indexed device */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether the functions are there; otherwise the error is set. Not among the driver's own rows: IPC works without. */
static bool usable(void)
{
    static bool loaded;
    pthread_mutex_lock(&lock);
    loaded = loaded || fc_driver_load(&fc_cuda, symbols) == 0;
    pthread_mutex_unlock(&lock);
    return loaded;
}

static struct memory *find(uint64_t address, bool peers, bool remove)
{
    for (struct memory **at = &memories; *at != NULL; at = &(*at)->next) {
        struct memory *memory = *at;
        if (memory->address != address || memory->peers != peers)
            continue;
        if (remove)
            *at = memory->next;
        return memory;
    }
    return NULL;
}

static int allow(const struct memory *memory, int device)
{
    access_from from = {.place = {ON_DEVICE, device}, .flags = READ_WRITE};
    return cu.allow(memory->address, memory->bytes, &from, 1);
}

/* Everything that was made of it is undone, whatever fails; returns the driver's first code. */
static int discard(struct memory *memory)
{
    int codes[] = {
        memory->mapped ? cu.unmap(memory->address, memory->bytes) : 0,
        memory->has_address ? cu.unreserve(memory->address, memory->bytes) : 0,
        memory->has_handle ? cu.release(memory->handle) : 0,
    };
    free(memory);
    return codes[0] != 0 ? codes[0] : codes[1] != 0 ? codes[1] : codes[2];
}

/* From a handle to an address that the device may use. */
static int map(struct memory *memory)
{
    memory->has_handle = true;
    int code = cu.reserve(&memory->address, memory->bytes, 0, 0, 0);
    memory->has_address = code == 0;
    if (code == 0) {
        code = cu.map(memory->address, memory->bytes, 0, memory->handle, 0);
        memory->mapped = code == 0;
    }
    return code == 0 ? allow(memory, memory->device) : code;
}

static void insert(struct memory *memory)
{
    memory->next = memories;
    memories = memory;
}

static struct memory *new_memory(int device, size_t bytes, bool peers)
{
    struct memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        fc_fail("out of memory");
    else
        *memory = (struct memory){.peers = peers, .device = device, .bytes = bytes};
    return memory;
}

static int alloc(int device, size_t bytes, uint64_t *address)
{
    struct memory *memory = usable() ? new_memory(device, bytes, false) : NULL;
    if (memory == NULL)
        return -1;
    properties wanted = {.type = PINNED, .handle_types = POSIX_FD, .place = {ON_DEVICE, device}};
    size_t granule = 1;
    int code = cu.granularity(&granule, &wanted, MINIMUM);
    memory->bytes = (bytes + granule - 1) / granule * granule;
    if (code == 0)
        code = cu.create(&memory->handle, memory->bytes, &wanted, 0);
    if (code == 0)
        code = map(memory);
    pthread_mutex_lock(&lock); /* no user is added between the two */
    for (int user = 0; code == 0 && user < MAX_DEVICES; user++)
        if ((users[device] >> user & 1) != 0)
            code = allow(memory, user);
    if (code == 0)
        insert(memory);
    pthread_mutex_unlock(&lock);
    if (code != 0) {
        discard(memory);
        return fc_driver_fail(&fc_cuda, code, "allocating %zu bytes on device %d, to be shared by a file descriptor, "
                                              "failed",
                              bytes, device);
    }
    *address = memory->address;
    return 0;
}

static bool has(uint64_t address, bool peers)
{
    pthread_mutex_lock(&lock);
    bool found = find(address, peers, false) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

static void export_done(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, false, false);
    fc_fd_offer *offer = memory != NULL ? memory->offer : NULL;
    if (memory != NULL)
        memory->offer = NULL;
    pthread_mutex_unlock(&lock);
    if (offer != NULL)
        fc_fd_offer_stop(offer);
}

static int release(uint64_t address, bool peers)
{
    if (!peers)
        export_done(address);
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, peers, true);
    pthread_mutex_unlock(&lock);
    return memory != NULL ? discard(memory) : ERROR_INVALID_VALUE;
}

static int offer(struct memory *memory)
{
    int fd = -1;
    int code = cu.export(&fd, memory->handle, POSIX_FD, 0);
    if (code != 0)
        return fc_driver_fail(&fc_cuda, code, "memory 0x%llx of device %d cannot be shared by a file descriptor",
                              (unsigned long long)memory->address, memory->device);
    fcntl(fd, F_SETFD, FD_CLOEXEC); /* no program that this process starts keeps the memory */
    memory->offer = fc_fd_offer_start(fd, memory->name);
    return memory->offer != NULL ? 0 : -1;
}

static int export(uint64_t address, uint8_t *handle, size_t *length)
{
    struct fd_handle made = {.kind = FC_HANDLE_CUDA_FD};
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, false, false);
    int result = memory == NULL ? fc_fail("address 0x%llx is freed already", (unsigned long long)address)
                 : memory->offer == NULL ? offer(memory)
                                         : 0;
    if (result == 0) {
        made.bytes = memory->bytes;
        memcpy(made.name, memory->name, sizeof made.name);
        memcpy(handle, &made, sizeof made);
        *length = sizeof made;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int open_peers(int device, const uint8_t *handle, size_t length, uint64_t *address)
{
    struct fd_handle got;
    if (length != sizeof got)
        return fc_fail("a memory handle of %zu bytes and kind %d has %zu bytes elsewhere; all ranks must use the same "
                       "flycomm",
                       length, FC_HANDLE_CUDA_FD, sizeof got);
    memcpy(&got, handle, sizeof got);
    int fd = usable() ? fc_fd_receive(got.name) : -1;
    struct memory *memory = fd >= 0 ? new_memory(device, got.bytes, true) : NULL;
    if (memory == NULL) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    int code = cu.import(&memory->handle, (void *)(intptr_t)fd, POSIX_FD);
    close(fd);
    if (code == 0)
        code = map(memory);
    if (code != 0) {
        discard(memory);
        return fc_driver_fail(&fc_cuda, code, "a peer's memory, got as a file descriptor, cannot be mapped on device %d",
                              device);
    }
    *address = memory->address;
    pthread_mutex_lock(&lock);
    insert(memory);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* cuCtxEnablePeerAccess is for memory of cuMemAlloc alone. */
static int peer_enable(int device, int peer_device)
{
    pthread_mutex_lock(&lock);
    int code = 0;
    for (const struct memory *memory = memories; code == 0 && memory != NULL; memory = memory->next)
        if (!memory->peers && memory->device == peer_device)
            code = allow(memory, device);
    if (code == 0)
        users[peer_device] |= (uint64_t)1 << device;
    pthread_mutex_unlock(&lock);
    return code;
}

const struct fc_fd_memory fc_cuda_fd = {
    .kind = FC_HANDLE_CUDA_FD,
    .alloc = alloc,
    .has = has,
    .release = release,
    .export = export,
    .export_done = export_done,
    .open = open_peers,
    .peer_enable = peer_enable,
};
