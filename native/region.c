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
 * keep mapped could not be freed. Returns the address, or -errno. */
int64_t sw_map_new(int fd, uint64_t offset, uint64_t size, int writable)
{
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    /* NORESERVE: huge pages are taken by fallocate, not all of them at once by this call */
    void *at = mmap(NULL, size, protection, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
    if (at == MAP_FAILED)
        return -errno;
    if (madvise(at, size, MADV_DONTFORK)) {
        int error = errno;
        munmap(at, size);
        return -error;
    }
    return (int64_t)(uintptr_t)at;
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
