/* SPDX-License-Identifier: Apache-2.0
 *
 * Names in /dev/shm by which processes find what a process shares.
 *
 * While a name exists, its owner holds a lock on it, and the kernel drops that lock when the owner dies. So a name
 * without a lock is left over from a process that was killed, whatever became of its pid since, and the next sweep
 * removes it. A name is a file (memory of the host target) or a folder with a socket in it (fd_socket.c).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shim.h"

#define PREFIX "flycomm."

int fc_name_make(char *name, size_t bytes)
{
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return fc_fail("the system gives no random numbers for a name in " FC_NAMES_FOLDER ": %s", strerror(errno));
    snprintf(name, bytes, PREFIX "%ld.%016llx", (long)getpid(), (unsigned long long)random);
    return 0;
}

bool fc_name_valid(const char *name, size_t bytes)
{
    return memchr(name, '\0', bytes) != NULL && strncmp(name, PREFIX, strlen(PREFIX)) == 0 && strchr(name, '/') == NULL;
}

static int lock(int file, int operation)
{
    int result;
    do
        result = flock(file, operation);
    while (result != 0 && errno == EINTR);
    return result;
}

int fc_name_lock(int file) { return lock(file, LOCK_EX); }

void fc_names_sweep(void)
{
    DIR *names = opendir(FC_NAMES_FOLDER);
    if (names == NULL)
        return;
    for (struct dirent *entry; (entry = readdir(names)) != NULL;) {
        if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) != 0)
            continue;
        int file = openat(dirfd(names), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (file < 0)
            continue;
        struct stat status;
        bool mine = fstat(file, &status) == 0 && status.st_uid == geteuid();
        if (mine && S_ISREG(status.st_mode) && lock(file, LOCK_EX | LOCK_NB) == 0) {
            unlinkat(dirfd(names), entry->d_name, 0);
        } else if (mine && S_ISDIR(status.st_mode) && lock(file, LOCK_EX | LOCK_NB) == 0) {
            unlinkat(file, FC_SOCKET, 0);
            unlinkat(dirfd(names), entry->d_name, AT_REMOVEDIR);
        }
        close(file);
    }
    closedir(names);
}
