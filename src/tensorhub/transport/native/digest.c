/* The digest xxh3-128, from its specification; its inner loop for each instruction set, and with a copy in one pass. */
#include "digest.h"

#include <string.h>

/* -- The digest, from its specification: short contents at once, long ones stripe by stripe. */

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || !defined(__SIZEOF_INT128__)
#error "only for little-endian machines of 64 bits"
#endif

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MX1 0x165667919E3779F9ull
#define PRIME_MX2 0x9FB21C651E98DF25ull

typedef unsigned __int128 wide_t;
typedef struct { uint64_t low, high; } pair_t;

/* The secret that the specification gives for hashing without a seed. */
const unsigned char digest_secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

enum { COPY_BYTES = 16 << 10, FEW_STRIPES = 16 }; /* hashed in the nearest cache; fewer are not worth the fence */

static digest_take *take = digest_take_plain;
static digest_store *store = NULL;

__attribute__((constructor)) static void choose(void) {
    const char *name;
    take = digest_best(&name);
    store = digest_storing(0);
}

static uint32_t word32(const unsigned char *bytes) {
    uint32_t found;
    memcpy(&found, bytes, sizeof found);
    return found;
}

static uint64_t word64(const unsigned char *bytes) {
    uint64_t found;
    memcpy(&found, bytes, sizeof found);
    return found;
}

static uint64_t secret64(int at) { return word64(digest_secret + at); }

static uint64_t folded(uint64_t one, uint64_t other) {
    wide_t product = (wide_t)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t x) {
    x = (x ^ (x >> 37)) * PRIME_MX1;
    return x ^ (x >> 32);
}

static uint64_t avalanche_of_xxh64(uint64_t x) {
    x = (x ^ (x >> 33)) * PRIME64_2;
    x = (x ^ (x >> 29)) * PRIME64_3;
    return x ^ (x >> 32);
}

static pair_t of_1_to_3(const unsigned char *bytes, uint32_t size) {
    uint32_t joined = bytes[size - 1] | size << 8 | (uint32_t)bytes[0] << 16 | (uint32_t)bytes[size >> 1] << 24;
    uint32_t turned = __builtin_bswap32(joined);
    turned = turned << 13 | turned >> 19;
    uint64_t low = word32(digest_secret) ^ word32(digest_secret + 4);
    uint64_t high = word32(digest_secret + 8) ^ word32(digest_secret + 12);
    return (pair_t){avalanche_of_xxh64(low ^ joined), avalanche_of_xxh64(high ^ turned)};
}

static pair_t of_4_to_8(const unsigned char *bytes, uint64_t size) {
    uint64_t joined = word32(bytes) | (uint64_t)word32(bytes + size - 4) << 32;
    wide_t product = (wide_t)(secret64(16) ^ secret64(24) ^ joined) * (PRIME64_1 + (size << 2));
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    high += low << 1;
    low ^= high >> 3;
    low = (low ^ (low >> 35)) * PRIME_MX2;
    return (pair_t){low ^ (low >> 28), avalanche(high)};
}

static pair_t of_9_to_16(const unsigned char *bytes, uint64_t size) {
    uint64_t first = word64(bytes), last = word64(bytes + size - 8);
    uint64_t one = secret64(32) ^ secret64(40) ^ first ^ last, other = secret64(48) ^ secret64(56) ^ last;
    wide_t product = (wide_t)one * PRIME64_1;
    uint64_t low = (uint64_t)product + ((size - 1) << 54);
    uint64_t high = (uint64_t)(product >> 64) + other + (other & 0xFFFFFFFF) * (PRIME32_2 - 1);
    product = (wide_t)(low ^ __builtin_bswap64(high)) * PRIME64_2;
    high = (uint64_t)(product >> 64) + high * PRIME64_2;
    return (pair_t){avalanche((uint64_t)product), avalanche(high)};
}

static uint64_t mixed(const unsigned char *bytes, int secret, uint64_t seed) {
    return folded(word64(bytes) ^ (secret64(secret) + seed), word64(bytes + 8) ^ (secret64(secret + 8) - seed));
}

static void mix_two(uint64_t sums[2], const unsigned char *one, const unsigned char *other, int secret, uint64_t seed) {
    sums[0] = (sums[0] + mixed(one, secret, seed)) ^ (word64(other) + word64(other + 8));
    sums[1] = (sums[1] + mixed(other, secret + 16, seed)) ^ (word64(one) + word64(one + 8));
}

static pair_t of_17_to_240(const unsigned char *bytes, uint64_t size) {
    uint64_t sums[2] = {size * PRIME64_1, 0};
    if (size <= 128) {
        for (int i = (int)((size - 1) >> 5); i >= 0; i--)
            mix_two(sums, bytes + 16 * i, bytes + size - 16 * i - 16, 32 * i, 0);
    } else {
        int count = (int)(size >> 5);
        for (int i = 0; i < 4; i++)
            mix_two(sums, bytes + 32 * i, bytes + 32 * i + 16, 32 * i, 0);
        sums[0] = avalanche(sums[0]);
        sums[1] = avalanche(sums[1]);
        for (int i = 4; i < count; i++)
            mix_two(sums, bytes + 32 * i, bytes + 32 * i + 16, 32 * (i - 4) + 3, 0);
        mix_two(sums, bytes + size - 16, bytes + size - 32, 103, 0);
    }
    uint64_t high = sums[0] * PRIME64_1 + sums[1] * PRIME64_4 + size * PRIME64_2;
    return (pair_t){avalanche(sums[0] + sums[1]), 0 - avalanche(high)};
}

static pair_t of_short(const unsigned char *bytes, uint64_t size) {
    if (size > 16)
        return of_17_to_240(bytes, size);
    if (size > 8)
        return of_9_to_16(bytes, size);
    if (size > 3)
        return of_4_to_8(bytes, size);
    if (size > 0)
        return of_1_to_3(bytes, (uint32_t)size);
    return (pair_t){avalanche_of_xxh64(secret64(64) ^ secret64(72)), avalanche_of_xxh64(secret64(80) ^ secret64(88))};
}

static uint64_t merged(const uint64_t lanes[DIGEST_LANES], uint64_t first, int secret) {
    for (int i = 0; i < DIGEST_LANES; i += 2)
        first += folded(lanes[i] ^ secret64(secret + 8 * i), lanes[i + 1] ^ secret64(secret + 8 * i + 8));
    return avalanche(first);
}

static pair_t of_long(const digest_t *digest) {
    uint64_t lanes[DIGEST_LANES];
    memcpy(lanes, digest->lanes, sizeof lanes);
    for (int i = 0; i < DIGEST_LANES; i++) { /* the last stripe: with a part of the secret that no other has */
        uint64_t data = word64(digest->last + 8 * i), key = data ^ secret64(SECRET_BYTES - 71 + 8 * i);
        lanes[i ^ 1] += data;
        lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
    return (pair_t){merged(lanes, digest->size * PRIME64_1, 11),
                    merged(lanes, ~(digest->size * PRIME64_2), SECRET_BYTES - 75)};
}

void digest_begin(digest_t *digest, uint64_t size) {
    static const uint64_t lanes[DIGEST_LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                                 PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(digest->lanes, lanes, sizeof lanes);
    digest->size = size;
    digest->seen = digest->taken = 0;
    digest->stripes = size > SHORT_BYTES ? (size - 1) / STRIPE_BYTES : 0;
}

/* Take whole stripes, and remember how many of the block there are. */
static size_t take_stripes(digest_t *digest, const unsigned char *bytes, size_t count) {
    uint64_t left = digest->stripes - digest->taken;
    count = count < left ? count : (size_t)left;
    take(digest->lanes, bytes, count, (unsigned)(digest->taken % BLOCK_STRIPES));
    digest->taken += count;
    return count * STRIPE_BYTES;
}

/* Keep what belongs to the last stripe, of bytes that begin at `seen`. */
static void keep_last(digest_t *digest, const unsigned char *bytes, size_t length) {
    uint64_t first = digest->size - STRIPE_BYTES, end = digest->seen + length;
    if (end <= first)
        return;
    uint64_t from = digest->seen > first ? digest->seen : first;
    memcpy(digest->last + (from - first), bytes + (from - digest->seen), (size_t)(end - from));
}

static void update_long(digest_t *digest, const unsigned char *bytes, size_t length) {
    size_t begun = (size_t)(digest->seen - digest->taken * STRIPE_BYTES); /* less than a stripe, until all are taken */
    keep_last(digest, bytes, length);
    digest->seen += length;
    if (digest->taken == digest->stripes)
        return;
    if (begun) {
        size_t missing = STRIPE_BYTES - begun;
        size_t more = length < missing ? length : missing;
        memcpy(digest->held + begun, bytes, more);
        if (more < missing)
            return;
        take_stripes(digest, digest->held, 1);
        bytes += more;
        length -= more;
    }
    size_t used = take_stripes(digest, bytes, length / STRIPE_BYTES);
    if (digest->taken < digest->stripes)
        memcpy(digest->held, bytes + used, length - used);
}

void digest_update(digest_t *digest, const void *bytes, size_t length) {
    if (!length)
        return;
    if (digest->seen > digest->size || length > digest->size - digest->seen) {
        digest->seen = digest->size + 1;
    } else if (digest->size > SHORT_BYTES) {
        update_long(digest, bytes, length);
    } else {
        memcpy(digest->held + digest->seen, bytes, length);
        digest->seen += length;
    }
}

/* As many bytes as can be loaded once for both, from a stripe's beginning on. Returns how many. */
static size_t copy_stripes(digest_t *digest, unsigned char *to, const unsigned char *from, size_t length) {
    if (!store || digest->size <= SHORT_BYTES || digest->seen != digest->taken * STRIPE_BYTES)
        return 0;
    uint64_t left = digest->stripes - digest->taken;
    size_t count = length / STRIPE_BYTES < left ? length / STRIPE_BYTES : (size_t)left;
    if (count < FEW_STRIPES || (uintptr_t)to % STORE_ALIGN)
        return 0;
    store(digest->lanes, to, from, count, (unsigned)(digest->taken % BLOCK_STRIPES));
    digest->taken += count;
    keep_last(digest, to, count * STRIPE_BYTES);
    digest->seen += count * STRIPE_BYTES;
    return count * STRIPE_BYTES;
}

int digest_streams(void) { return store != NULL; }

void digest_copy(digest_t *digest, void *to, const void *from, size_t length) {
    unsigned char *into = to;
    const unsigned char *out_of = from;
    size_t done = copy_stripes(digest, into, out_of, length);
    while (done < length) {
        size_t size = length - done < COPY_BYTES ? length - done : COPY_BYTES;
        memcpy(into + done, out_of + done, size);
        __asm__ volatile("" ::: "memory"); /* what was copied is looked at, not what it was copied from */
        digest_update(digest, into + done, size);
        done += size;
    }
}

int digest_end(const digest_t *digest, unsigned char out[DIGEST_BYTES]) {
    if (digest->seen != digest->size)
        return 0;
    pair_t found = digest->size > SHORT_BYTES ? of_long(digest) : of_short(digest->held, digest->size);
    uint64_t words[2] = {__builtin_bswap64(found.high), __builtin_bswap64(found.low)};
    memcpy(out, words, DIGEST_BYTES);
    return 1;
}

/* -- The inner loop of the digest, once for each instruction set that a compiler and a machine may have.
 *
 * The library is built for any processor of its kind; which loop runs is found out when it is loaded. */

enum { SCRAMBLE_AT = SECRET_BYTES - STRIPE_BYTES, STEP = 8 };

void digest_take_plain(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes, size_t count, unsigned index) {
    for (; count; count--, stripes += STRIPE_BYTES) {
        const unsigned char *secret = digest_secret + STEP * index;
        for (int i = 0; i < DIGEST_LANES; i++) {
            uint64_t data = word64(stripes + 8 * i), key = data ^ word64(secret + 8 * i);
            lanes[i ^ 1] += data;
            lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
        }
        if (++index == BLOCK_STRIPES) {
            index = 0;
            for (int i = 0; i < DIGEST_LANES; i++)
                lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ word64(digest_secret + SCRAMBLE_AT + 8 * i)) * PRIME32_1;
        }
    }
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define ALWAYS static inline __attribute__((always_inline))

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

__attribute__((target("avx2"))) static void take_avx2(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes,
                                                       size_t count, unsigned index) {
    __m256i low = _mm256_loadu_si256((const void *)lanes), high = _mm256_loadu_si256((const void *)(lanes + 4));
    for (; count; count--, stripes += STRIPE_BYTES) {
        const unsigned char *secret = digest_secret + STEP * index;
        low = take_half(low, _mm256_loadu_si256((const void *)stripes), secret);
        high = take_half(high, _mm256_loadu_si256((const void *)(stripes + 32)), secret + 32);
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

/* -- The inner loop of the digest once more, for bytes that are copied: each is loaded once, stored and taken.
 *
 * Who owns the bytes may change them meanwhile. What is stored is what was hashed all the same, for it comes out of one
 * register: `pinned` keeps the compiler from loading a second time what it takes for unchanged.
 *
 * The stores go past the caches, where the target would only push out what is still to be hashed. */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define pinned(value) __asm__ volatile("" : "+v"(value))

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
    _mm_sfence(); /* what went past the caches is seen by a thread that is told of it */
}

#if !defined(__clang__) /* as above */
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

/* -- What the processor can do, asked of itself. A compiler's own word for that wants a library of
 * the compiler's, which not every compiler can put into a shared one. */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>

/* As Intel's and AMD's manuals number them: bits of CPUID, and the registers that the kernel keeps for a thread. */
enum { OSXSAVE = 1u << 27, AVX2 = 1u << 5, AVX512F = 1u << 16, YMM_KEPT = 0x06, ZMM_KEPT = 0xE6 };

static uint32_t kept(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(unsigned feature, uint32_t registers) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || (kept() & registers) != registers)
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & feature) != 0;
}

int processor_has_avx2(void) { return has(AVX2, YMM_KEPT); }
int processor_has_avx512(void) { return has(AVX512F, ZMM_KEPT); }

#else

int processor_has_avx2(void) { return 0; }
int processor_has_avx512(void) { return 0; }

#endif
