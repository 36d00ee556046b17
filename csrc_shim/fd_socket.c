/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptors travel by SCM_RIGHTS over a Unix socket in a folder of its own in /dev/shm, mode 0700. A socket with a
 * path, and not an abstract one: that would need a network namespace in common, and a pidfd a pid namespace, which
 * containers rarely have. /dev/shm they must have in common anyway, for the host target, NCCL and RCCL.
 *
 * One thread an offer gives the descriptor to whoever connects and is of the same user. It reads nothing and never
 * waits for a peer, so that it can always be stopped.
 */
#define _GNU_SOURCE
#include "fd_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

enum { PATIENCE_S = 10, BACKLOG = 64, PATH_BYTES = sizeof((struct sockaddr_un *)0)->sun_path };
enum { GIVEN = 'y', REFUSED = 'n' }; /* the one byte of an answer */

struct fc_fd_offer {
    fc_fd_offer *next;
    pid_t owner; /* a forked child has a copy of the list but no thread, and owns nothing in it */
    pthread_t server;
    int given, folder, listener, stop; /* descriptors, -1: none; the folder's holds the lock on the name */
    char name[FC_FD_NAME_BYTES];
};

static fc_fd_offer *offers;
static pthread_mutex_t offers_lock = PTHREAD_MUTEX_INITIALIZER;

static void socket_path(char path[PATH_BYTES], const char *name)
{
    snprintf(path, PATH_BYTES, FC_NAMES_FOLDER "/%.63s/" FC_SOCKET, name);
}

static void folder_path(char path[PATH_BYTES], const char *name)
{
    snprintf(path, PATH_BYTES, FC_NAMES_FOLDER "/%.63s", name);
}

static void remove_name(const char *name)
{
    char path[PATH_BYTES];
    socket_path(path, name);
    unlink(path);
    folder_path(path, name);
    rmdir(path);
}

/* A process that ends before its peers have come takes the names along. */
__attribute__((destructor)) static void remove_names_at_exit(void)
{
    if (pthread_mutex_trylock(&offers_lock) != 0)
        return; /* a thread is in here still: the next process removes what it leaves */
    for (const fc_fd_offer *offer = offers; offer != NULL; offer = offer->next)
        if (offer->owner == getpid())
            remove_name(offer->name);
    pthread_mutex_unlock(&offers_lock);
}

static struct sockaddr_un address_of(const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socket_path(address.sun_path, name);
    return address;
}

static void close_if_open(int file)
{
    if (file >= 0)
        close(file);
}

/* Whether this user is at the other end, as the kernel saw it when the connection was made. */
static bool same_user(int socket)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

/* ---- the process that has the descriptor */

/* Never waits: a message this small fits into a new connection. A peer that is gone already is no error here. */
static void answer(int peer, int given)
{
    bool give = same_user(peer);
    char byte = give ? GIVEN : REFUSED;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (give) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof given);
        memcpy(CMSG_DATA(rights), &given, sizeof given);
    }
    (void)!sendmsg(peer, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void *serve(void *data)
{
    const fc_fd_offer *offer = data;
    struct pollfd events[] = {{.fd = offer->stop, .events = POLLIN}, {.fd = offer->listener, .events = POLLIN}};
    for (;;) {
        if (poll(events, 2, -1) < 0)
            continue; /* interrupted */
        if (events[0].revents != 0)
            return NULL;
        int peer = accept4(offer->listener, NULL, NULL, SOCK_CLOEXEC);
        if (peer >= 0) {
            answer(peer, offer->given);
            close(peer);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            poll(events, 1, 50); /* the peer is still there when descriptors are */
        }
    }
}

/* A new, locked folder; its descriptor, or -1 with the error set. */
static int make_folder(char name[FC_FD_NAME_BYTES])
{
    for (;;) {
        char path[PATH_BYTES];
        if (fc_name_make(name, FC_FD_NAME_BYTES) != 0)
            return -1;
        folder_path(path, name);
        bool made = mkdir(path, 0700) == 0;
        if (!made && errno == EEXIST)
            continue;
        int folder = made ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (folder >= 0 && fc_name_lock(folder) == 0 && access(path, F_OK) == 0)
            return folder;
        int error = errno;
        close_if_open(folder);
        if (made && error == ENOENT)
            continue; /* another process swept it between its creation and its lock */
        rmdir(path);
        return fc_fail("%s cannot be made: %s; check that " FC_NAMES_FOLDER " is there and writable", path,
                       strerror(error));
    }
}

/* The thread takes no signal of the process: they are for the program's own. */
static int start_server(fc_fd_offer *offer)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&offer->server, NULL, serve, offer);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int listen_at(fc_fd_offer *offer)
{
    struct sockaddr_un address = address_of(offer->name);
    offer->stop = eventfd(0, EFD_CLOEXEC);
    offer->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (offer->stop < 0 || offer->listener < 0 ||
        bind(offer->listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(offer->listener, BACKLOG) != 0)
        return errno;
    return start_server(offer);
}

static void discard(fc_fd_offer *offer)
{
    close_if_open(offer->listener);
    if (offer->folder >= 0)
        remove_name(offer->name);
    close_if_open(offer->folder);
    close_if_open(offer->stop);
    close_if_open(offer->given);
    free(offer);
}

fc_fd_offer *fc_fd_offer_start(int fd, char name[FC_FD_NAME_BYTES])
{
    fc_names_sweep();
    fc_fd_offer *offer = calloc(1, sizeof *offer);
    if (offer == NULL) {
        close(fd);
        fc_fail("out of memory");
        return NULL;
    }
    *offer = (fc_fd_offer){.owner = getpid(), .given = fd, .folder = -1, .listener = -1, .stop = -1};
    offer->folder = make_folder(offer->name);
    int error = offer->folder >= 0 ? listen_at(offer) : 0;
    if (error != 0)
        fc_fail("no socket can be offered at " FC_NAMES_FOLDER "/%s: %s", offer->name, strerror(error));
    if (offer->folder < 0 || error != 0) {
        discard(offer);
        return NULL;
    }
    memcpy(name, offer->name, sizeof offer->name);
    pthread_mutex_lock(&offers_lock);
    offer->next = offers;
    offers = offer;
    pthread_mutex_unlock(&offers_lock);
    return offer;
}

void fc_fd_offer_stop(fc_fd_offer *offer)
{
    pthread_mutex_lock(&offers_lock);
    fc_fd_offer **at = &offers;
    while (*at != offer)
        at = &(*at)->next;
    *at = offer->next;
    pthread_mutex_unlock(&offers_lock);
    eventfd_write(offer->stop, 1);
    pthread_join(offer->server, NULL);
    discard(offer);
}

/* ---- the process that wants it */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int unreachable(const char *name, int error)
{
    char path[PATH_BYTES];
    socket_path(path, name);
    if (error == EAGAIN)
        return fc_fail("a peer's memory is offered at %s but its rank has not answered for %d s; look at whether it is "
                       "stopped",
                       path, PATIENCE_S);
    const char *why = error == ENOENT ? "its rank has ended, or has taken it back, or does not share " FC_NAMES_FOLDER
                                        " with this one (containers need one in common)"
                      : error == ECONNREFUSED || error == ECONNRESET ? "its rank has ended"
                      : error == EACCES || error == EPERM ? "ranks must be of the same user, in one user namespace"
                                                          : "look at the rank that offers it";
    return fc_fail("a peer's memory, offered at %s, cannot be fetched by user %ld (%s): %s", path, (long)geteuid(),
                   strerror(error), why);
}

/* Returns 0 or an errno, as below; EAGAIN: not in time. EPERM: there is another user at the other end. */
static int reach(int socket, const char *name, double deadline)
{
    struct sockaddr_un address = address_of(name);
    struct timeval patience = {.tv_sec = PATIENCE_S}; /* for a place in the owner's queue */
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    while (connect(socket, (struct sockaddr *)&address, sizeof address) != 0)
        if (errno != EINTR || seconds() >= deadline)
            return errno == EINTR ? EAGAIN : errno;
    return same_user(socket) ? 0 : EPERM;
}

static int wait_for_answer(int socket, double deadline)
{
    struct pollfd event = {.fd = socket, .events = POLLIN};
    for (;;) {
        double left = deadline - seconds();
        int ready = left > 0 ? poll(&event, 1, (int)(left * 1000) + 1) : 0;
        if (ready >= 0 || errno != EINTR)
            return ready > 0 ? 0 : ready == 0 ? EAGAIN : errno;
    }
}

static int take_answer(int socket, int *fd)
{
    char byte = 0;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0)
        return errno;
    if (got == 0)
        return ECONNREFUSED;
    if (byte == REFUSED)
        return EPERM;
    const struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (rights == NULL || rights->cmsg_type != SCM_RIGHTS)
        return (message.msg_flags & MSG_CTRUNC) != 0 ? EMFILE : EPROTO; /* no room for one more descriptor */
    memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    return 0;
}

int fc_fd_receive(const char name[FC_FD_NAME_BYTES])
{
    if (!fc_name_valid(name, FC_FD_NAME_BYTES))
        return fc_fail("a memory handle names no socket of flycomm");
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0)
        return fc_fail("no socket can be opened to fetch a peer's memory: %s", strerror(errno));
    int fd = -1;
    double deadline = seconds() + PATIENCE_S;
    int error = reach(connection, name, deadline);
    if (error == 0)
        error = wait_for_answer(connection, deadline);
    if (error == 0)
        error = take_answer(connection, &fd);
    close(connection);
    return error == 0 ? fd : unreachable(name, error);
}
