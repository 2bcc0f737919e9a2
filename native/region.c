/* Memory for slots, made ready piece by piece: private, in huge pages where the system gives them; or a file in
 * memory, mapped by several processes. */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "stepwell.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define TMPFS 0x01021994
#define HUGETLBFS 0x958458f6

#define HUGE_BYTES ((uint64_t)2 << 20)

/* Returns the address of `size` bytes (a multiple of 4096), aligned to a huge page; or -errno. */
int64_t sw_region_new(uint64_t size)
{
    if (!size || size % SW_ALIGN_BYTES || size > (uint64_t)INT64_MAX / 2)
        return -EINVAL;
    uint8_t *wide = mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (wide == MAP_FAILED)
        return -errno;
    uint64_t head = -(uintptr_t)wide & (HUGE_BYTES - 1);
    if (head)
        munmap(wide, head);
    munmap(wide + head + size, HUGE_BYTES - head);
#ifdef MADV_HUGEPAGE
    (void)madvise(wide + head, size, MADV_HUGEPAGE); /* a kernel without them still gives small pages */
#endif
    return (int64_t)(uintptr_t)(wide + head);
}

/* Makes the pages present, keeping what they hold. -EFAULT, -ENOMEM, -EHWPOISON: they cannot be had. */
int sw_region_populate(uint64_t address, uint64_t size)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = address & ~(page - 1), stop = (address + size + page - 1) & ~(page - 1);
    int result;
    do {
        result = madvise((void *)(uintptr_t)start, stop - start, MADV_POPULATE_WRITE) ? errno : 0;
    } while (result == EINTR || result == EAGAIN);
    if (result != EINVAL)
        return -result;
    for (uint64_t at = start; at < stop; at += page) /* before Linux 5.14 */
        __atomic_fetch_or((uint8_t *)(uintptr_t)at, 0, __ATOMIC_RELAXED);
    return 0;
}

void sw_region_free(uint64_t address, uint64_t size)
{
    munmap((void *)(uintptr_t)address, size);
}

/* Maps `size` bytes of a file, from `offset` on; both multiples of its page. Forked children do not get it: what they
 * keep mapped could not be freed. On a tmpfs, bytes that can make up a huge page lie so that they do. Returns the
 * address, or -errno. */
int64_t sw_map_new(int fd, uint64_t offset, uint64_t size, int writable)
{
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    /* NORESERVE: huge pages are taken by fallocate, not all of them at once by this call */
    int flags = MAP_SHARED | MAP_NORESERVE;
    uint8_t *wide = MAP_FAILED, *at = NULL;
    uint64_t page_bytes;
    if (size <= (uint64_t)INT64_MAX / 2 && sw_memory_kind(fd, &page_bytes) == 1)
        wide = mmap(NULL, size + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide != MAP_FAILED) {
        at = wide + ((offset - (uintptr_t)wide) & (HUGE_BYTES - 1));
        flags |= MAP_FIXED;
    }
    at = mmap(at, size, protection, flags, fd, (off_t)offset);
    int error = at == MAP_FAILED ? errno : 0;
    if (!error && madvise(at, size, MADV_DONTFORK)) {
        error = errno;
        munmap(at, size);
    }
    if (wide != MAP_FAILED) {
        if (error)
            munmap(wide, size + HUGE_BYTES);
        else {
            if (at > wide)
                munmap(wide, (uint64_t)(at - wide));
            uint64_t head = (uint64_t)(at - wide), page = (uint64_t)sysconf(_SC_PAGESIZE);
            uint64_t stop = (head + size + page - 1) & ~(page - 1);
            munmap(wide + stop, size + HUGE_BYTES - stop);
        }
    }
    return error ? -error : (int64_t)(uintptr_t)at;
}

/* Memory for these bytes of a file on a tmpfs, which are a hole, in huge pages: several times as fast to get, and to
 * read by whoever maps them, as small ones. All multiples of a huge page. -errno if it cannot be had like that: then
 * some of it may have been, and `sw_map_allocate` goes on from there. (A tmpfs gives huge pages by itself only where
 * it was mounted for that.) Each call makes the kernel ask all CPUs for the pages that they keep in hand, which takes
 * milliseconds where these are busy: so it should be of many. */
int sw_map_huge(int fd, uint64_t address, uint64_t offset, uint64_t size)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (!size || (address | offset | size) & (HUGE_BYTES - 1))
        return -EINVAL;
    int grown = sw_map_allocate(fd, offset + size - page, page);
    if (grown)
        return grown;
    for (uint64_t at = 0; at < size; at += HUGE_BYTES) {
        /* a page that is there and in use: a hole is not made into a huge page. Touched without memory, it would be
         * a SIGBUS */
        int result = sw_map_allocate(fd, offset + at, page);
        if (result)
            return result;
        *(volatile uint8_t *)(uintptr_t)(address + at) = 0;
    }
    return madvise((void *)(uintptr_t)address, size, MADV_COLLAPSE) ? -errno : 0;
}

/* Gives back the memory of these bytes of a file, which keeps its size. */
int sw_map_punch(int fd, uint64_t offset, uint64_t size)
{
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size) ? -errno : 0;
}

/* Memory for these bytes of a file, which grows if need be. -ENOSPC here, where touching a page would be a SIGBUS. */
int sw_map_allocate(int fd, uint64_t offset, uint64_t size)
{
    int result;
    do {
        result = fallocate(fd, 0, (off_t)offset, (off_t)size) ? errno : 0;
    } while (result == EINTR);
    return -result;
}

/* Enters pages that are there into this process's tables, so that reading them faults no more. A kernel before 5.14
 * does so when they are touched. */
int sw_map_enter(uint64_t address, uint64_t size)
{
    return madvise((void *)(uintptr_t)address, size, MADV_POPULATE_READ) && errno != EINVAL ? -errno : 0;
}

/* 1: `fd` is on a tmpfs, 2: on a hugetlbfs, 0: on something else; the size of its pages in `page_bytes`. -errno. */
int sw_memory_kind(int fd, uint64_t *page_bytes)
{
    struct statfs found;
    if (fstatfs(fd, &found))
        return -errno;
    *page_bytes = (uint64_t)found.f_bsize;
    return (uint32_t)found.f_type == TMPFS ? 1 : (uint32_t)found.f_type == HUGETLBFS ? 2 : 0;
}

/* What was stored before is seen by others before what is stored after; and the same of loads. */
void sw_map_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}
