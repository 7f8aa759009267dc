/* The inner loop of the digest once more, for bytes that are copied: each is loaded once, stored and taken.
 *
 * Who owns the bytes may change them meanwhile. What is stored is what was hashed all the same, for it comes out of one
 * register: `pinned` keeps the compiler from loading a second time what it believes that nobody changes.
 *
 * The stores go past the caches, where the target would only push out what is still to be hashed. */
#include "digest.h"

#define PRIME32_1 0x9E3779B1ull

enum { SCRAMBLE_AT = SECRET_BYTES - STRIPE_BYTES, STEP = 8 };

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define ALWAYS static inline __attribute__((always_inline))
#define pinned(value) __asm__ volatile("" : "+v"(value))

__attribute__((target("avx2"))) ALWAYS __m256i take_half(__m256i lanes, __m256i bytes, const unsigned char *secret) {
    __m256i key = _mm256_xor_si256(bytes, _mm256_loadu_si256((const void *)secret));
    lanes = _mm256_add_epi64(lanes, _mm256_shuffle_epi32(bytes, 0x4E));
    return _mm256_add_epi64(lanes, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));
}

__attribute__((target("avx2"))) ALWAYS __m256i scramble_half(__m256i lanes, const unsigned char *secret) {
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const void *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

/* 16 bytes are the alignment that malloc gives, and so what a large numpy array has; tensors of torch have 64. */
__attribute__((target("avx2"))) ALWAYS void put_half(unsigned char *out, __m256i bytes) {
    if ((uintptr_t)out % 32 == 0) {
        _mm256_stream_si256((void *)out, bytes);
    } else {
        _mm_stream_si128((void *)out, _mm256_castsi256_si128(bytes));
        _mm_stream_si128((void *)(out + 16), _mm256_extracti128_si256(bytes, 1));
    }
}

__attribute__((target("avx2"))) static void store_avx2(uint64_t lanes[DIGEST_LANES], unsigned char *out,
                                                       const unsigned char *stripes, size_t count, unsigned index) {
    __m256i low = _mm256_loadu_si256((const void *)lanes), high = _mm256_loadu_si256((const void *)(lanes + 4));
    for (; count; count--, stripes += STRIPE_BYTES, out += STRIPE_BYTES) {
        const unsigned char *secret = digest_secret + STEP * index;
        __m256i one = _mm256_loadu_si256((const void *)stripes);
        __m256i other = _mm256_loadu_si256((const void *)(stripes + 32));
        pinned(one);
        pinned(other);
        put_half(out, one);
        put_half(out + 32, other);
        low = take_half(low, one, secret);
        high = take_half(high, other, secret + 32);
        if (++index == BLOCK_STRIPES) {
            index = 0;
            low = scramble_half(low, digest_secret + SCRAMBLE_AT);
            high = scramble_half(high, digest_secret + SCRAMBLE_AT + 32);
        }
    }
    _mm256_storeu_si256((void *)lanes, low);
    _mm256_storeu_si256((void *)(lanes + 4), high);
    _mm_sfence(); /* what went past the caches is seen by whoever is told of it */
}

#if !defined(__clang__) /* as in digest_take.c */
__attribute__((target("avx512f"))) ALWAYS void put_all(unsigned char *out, __m512i bytes) {
    if ((uintptr_t)out % 64 == 0) {
        _mm512_stream_si512((void *)out, bytes);
    } else {
        _mm_stream_si128((void *)out, _mm512_castsi512_si128(bytes));
        _mm_stream_si128((void *)(out + 16), _mm512_extracti32x4_epi32(bytes, 1));
        _mm_stream_si128((void *)(out + 32), _mm512_extracti32x4_epi32(bytes, 2));
        _mm_stream_si128((void *)(out + 48), _mm512_extracti32x4_epi32(bytes, 3));
    }
}

__attribute__((target("avx512f"))) static void store_avx512(uint64_t lanes[DIGEST_LANES], unsigned char *out,
                                                            const unsigned char *stripes, size_t count,
                                                            unsigned index) {
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    const __m512i scrambler = _mm512_loadu_si512(digest_secret + SCRAMBLE_AT);
    __m512i all = _mm512_loadu_si512(lanes);
    for (; count; count--, stripes += STRIPE_BYTES, out += STRIPE_BYTES) {
        __m512i bytes = _mm512_loadu_si512(stripes);
        pinned(bytes);
        put_all(out, bytes);
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
    _mm_sfence();
}
#endif

digest_store *digest_storing(unsigned which) {
#if !defined(__clang__)
    if (which == 0 && processor_has_avx512())
        return store_avx512;
#endif
    return which <= 1 && processor_has_avx2() ? store_avx2 : NULL;
}

#else

digest_store *digest_storing(unsigned which) {
    (void)which;
    return NULL;
}

#endif
