/* The digest xxh3-128 of bytes that come piece by piece, of a content whose size is known beforehand.
 *
 * Written from the published specification of the algorithm (xxHash, doc/xxhash_spec.md, version 0.1.1). */
#ifndef TENSORHUB_DIGEST_H
#define TENSORHUB_DIGEST_H

#include <stddef.h>
#include <stdint.h>

enum { DIGEST_BYTES = 16, DIGEST_LANES = 8, SHORT_BYTES = 240, SECRET_BYTES = 192 };
enum { STRIPE_BYTES = 64, BLOCK_STRIPES = 16, STORE_ALIGN = 16 };

typedef struct {
    uint64_t lanes[DIGEST_LANES];
    uint64_t size, seen;       /* of all the content, and of what has come */
    uint64_t stripes, taken;   /* whole stripes before the last one, and those that are in the lanes */
    unsigned char held[SHORT_BYTES]; /* a short content, or the beginning of a stripe that is not whole yet */
    unsigned char last[STRIPE_BYTES]; /* the last bytes of a long content, which count once more */
} digest_t;

void digest_begin(digest_t *digest, uint64_t size);
/* More bytes. Bytes beyond the size are counted and not looked at: the digest then has no end. */
void digest_update(digest_t *digest, const void *bytes, size_t length);
/* The same while they are copied. What is counted is what arrived at `to`, whatever its owner does to `from`. */
void digest_copy(digest_t *digest, void *to, const void *from, size_t length);
/* Whether that goes past the caches here. For much memory it is then faster than memcpy: 9.5 beside 6.4 GiB/s. */
int digest_streams(void);
/* The digest as xxHash prints it, big-endian. 0: other than `size` bytes have come, and there is none. */
int digest_end(const digest_t *digest, unsigned char out[DIGEST_BYTES]);

extern const unsigned char digest_secret[SECRET_BYTES];

/* Take `count` stripes into the lanes, of which the first is number `index` of its block. */
typedef void digest_take(uint64_t lanes[DIGEST_LANES], const unsigned char *stripes, size_t count, unsigned index);
digest_take digest_take_plain;
/* The same while they are copied to `out`, which is aligned to STORE_ALIGN. */
typedef void digest_store(uint64_t lanes[DIGEST_LANES], unsigned char *out, const unsigned char *stripes, size_t count,
                          unsigned index);
/* What this machine does fastest; with 1 the next best, where there is one to be compared. NULL: none. */
digest_store *digest_storing(unsigned which);
/* What this machine does fastest, and its name. */
digest_take *digest_best(const char **name);

/* And the kernel keeps the registers for it. */
int processor_has_avx2(void);
int processor_has_avx512(void);

#endif
