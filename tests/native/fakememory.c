/* The memory of the fake driver: its own, and that of the host that is pinned. */
#include "fakecuda.h"

#include <stdlib.h>

#define TOTAL_BYTES ((uint64_t)64 << 30) /* unless a test says another size */
#define ALLOCATION_ALIGN 512

ranges pinned, buffers;
static ranges spare; /* freed, to be allocated again */

/* The index of what starts there; the count: nothing does. */
static int find(const ranges *of, uint64_t address)
{
    int at = 0;
    while (at < of->count && of->all[at].address != address)
        at++;
    return at;
}

static uint64_t total_bytes(void)
{
    const char *told = getenv("FAKECUDA_TOTAL_BYTES");
    return knobs.total ? knobs.total : told ? strtoull(told, NULL, 10) : TOTAL_BYTES;
}

static uint64_t free_bytes(void)
{
    uint64_t used = knobs.used, total = total_bytes();
    for (int i = 0; i < buffers.count; i++)
        used += buffers.all[i].bytes;
    return used < total ? total - used : 0;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; BEGIN(false) *bytes = total_bytes(); END }

EXPORT int cuMemGetInfo_v2(size_t *unused, size_t *all)
{
    BEGIN(true)
    *unused = free_bytes();
    *all = total_bytes();
    END
}

/* Memory of that size that was freed, as a driver likes to give it again. NULL: there is none. */
static void *used_before(size_t bytes)
{
    for (int i = 0; i < spare.count; i++)
        if (spare.all[i].bytes == bytes) {
            uint64_t address = spare.all[i].address;
            spare.all[i] = spare.all[--spare.count];
            return (void *)(uintptr_t)address;
        }
    return NULL;
}

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    BEGIN(true)
    void *memory = NULL;
    if (!bytes)
        error = INVALID_VALUE;
    else if (bytes > free_bytes() || buffers.count == RANGES_MAX)
        error = OUT_OF_MEMORY;
    else if (!(memory = used_before(bytes)) && posix_memalign(&memory, ALLOCATION_ALIGN, bytes))
        error = OUT_OF_MEMORY;
    if (!error) {
        *address = (uint64_t)(uintptr_t)memory;
        buffers.all[buffers.count].address = *address;
        buffers.all[buffers.count++].bytes = bytes;
    }
    END
}

EXPORT int cuMemFree_v2(uint64_t address)
{
    BEGIN(true)
    int at = find(&buffers, address);
    if (at == buffers.count || works_on(address, buffers.all[at].bytes)) {
        error = INVALID_VALUE;
    } else {
        if (knobs.reuse && spare.count < RANGES_MAX)
            spare.all[spare.count++] = buffers.all[at];
        else
            free((void *)(uintptr_t)address);
        buffers.all[at] = buffers.all[--buffers.count];
    }
    END
}

EXPORT int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    BEGIN(true)
    bool is_pinned;
    bool whole = in_one_piece(&pinned, (uint64_t)(uintptr_t)address, bytes, &is_pinned);
    if (!whole || is_pinned)
        error = ALREADY_REGISTERED;
    else if (flags != 1 || !bytes || pinned.count == RANGES_MAX)
        error = INVALID_VALUE;
    if (!error) {
        pinned.all[pinned.count].address = (uint64_t)(uintptr_t)address;
        pinned.all[pinned.count++].bytes = bytes;
    }
    END
}

EXPORT int cuMemHostUnregister(void *address)
{
    BEGIN(true)
    int at = find(&pinned, (uint64_t)(uintptr_t)address);
    if (at == pinned.count)
        error = NOT_REGISTERED;
    else
        pinned.all[at] = pinned.all[--pinned.count];
    END
}

/* Whether what is freed from now on is what is allocated next. */
EXPORT void fake_reuse(int reuse)
{
    pthread_mutex_lock(&lock);
    knobs.reuse = reuse;
    while (spare.count)
        free((void *)(uintptr_t)spare.all[--spare.count].address);
    pthread_mutex_unlock(&lock);
}
