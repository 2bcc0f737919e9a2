/* Memory for slots: private, huge pages where the system gives them, made ready piece by piece. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stepwell.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

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
