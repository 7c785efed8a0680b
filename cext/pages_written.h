/* Which pages of this process's private memory were written since the last query.
 *
 * Reading 100 MB to check that they have not changed takes 10 ms; the kernel can tell in some 50
 * µs. userfaultfd with UFFD_FEATURE_WP_ASYNC write-protects pages, and resolves the fault of the
 * first write by itself (also for writes by system calls: no EFAULT). PAGEMAP_SCAN lists the pages
 * without protection and protects them again in one step. Both need Linux 6.7. A distribution's
 * headers may be older, so the definitions are repeated here, and the kernel is queried at run
 * time.
 */
#ifndef HOPLITE_PAGES_WRITTEN_H
#define HOPLITE_PAGES_WRITTEN_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint64_t api, features, ioctls;
} pages_uffd_api;
typedef struct {
    uint64_t start, len, mode, ioctls;
} pages_uffd_register;
typedef struct {
    uint64_t start, len;
} pages_uffd_range;
typedef struct {
    uint64_t start, end, categories;
} pages_region;
typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} pages_scan_arg;

enum { PAGES_REGIONS = 512, PAGES_UFFD_USER_MODE_ONLY = 1 };
#define PAGES_UFFDIO_API _IOWR(0xAA, 0x3F, pages_uffd_api)
#define PAGES_UFFDIO_REGISTER _IOWR(0xAA, 0x00, pages_uffd_register)
#define PAGES_UFFDIO_UNREGISTER _IOR(0xAA, 0x01, pages_uffd_range)
#define PAGES_SCAN _IOWR('f', 16, pages_scan_arg)
#define PAGES_UFFD_API 0xAAULL
#define PAGES_FEATURES ((1ULL << 13) | (1ULL << 15)) /* WP_UNPOPULATED, WP_ASYNC */
#define PAGES_REGISTER_MODE_WP 2ULL
#define PAGES_SCAN_FLAGS 3ULL /* PM_SCAN_WP_MATCHING, PM_SCAN_CHECK_WPASYNC */
#define PAGES_IS_WPALLOWED 1ULL
#define PAGES_IS_WRITTEN 2ULL
#define PAGES_IS_PRESENT 8ULL

/* 0: both descriptors are open; otherwise an errno. */
static inline int pages_open(int *uffd, int *pagemap) {
#ifdef SYS_userfaultfd
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | PAGES_UFFD_USER_MODE_ONLY);
    if (fd < 0)
        return errno;
    pages_uffd_api api = {PAGES_UFFD_API, PAGES_FEATURES, 0};
    int error = ioctl(fd, PAGES_UFFDIO_API, &api) ? errno : 0;
    if (!error && (api.features & PAGES_FEATURES) != PAGES_FEATURES)
        error = ENOSYS;
    int map = error ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (!error && map < 0)
        error = errno;
    if (error) {
        close(fd);
        return error;
    }
    *uffd = fd;
    *pagemap = map;
    return 0;
#else
    return ENOSYS;
#endif
}

/* Whole pages only. Registering twice has no effect. */
static inline int pages_register(int uffd, uint64_t start, uint64_t end) {
    pages_uffd_register range = {start, end - start, PAGES_REGISTER_MODE_WP, 0};
    return ioctl(uffd, PAGES_UFFDIO_REGISTER, &range) ? errno : 0;
}

static inline void pages_unregister(int uffd, uint64_t start, uint64_t end) {
    pages_uffd_range range = {start, end - start};
    ioctl(uffd, PAGES_UFFDIO_UNREGISTER, &range);
}

/* Finds regions from *start on that may have been written, and protects each again before it is
 * reported. *start becomes the position at which to continue. Returns their number, or -errno: then
 * some may have been protected without a report. Pages that are not present (returned, or swapped
 * out) count as written, because they have no protection to check. Whether a page belongs to a file
 * is not checked, which would cost ten times as much: the caller registers only private pages. */
static inline long pages_scan(int pagemap, uint64_t *start, uint64_t end, pages_region *regions) {
    pages_scan_arg arg;
    memset(&arg, 0, sizeof arg);
    arg.size = sizeof arg;
    arg.flags = PAGES_SCAN_FLAGS;
    arg.start = *start;
    arg.end = end;
    arg.vec = (uint64_t)(uintptr_t)regions;
    arg.vec_len = PAGES_REGIONS;
    arg.category_inverted = PAGES_IS_PRESENT;
    arg.category_anyof_mask = PAGES_IS_WRITTEN | PAGES_IS_PRESENT;
    arg.return_mask = PAGES_IS_WPALLOWED;
    long found = ioctl(pagemap, PAGES_SCAN, &arg);
    if (found < 0)
        return -(long)errno;
    *start = arg.walk_end;
    return found;
}
#endif
