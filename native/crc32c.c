/* crc32c: the portable version, the choice between versions, and combining.
 *
 * All versions share one contract (sw_crc_kind) so that tests can compare each against the portable one.
 */
#include <endian.h>
#include <errno.h>
#include <string.h>

#include "stepwell.h"

#define POLYNOMIAL 0x82f63b78u /* bit-reversed, as everywhere here */
#define COPY_STEP_BYTES 16384u /* stays in a 32 KiB first-level cache beside its copy */

static uint32_t table[8][256];
static _Atomic(const sw_crc_kind *) chosen;

/* a * b modulo the polynomial; 0x80000000 is 1. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* x ** exponent modulo the polynomial. */
uint32_t sw_crc_power(uint64_t exponent)
{
    uint32_t result = 0x80000000u, square = 0x40000000u;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

static uint32_t portable_update(uint32_t state, const uint8_t *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word = le64toh(word) ^ state;
        state = table[7][word & 255] ^ table[6][word >> 8 & 255] ^ table[5][word >> 16 & 255] ^
                table[4][word >> 24 & 255] ^ table[3][word >> 32 & 255] ^ table[2][word >> 40 & 255] ^
                table[1][word >> 48 & 255] ^ table[0][word >> 56];
    }
    for (; size; data++, size--)
        state = table[0][(state ^ *data) & 255] ^ state >> 8;
    return state;
}

static uint32_t portable_copy(uint32_t state, uint8_t *to, const uint8_t *from, size_t size)
{
    while (size) {
        size_t step = size < COPY_STEP_BYTES ? size : COPY_STEP_BYTES;
        state = portable_update(state, from, step);
        memcpy(to, from, step);
        to += step, from += step, size -= step;
    }
    return state;
}

static const sw_crc_kind portable = {"portable", portable_update, portable_copy};

#ifdef SW_X86
static bool can_sse42(void)
{
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

static bool can_avx512(void)
{
    return can_sse42() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}
#endif

static const sw_crc_kind *find(const char *name)
{
#ifdef SW_X86
    if (can_avx512() && (!name || !strcmp(name, "avx512")))
        return &sw_crc_avx512;
    if (can_sse42() && (!name || !strcmp(name, "sse4.2")))
        return &sw_crc_sse42;
#endif
    return !name || !strcmp(name, "portable") ? &portable : NULL;
}

__attribute__((constructor)) static void init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? (value >> 1) ^ POLYNOMIAL : value >> 1;
        table[0][byte] = value;
    }
    for (int row = 1; row < 8; row++)
        for (uint32_t byte = 0; byte < 256; byte++)
            table[row][byte] = table[0][table[row - 1][byte] & 255] ^ table[row - 1][byte] >> 8;
#ifdef SW_X86
    __builtin_cpu_init();
    sw_crc_x86_init();
#endif
    atomic_store(&chosen, find(NULL));
}

const sw_crc_kind *sw_crc_kind_now(void)
{
    return atomic_load_explicit(&chosen, memory_order_acquire);
}

/* Forces one version by name, NULL goes back to the best. -ENOTSUP: this processor cannot run it. */
int sw_crc32c_select(const char *name)
{
    const sw_crc_kind *kind = find(name);
    if (!kind)
        return -ENOTSUP;
    atomic_store_explicit(&chosen, kind, memory_order_release);
    return 0;
}

const char *sw_crc32c_name(void)
{
    return sw_crc_kind_now()->name;
}

int sw_crc32c_supported(const char *name)
{
    return find(name) != NULL;
}

uint32_t sw_crc32c(uint32_t crc, const void *data, uint64_t size)
{
    return ~sw_crc_kind_now()->update(~crc, data, size);
}

/* The checksum of A followed by B, from those of A and B. */
uint32_t sw_crc32c_combine(uint32_t a, uint32_t b, uint64_t size_b)
{
    uint32_t shifted = a;
    /* 8 * size_b could overflow: shift by size_b bytes as eight times size_b bits */
    uint32_t power = sw_crc_power(size_b);
    for (int square = 0; square < 3; square++)
        power = multiply(power, power);
    shifted = multiply(shifted, power);
    return shifted ^ b;
}
