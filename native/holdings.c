/* Memory of a device, as this process holds it: allocated, lent, taken back, or freed by the tripwire.
 *
 * Lent memory may be freed at any moment, by whoever frees a block of the tripwire. A caching allocator that keeps
 * such a block unused gives it back before it would say that there is no memory left, and then tries once more. It
 * may have locks of its own, and the interpreter's, while it does: nothing here waits for those, nor does anybody
 * who has the lock of holdings, which is never held during a call of the driver.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"

#define DEVICES_MAX 64
#define AT_ONCE 64u /* blocks taken out of the books and freed: no memory is asked for while there is none */
#define EXPORT __attribute__((visibility("default")))

enum state { HELD, LENT, GONE /* the tripwire has freed it, and who lent it has yet to hear of that */ };

typedef struct {
    uint64_t address, bytes;
    sw_cuda *cuda; /* that allocated it; the block holds it */
    enum state state;
} block;

typedef struct {
    block *all; /* in the order of their addresses */
    size_t count, room;
} books;

struct sw_holdings {
    pid_t pid;
    pthread_mutex_t lock; /* of all that follows */
    books blocks, wires;  /* what users of engines have allocated; the tripwire's own */
    sw_cuda *open;        /* of engines that are open, by `next_open` */
    uint64_t trips, trip_bytes;
};

/* By the device's ordinal. A forked child makes others: somebody may have been in its parent's just then. */
static _Atomic(sw_holdings *) of_device[DEVICES_MAX];

static sw_holdings *holdings_of(int ordinal)
{
    sw_holdings *found = ordinal >= 0 && ordinal < DEVICES_MAX ? atomic_load(&of_device[ordinal]) : NULL;
    return found && found->pid == getpid() ? found : NULL;
}

/* Those of a device, for the life of the process. NULL: no memory. */
sw_holdings *sw_holdings_make(int ordinal)
{
    sw_holdings *found = holdings_of(ordinal);
    if (found || ordinal < 0 || ordinal >= DEVICES_MAX)
        return found;
    sw_holdings *fresh = calloc(1, sizeof *fresh), *former = atomic_load(&of_device[ordinal]);
    if (!fresh)
        return NULL;
    fresh->pid = getpid();
    pthread_mutex_init(&fresh->lock, NULL);
    while (!former || former->pid != fresh->pid)
        if (atomic_compare_exchange_weak(&of_device[ordinal], &former, fresh))
            return fresh;
    pthread_mutex_destroy(&fresh->lock);
    free(fresh);
    return former;
}

/* Where a block with that address is, or would be. Caller holds the lock, as for the next three. */
static size_t place_of(const books *books, uint64_t address)
{
    size_t low = 0, high = books->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (books->all[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* NULL: there is none. */
static block *find(const books *books, uint64_t address)
{
    size_t at = place_of(books, address);
    return at < books->count && books->all[at].address == address ? &books->all[at] : NULL;
}

static int insert(books *books, block fresh)
{
    if (books->count == books->room) {
        size_t room = books->room ? 2 * books->room : 64;
        block *larger = realloc(books->all, room * sizeof *larger);
        if (!larger)
            return -ENOMEM;
        books->all = larger;
        books->room = room;
    }
    size_t at = place_of(books, fresh.address);
    memmove(&books->all[at + 1], &books->all[at], (books->count - at) * sizeof fresh);
    books->all[at] = fresh;
    books->count++;
    return 0;
}

static bool withdraw(books *books, uint64_t address, block *out)
{
    block *found = find(books, address);
    if (!found)
        return false;
    *out = *found;
    books->count--;
    memmove(found, found + 1, (size_t)(&books->all[books->count] - found) * sizeof *out);
    return true;
}

/* Notes what was allocated just now. -EADDRINUSE: who lent what was there would take the new for the old. */
static int add(sw_holdings *holdings, books *books, block fresh)
{
    pthread_mutex_lock(&holdings->lock);
    const block *former = find(books, fresh.address);
    int result = former ? -EADDRINUSE : insert(books, fresh);
    pthread_mutex_unlock(&holdings->lock);
    return result;
}

/* Out of the books: from then on nobody else frees it. */
static bool take(sw_holdings *holdings, books *books, uint64_t address, block *out)
{
    pthread_mutex_lock(&holdings->lock);
    bool found = withdraw(books, address, out);
    pthread_mutex_unlock(&holdings->lock);
    return found;
}

static int give_back(sw_cuda *cuda, uint64_t address)
{
    int mode, result = sw_cuda_enter(cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuMemFree, address);
    sw_cuda_leave(cuda, mode);
    return result;
}

/* Some of the lent blocks, at most so many, which the caller holds from now on. They stay in the books as gone, so
 * that who lent them hears of it; what an engine that closes has lent does not, be it gone or not. */
static size_t take_lent(sw_holdings *holdings, const sw_cuda *closing, block *out, size_t most)
{
    books *books = &holdings->blocks;
    size_t kept = 0, taken = 0;
    pthread_mutex_lock(&holdings->lock);
    for (size_t at = 0; at < books->count; at++) {
        block *here = &books->all[at];
        bool wanted = closing ? here->cuda == closing && here->state != HELD : here->state == LENT;
        if (wanted && taken < most) {
            out[taken++] = *here;
            if (closing)
                continue;
            sw_cuda_hold(here->cuda);
            here->state = GONE;
        }
        books->all[kept++] = *here;
    }
    books->count = kept;
    pthread_mutex_unlock(&holdings->lock);
    return taken;
}

/* Frees what is lent, not without end while others go on lending. Returns how many bytes. */
static uint64_t free_lent(sw_holdings *holdings, const sw_cuda *closing)
{
    block taken[AT_ONCE];
    uint64_t bytes = 0;
    pthread_mutex_lock(&holdings->lock);
    size_t left = holdings->blocks.count, count = 1;
    pthread_mutex_unlock(&holdings->lock);
    for (; left && count; left -= count) {
        count = take_lent(holdings, closing, taken, left < AT_ONCE ? left : AT_ONCE);
        for (size_t i = 0; i < count; i++) {
            if (taken[i].state == LENT && !give_back(taken[i].cuda, taken[i].address))
                bytes += taken[i].bytes;
            sw_cuda_drop(taken[i].cuda);
        }
    }
    return bytes;
}

static int allocate(sw_cuda *cuda, books *books, uint64_t bytes, uint64_t *address)
{
    int mode, result = sw_cuda_begin(cuda, &mode);
    if (result)
        return result;
    result = SW_CUDA(cuda, cuMemAlloc, address, bytes);
    if (!result) {
        sw_cuda_hold(cuda);
        result = add(cuda->holdings, books, (block){*address, bytes, cuda, HELD});
        if (result) {
            (void)cuda->driver.cuMemFree(*address);
            sw_cuda_drop(cuda);
        }
    }
    sw_cuda_leave(cuda, mode);
    return result;
}

/* Memory of the device. -ENOMEM: there is not as much, and all is as it was. -EADDRINUSE: it would lie where lent
 * memory was freed, and who lent that has not tried to take it back. */
int sw_cuda_allocate(sw_cuda *cuda, uint64_t bytes, uint64_t *address)
{
    return allocate(cuda, &cuda->holdings->blocks, bytes, address);
}

/* No job may be using the memory. -EINVAL: it is not allocated, or the tripwire has freed it. */
int sw_cuda_free(sw_cuda *cuda, uint64_t address)
{
    block taken;
    if (cuda->pid != getpid())
        return -ECHILD;
    sw_holdings *holdings = cuda->holdings;
    if (!take(holdings, &holdings->blocks, address, &taken))
        return -EINVAL;
    int result = taken.state == GONE ? -EINVAL : give_back(cuda, address);
    if (!result || taken.state == GONE || add(holdings, &holdings->blocks, taken))
        sw_cuda_drop(taken.cuda);
    return result;
}

/* From now on the tripwire may free these. -EINVAL: one is not allocated, and none is lent. */
int sw_cuda_lend(sw_cuda *cuda, const uint64_t *addresses, uint32_t count)
{
    if (cuda->pid != getpid())
        return -ECHILD;
    sw_holdings *holdings = cuda->holdings;
    int result = 0;
    pthread_mutex_lock(&holdings->lock);
    for (uint32_t i = 0; i < count && !result; i++) {
        const block *found = find(&holdings->blocks, addresses[i]);
        result = found && found->state != GONE ? 0 : -EINVAL;
    }
    for (uint32_t i = 0; i < count && !result; i++)
        find(&holdings->blocks, addresses[i])->state = LENT;
    pthread_mutex_unlock(&holdings->lock);
    return result;
}

/* Which of these the tripwire has not freed; from now on it does not. */
int sw_cuda_take_back(sw_cuda *cuda, const uint64_t *addresses, uint32_t count, uint8_t *ours)
{
    if (cuda->pid != getpid())
        return -ECHILD;
    sw_holdings *holdings = cuda->holdings;
    for (uint32_t i = 0; i < count; i++) {
        block gone;
        pthread_mutex_lock(&holdings->lock);
        block *found = find(&holdings->blocks, addresses[i]);
        bool told = found && found->state == GONE && withdraw(&holdings->blocks, addresses[i], &gone);
        ours[i] = found && !told;
        if (ours[i])
            found->state = HELD;
        pthread_mutex_unlock(&holdings->lock);
        if (told)
            sw_cuda_drop(gone.cuda);
    }
    return 0;
}

/* How often the device's tripwire has fired in this process, and how many lent bytes it has freed. */
int sw_cuda_trips(sw_cuda *cuda, uint64_t *trips, uint64_t *bytes)
{
    if (cuda->pid != getpid())
        return -ECHILD;
    pthread_mutex_lock(&cuda->holdings->lock);
    *trips = cuda->holdings->trips;
    *bytes = cuda->holdings->trip_bytes;
    pthread_mutex_unlock(&cuda->holdings->lock);
    return 0;
}

/* The tripwire allocates through one of those that are open. */
void sw_holdings_open(sw_cuda *cuda)
{
    sw_holdings *holdings = cuda->holdings;
    pthread_mutex_lock(&holdings->lock);
    cuda->next_open = holdings->open;
    holdings->open = cuda;
    pthread_mutex_unlock(&holdings->lock);
}

/* Nobody else will free what an engine has allocated and lent. */
void sw_holdings_close(sw_cuda *cuda)
{
    sw_holdings *holdings = cuda->holdings;
    pthread_mutex_lock(&holdings->lock);
    sw_cuda **link = &holdings->open;
    while (*link && *link != cuda)
        link = &(*link)->next_open;
    if (*link)
        *link = cuda->next_open;
    pthread_mutex_unlock(&holdings->lock);
    (void)free_lent(holdings, cuda);
}

/* The tripwire, as torch's CUDAPluggableAllocator wants its functions. A block of it; NULL: there is none. */
EXPORT void *stepwell_trip_alloc(ssize_t bytes, int device, void *stream)
{
    sw_holdings *holdings = holdings_of(device);
    uint64_t address = 0;
    (void)stream;
    if (!holdings || bytes <= 0)
        return NULL;
    pthread_mutex_lock(&holdings->lock);
    sw_cuda *cuda = holdings->open;
    if (cuda)
        sw_cuda_hold(cuda);
    pthread_mutex_unlock(&holdings->lock);
    if (!cuda)
        return NULL;
    int result = allocate(cuda, &holdings->wires, (uint64_t)bytes, &address);
    sw_cuda_drop(cuda);
    return result ? NULL : (void *)(uintptr_t)address;
}

/* Frees the block, then all that is lent. */
EXPORT void stepwell_trip_free(void *pointer, ssize_t bytes, int device, void *stream)
{
    sw_holdings *holdings = holdings_of(device);
    block taken;
    (void)bytes, (void)stream;
    if (!holdings)
        return;
    if (take(holdings, &holdings->wires, (uint64_t)(uintptr_t)pointer, &taken)) {
        (void)give_back(taken.cuda, taken.address);
        sw_cuda_drop(taken.cuda);
    }
    uint64_t freed = free_lent(holdings, NULL);
    pthread_mutex_lock(&holdings->lock);
    holdings->trips++;
    holdings->trip_bytes += freed;
    pthread_mutex_unlock(&holdings->lock);
}
