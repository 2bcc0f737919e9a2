/* Copies past the cache: what a save or a restore moves is not looked at again soon, and a store that
 * does not first read the line it overwrites saves a third of the memory traffic. */
#include <string.h>

#include "stepwell.h"

#ifdef SW_X86
#include <emmintrin.h>

#define STREAM_BYTES_MIN 4096u /* below, memcpy into the cache is faster */
#define AHEAD_BYTES 2048u

/* `size` is a multiple of 64 and `to` is aligned to 16. `ahead`: what is read soon, from `from` on. */
void sw_copy_lines(uint8_t *to, const uint8_t *from, size_t size, size_t ahead)
{
    for (size_t at = 0; at < size; at += 64) {
        const __m128i *source = (const __m128i *)(from + at);
        __m128i *target = (__m128i *)(to + at);
        _mm_prefetch((const char *)(from + at + ahead), _MM_HINT_T0);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
}

/* As memcpy; call sw_fence before telling another thread. */
void sw_copy(uint8_t *to, const uint8_t *from, size_t size)
{
    if (size < STREAM_BYTES_MIN) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to & 63, whole = (size - head) & ~(size_t)63;
    memcpy(to, from, head);
    sw_copy_lines(to + head, from + head, whole, AHEAD_BYTES);
    memcpy(to + head + whole, from + head + whole, size - head - whole);
}

/* Orders the stores above before whatever tells others of them. */
void sw_fence(void)
{
    _mm_sfence();
}
#else
void sw_copy(uint8_t *to, const uint8_t *from, size_t size)
{
    memcpy(to, from, size);
}

void sw_fence(void)
{
}
#endif
