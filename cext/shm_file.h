/* Writes large values into the store through its file: write(2) instead of the mapping.
 *
 * A page that is touched through a mapping is cleared first, and costs a fault. A page that
 * write(2) fills completely is not cleared, and clearing is the larger part of the cost of a cold
 * `put`. One process of a host writes this way at a time, because the kernel admits one writer to a
 * file at a time, while the other processes can clear pages on their own processors: they use their
 * mappings.
 */
#ifndef HOPLITE_SHM_FILE_H
#define HOPLITE_SHM_FILE_H

#include "shm_object.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { FILE_PIECE_BYTES = 8 << 20, FILE_BYTES_MIN = 1 << 20, FILE_RETIRED = 1 << 30 };

typedef struct {
    int fd;
    uint32_t users; /* threads that use the descriptor; FILE_RETIRED: no further thread may begin */
    dev_t device;
    ino_t inode;
} shm_file;

static inline int file_open(int fd, shm_file *f) {
    struct stat s;
    f->fd = -1;
    f->users = 0;
    if (fstat(fd, &s) || (f->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)) < 0)
        return -1;
    f->device = s.st_dev;
    f->inode = s.st_ino;
    return 0;
}
/* User code may have closed every descriptor, and the number may now be another file's. */
static inline int file_is_ours(shm_file *f) {
    struct stat s;
    return f->fd >= 0 && !fstat(f->fd, &s) && s.st_dev == f->device && s.st_ino == f->inode;
}
static inline void file_close(shm_file *f) {
    if (file_is_ours(f))
        close(f->fd);
    f->fd = -1;
}
/* A thread begins to use the descriptor, until file_leave(). 0: it is closed, or about to be. */
static inline int file_enter(shm_file *f) {
    uint32_t users;
    do {
        users = LOAD(&f->users);
        if (users & FILE_RETIRED)
            return 0;
    } while (!CAS32(&f->users, users, users + 1));
    return 1;
}
static inline void file_leave(shm_file *f) {
    if (ADD(&f->users, -1) == FILE_RETIRED + 1)
        file_close(f);
}
/* Ends its use: it is closed here, or by the last thread that uses it. */
static inline void file_retire(shm_file *f) {
    if (OR(&f->users, FILE_RETIRED) == 0)
        file_close(f);
}
/* 1: written. 0: not written, or in part: the caller writes it through the mapping. */
static inline int file_write(shm_file *f, char *c, unsigned slot, const char *from, uint64_t bytes,
                             uint64_t at) {
    if (bytes < FILE_BYTES_MIN || !file_enter(f))
        return 0;
    if (!CAS32(&root_of(c)->file_writer, 0, slot + 1)) {
        file_leave(f);
        return 0;
    }
    int whole = file_is_ours(f);
    while (whole && bytes) {
        uint64_t n = bytes < FILE_PIECE_BYTES ? bytes : FILE_PIECE_BYTES;
        ssize_t done = pwrite(f->fd, from, n, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            whole = 0;
        else {
            from += done;
            at += (uint64_t)done;
            bytes -= (uint64_t)done;
        }
    }
    CAS32(&root_of(c)->file_writer, slot + 1, 0);
    file_leave(f);
    return whole;
}
#endif
