/* Gather and scatter: between one buffer and the many pieces of memory that a shard's bytes live in.
 *
 * Memory traffic is the cost, so each byte crosses the bus once: large runs are checksummed while they
 * are copied past the cache, small pieces are copied into a stretch of the buffer that is checksummed
 * while it is still in the first-level cache.
 */
#include <errno.h>
#include <string.h>

#include "stepwell.h"

#define RUN_BYTES_MIN 8192u     /* from here on a copy past the cache wins */
#define PREFETCH_BYTES 1024u
#define STRETCH_BYTES 16384u    /* of small pieces, before their checksum is taken */

/* Index of the piece that holds byte `at` of the shard; count if none does. */
uint64_t sw_map_find(const sw_map *map, uint64_t at)
{
    uint64_t low = 0, high = map->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (map->offsets[middle + 1] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The run that starts at `at`: its length, at most to `end`, and its address; 0 where there is none. */
uint64_t sw_map_run(const sw_map *map, uint64_t *piece, uint64_t at, uint64_t end, uint64_t *address)
{
    *address = 0;
    while (*piece < map->count && map->offsets[*piece + 1] <= at)
        ++*piece;
    if (*piece >= map->count)
        return end - at;
    uint64_t start = map->offsets[*piece], stop = map->offsets[*piece + 1];
    if (start > at)
        return (start < end ? start : end) - at;
    if (map->addresses[*piece])
        *address = map->addresses[*piece] + (at - start);
    return (stop < end ? stop : end) - at;
}

/* Pieces lie anywhere in memory: start on the next one's first lines while this one is copied. */
static void prefetch_next(const sw_map *map, uint64_t piece)
{
    if (piece + 1 >= map->count)
        return;
    const uint8_t *from = (const uint8_t *)(uintptr_t)map->addresses[piece + 1];
    for (unsigned at = 0; at < PREFETCH_BYTES; at += 64)
        __builtin_prefetch(from + at);
}

/* Fills [at, end) of the shard into `to`; returns the running checksum. Holes keep the bytes of `to`. */
static uint32_t gather(const sw_map *map, uint64_t *piece, uint64_t at, uint64_t end, uint8_t *to, bool checked)
{
    const sw_crc_kind *crc = sw_crc_kind_now();
    uint32_t state = ~0u;
    uint8_t *stretch = to; /* copied, not yet checksummed */
    while (at < end) {
        uint64_t address, length = sw_map_run(map, piece, at, end, &address);
        prefetch_next(map, *piece);
        const uint8_t *from = (const uint8_t *)(uintptr_t)address;
        if (from && checked && length >= RUN_BYTES_MIN) {
            state = crc->update(state, stretch, (size_t)(to - stretch));
            state = crc->copy(state, to, from, length);
            stretch = to + length;
        } else if (from) {
            checked ? (void)memcpy(to, from, length) : sw_copy(to, from, length);
        }
        to += length;
        at += length;
        if (checked && (size_t)(to - stretch) >= STRETCH_BYTES) {
            state = crc->update(state, stretch, (size_t)(to - stretch));
            stretch = to;
        }
    }
    return checked ? crc->update(state, stretch, (size_t)(to - stretch)) : state;
}

static void scatter(const sw_map *map, uint64_t *piece, uint64_t at, uint64_t end, const uint8_t *from)
{
    while (at < end) {
        uint64_t address, length = sw_map_run(map, piece, at, end, &address);
        if (address)
            sw_copy((uint8_t *)(uintptr_t)address, from, length);
        from += length;
        at += length;
    }
}

/* Pieces -> buffer, of a job the `length` bytes from its `begin`th on, which begin a block and lie in one piece of the
 * buffer; a checksum for each block into job->crcs. Returns the length of the job. */
int64_t sw_gather(const sw_job *job, uint64_t begin, uint64_t length)
{
    uint64_t first = job->map_offset + begin, address = job->address + begin;
    if (job->slots) {
        uint64_t slot = sw_map_find(job->slots, first);
        (void)sw_map_run(job->slots, &slot, first, first + length, &address);
    }
    if (!address)
        return (int64_t)job->length;
    uint8_t *buffer = (uint8_t *)(uintptr_t)address;
    uint64_t piece = sw_map_find(job->map, first);
    for (uint64_t at = 0, block = begin / SW_BLOCK_BYTES; at < length; at += SW_BLOCK_BYTES, block++) {
        uint64_t left = length - at, size = left < SW_BLOCK_BYTES ? left : SW_BLOCK_BYTES, start = first + at;
        uint32_t state = gather(job->map, &piece, start, start + size, buffer + at, job->crcs != NULL);
        if (job->crcs)
            job->crcs[block] = ~state;
    }
    if (job->crcs)
        memset(buffer + length, 0, -length & (SW_ALIGN_BYTES - 1));
    sw_fence();
    return (int64_t)job->length;
}

/* Buffer -> pieces, only blocks whose checksum is as expected. Returns the bytes of good blocks. */
int64_t sw_scatter(const sw_job *job, uint64_t *bad_blocks)
{
    const uint8_t *buffer = (const uint8_t *)(uintptr_t)job->address;
    uint64_t piece = job->map ? sw_map_find(job->map, job->map_offset) : 0;
    uint64_t good = 0;
    for (uint64_t at = 0, block = 0; at < job->length; at += SW_BLOCK_BYTES, block++) {
        uint64_t left = job->length - at, size = left < SW_BLOCK_BYTES ? left : SW_BLOCK_BYTES;
        uint64_t start = job->map_offset + at;
        if (job->crcs && sw_crc32c(0, buffer + at, size) != job->crcs[block]) {
            *bad_blocks |= (uint64_t)1 << block;
            continue;
        }
        if (job->map)
            scatter(job->map, &piece, start, start + size, buffer + at);
        good += size;
    }
    sw_fence();
    return (int64_t)good;
}
