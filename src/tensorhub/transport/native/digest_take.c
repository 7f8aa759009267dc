/* The inner loop of the digest, once for each instruction set that a compiler and a machine may have.
 *
 * The library is built for any processor of its kind; which loop runs is found out when it is loaded. */
#include "digest.h"

#include <string.h>

#define PRIME32_1 0x9E3779B1ull

enum { SCRAMBLE_AT = SECRET_BYTES - STRIPE_BYTES, STEP = 8 };

static uint64_t word(const unsigned char *bytes) {
    uint64_t found;
    memcpy(&found, bytes, sizeof found);
    return found;
}

void digest_take_plain(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes, size_t count, unsigned index) {
    for (; count; count--, stripes += STRIPE_BYTES) {
        const unsigned char *secret = digest_secret + STEP * index;
        for (int i = 0; i < DIGEST_LANES; i++) {
            uint64_t data = word(stripes + 8 * i), key = data ^ word(secret + 8 * i);
            lanes[i ^ 1] += data;
            lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
        }
        if (++index == BLOCK_STRIPES) {
            index = 0;
            for (int i = 0; i < DIGEST_LANES; i++)
                lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ word(digest_secret + SCRAMBLE_AT + 8 * i)) * PRIME32_1;
        }
    }
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

__attribute__((target("avx2"))) static __m256i take_half(__m256i lanes, const unsigned char *data,
                                                          const unsigned char *secret) {
    __m256i bytes = _mm256_loadu_si256((const void *)data);
    __m256i key = _mm256_xor_si256(bytes, _mm256_loadu_si256((const void *)secret));
    lanes = _mm256_add_epi64(lanes, _mm256_shuffle_epi32(bytes, 0x4E));
    return _mm256_add_epi64(lanes, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));
}

__attribute__((target("avx2"))) static __m256i scramble_half(__m256i lanes, const unsigned char *secret) {
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const void *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void take_avx2(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes,
                                                       size_t count, unsigned index) {
    __m256i low = _mm256_loadu_si256((const void *)lanes), high = _mm256_loadu_si256((const void *)(lanes + 4));
    for (; count; count--, stripes += STRIPE_BYTES) {
        const unsigned char *secret = digest_secret + STEP * index;
        low = take_half(low, stripes, secret);
        high = take_half(high, stripes + 32, secret + 32);
        if (++index == BLOCK_STRIPES) {
            index = 0;
            low = scramble_half(low, digest_secret + SCRAMBLE_AT);
            high = scramble_half(high, digest_secret + SCRAMBLE_AT + 32);
        }
    }
    _mm256_storeu_si256((void *)lanes, low);
    _mm256_storeu_si256((void *)(lanes + 4), high);
}

#if !defined(__clang__) /* whose releases do not agree on what a function of 512 bits must be marked with */
__attribute__((target("avx512f"))) static void take_avx512(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes,
                                                            size_t count, unsigned index) {
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    const __m512i scrambler = _mm512_loadu_si512(digest_secret + SCRAMBLE_AT);
    __m512i all = _mm512_loadu_si512(lanes);
    for (; count; count--, stripes += STRIPE_BYTES) {
        __m512i bytes = _mm512_loadu_si512(stripes);
        __m512i key = _mm512_xor_si512(bytes, _mm512_loadu_si512(digest_secret + STEP * index));
        all = _mm512_add_epi64(all, _mm512_shuffle_epi32(bytes, (_MM_PERM_ENUM)0x4E));
        all = _mm512_add_epi64(all, _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32)));
        if (++index == BLOCK_STRIPES) {
            index = 0;
            all = _mm512_xor_si512(_mm512_xor_si512(all, _mm512_srli_epi64(all, 47)), scrambler);
            __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(all, 32), prime);
            all = _mm512_add_epi64(_mm512_mul_epu32(all, prime), _mm512_slli_epi64(high, 32));
        }
    }
    _mm512_storeu_si512(lanes, all);
}
#endif

digest_take *digest_best(const char **name) {
#if !defined(__clang__)
    if (processor_has_avx512())
        return *name = "AVX-512", take_avx512;
#endif
    if (processor_has_avx2())
        return *name = "AVX2", take_avx2;
    return *name = "x86-64", digest_take_plain;
}

#else

digest_take *digest_best(const char **name) {
    return *name = "plain C", digest_take_plain;
}

#endif
