/* crc32c on x86-64: three interleaved streams of the crc32 instruction, and folding of 256 bytes a
 * round with VPCLMULQDQ. Both also come as a copy with non-temporal stores.
 *
 * Folding: a register of 128 bits stands for lo * x^64 + hi (reflected); moving it D bits forward is
 * lo * x^(D+64) + hi * x^D. The product of two reflected registers is shifted by one bit and the
 * 32-bit constants sit in the high half of 64 bits, hence the exponents D + 64 - 33 and D - 33.
 */
#include "stepwell.h"

#ifdef SW_X86
#include <immintrin.h>
#include <string.h>

#define LONG_BYTES 4096u  /* of each of the three streams */
#define SHORT_BYTES 256u
#define PREFETCH_BYTES 1024u
#define FUSED_BYTES_MIN 1024u
#define COPY_STEP_BYTES 16384u

#define TARGET_SSE42 __attribute__((target("sse4.2,pclmul")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2,avx2")))

static uint64_t shift_long[2], shift_short[2]; /* by one stream, by two */
static uint64_t fold_2048[2], fold_512[2], fold_128[2];

static void fold_init(uint64_t constants[2], unsigned bits)
{
    constants[0] = sw_crc_power(bits + 64 - 33);
    constants[1] = sw_crc_power(bits - 33);
}

void sw_crc_x86_init(void)
{
    for (unsigned streams = 1; streams <= 2; streams++) {
        shift_long[streams - 1] = sw_crc_power(8ull * LONG_BYTES * streams - 33);
        shift_short[streams - 1] = sw_crc_power(8ull * SHORT_BYTES * streams - 33);
    }
    fold_init(fold_2048, 2048);
    fold_init(fold_512, 512);
    fold_init(fold_128, 128);
}

static inline uint64_t load64(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

TARGET_SSE42 static inline uint64_t shifted(uint64_t state, uint64_t constant)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)state), _mm_cvtsi64_si128((long long)constant), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

/* 3 * stream bytes: the third stream's last word takes in the other two, moved to its place. */
TARGET_SSE42 static inline uint64_t three(uint64_t state, const uint8_t *data, size_t stream, const uint64_t shift[2])
{
    uint64_t b = 0, c = 0;
    const uint8_t *end = data + stream - 8;
    for (; data < end; data += 8) {
        state = _mm_crc32_u64(state, load64(data));
        b = _mm_crc32_u64(b, load64(data + stream));
        c = _mm_crc32_u64(c, load64(data + 2 * stream));
    }
    state = _mm_crc32_u64(state, load64(data));
    b = _mm_crc32_u64(b, load64(data + stream));
    return _mm_crc32_u64(c, load64(data + 2 * stream) ^ shifted(state, shift[1]) ^ shifted(b, shift[0]));
}

TARGET_SSE42 static uint32_t sse42_update(uint32_t start, const uint8_t *data, size_t size)
{
    uint64_t state = start;
    for (; size >= 3 * LONG_BYTES; data += 3 * LONG_BYTES, size -= 3 * LONG_BYTES)
        state = three(state, data, LONG_BYTES, shift_long);
    for (; size >= 3 * SHORT_BYTES; data += 3 * SHORT_BYTES, size -= 3 * SHORT_BYTES)
        state = three(state, data, SHORT_BYTES, shift_short);
    for (; size >= 8; data += 8, size -= 8)
        state = _mm_crc32_u64(state, load64(data));
    for (; size; data++, size--)
        state = _mm_crc32_u8((uint32_t)state, *data);
    return (uint32_t)state;
}

TARGET_SSE42 static uint32_t sse42_copy(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    size_t head = -(uintptr_t)to & 63;
    if (head > size)
        head = size;
    state = sse42_update(state, from, head);
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    while (size) {
        size_t step = size < COPY_STEP_BYTES ? size : COPY_STEP_BYTES;
        size_t whole = step & ~(size_t)63;
        state = sse42_update(state, from, step);
        sw_copy_lines(to, from, whole, COPY_STEP_BYTES);
        memcpy(to + whole, from + whole, step - whole);
        to += step, from += step, size -= step;
    }
    return state;
}

const sw_crc_kind sw_crc_sse42 = {"sse4.2", sse42_update, sse42_copy};

TARGET_AVX512 static inline __m512i fold(__m512i x, __m512i constants, __m512i add)
{
    __m512i lo = _mm512_clmulepi64_epi128(x, constants, 0x00), hi = _mm512_clmulepi64_epi128(x, constants, 0x11);
    return _mm512_ternarylogic_epi64(lo, hi, add, 0x96);
}

TARGET_AVX512 static inline __m128i fold_lane(__m128i x, __m128i constants, __m128i add)
{
    __m128i lo = _mm_clmulepi64_si128(x, constants, 0x00), hi = _mm_clmulepi64_si128(x, constants, 0x11);
    return _mm_ternarylogic_epi64(lo, hi, add, 0x96);
}

TARGET_AVX512 static inline __m512i broadcast(const uint64_t constants[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)constants));
}

TARGET_AVX512 static inline uint32_t reduce(__m512i x)
{
    __m128i k = _mm_loadu_si128((const __m128i *)fold_128);
    __m128i lane = fold_lane(_mm512_castsi512_si128(x), k, _mm512_extracti32x4_epi32(x, 1));
    lane = fold_lane(lane, k, _mm512_extracti32x4_epi32(x, 2));
    lane = fold_lane(lane, k, _mm512_extracti32x4_epi32(x, 3));
    uint64_t state = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(lane));
    return (uint32_t)_mm_crc32_u64(state, (uint64_t)_mm_extract_epi64(lane, 1));
}

/* Checksums, and copies too where `copying`; `to` is then aligned to 64. size >= 256; what is left is
 * below 64 bytes and its count is returned in *left. */
TARGET_AVX512 static inline __attribute__((always_inline)) uint32_t
folded(uint32_t start, uint8_t *to, const uint8_t *from, size_t size, bool copying, size_t *left)
{
    const __m512i k2048 = broadcast(fold_2048), k512 = broadcast(fold_512);
    __m512i x[4], y[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_loadu_si512(from + 64 * i);
        if (copying)
            _mm512_stream_si512((__m512i *)(to + 64 * i), x[i]);
    }
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)start)));
    size_t at = 256;
    for (; size - at >= 256; at += 256) {
        for (int i = 0; i < 4; i++) {
            if (copying)
                _mm_prefetch((const char *)(from + at + 64 * i + PREFETCH_BYTES), _MM_HINT_T0);
            y[i] = _mm512_loadu_si512(from + at + 64 * i);
        }
        for (int i = 0; i < 4; i++) {
            if (copying)
                _mm512_stream_si512((__m512i *)(to + at + 64 * i), y[i]);
            x[i] = fold(x[i], k2048, y[i]);
        }
    }
    __m512i one = fold(fold(fold(x[0], k512, x[1]), k512, x[2]), k512, x[3]);
    for (; size - at >= 64; at += 64) {
        __m512i word = _mm512_loadu_si512(from + at);
        if (copying)
            _mm512_stream_si512((__m512i *)(to + at), word);
        one = fold(one, k512, word);
    }
    *left = size - at;
    return reduce(one);
}

TARGET_AVX512 static uint32_t avx512_update(uint32_t state, const uint8_t *data, size_t size)
{
    if (size < 256)
        return sse42_update(state, data, size);
    size_t left;
    state = folded(state, NULL, data, size, false, &left);
    return sse42_update(state, data + size - left, left);
}

TARGET_AVX512 static uint32_t avx512_copy(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    if (size < FUSED_BYTES_MIN) {
        memcpy(to, from, size);
        return avx512_update(state, from, size);
    }
    size_t head = -(uintptr_t)to & 63, left;
    state = sse42_update(state, from, head);
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    state = folded(state, to, from, size, true, &left);
    memcpy(to + size - left, from + size - left, left);
    return sse42_update(state, from + size - left, left);
}

const sw_crc_kind sw_crc_avx512 = {"avx512", avx512_update, avx512_copy};
#endif
