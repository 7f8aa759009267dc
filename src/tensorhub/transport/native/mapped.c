/* Chunks out of another process's memory that is mapped here: copied and hashed in one go, without the kernel.
 *
 * Python has mapped it, and has seen that its size is sealed, so no look at it can fail. Its owner may write there at
 * any time: what counts is what arrived, by its digest, and only if the seal was still there afterwards. */
#define _GNU_SOURCE
#include "mover.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum { AT_ONCE = 4 << 20, MAX_PIECES = 16, LONG_PIECE = 16 << 10 };

/* Have the first pages of [start, stop) in our tables, if they lie in a few pieces: in one call, which costs half of
 * finding each missing. Kernels before 5.14 do not know it. Returns how far. */
static uint64_t populate(const table_t *theirs, uint64_t start, uint64_t stop) {
    struct iovec pieces[MAX_PIECES];
    uint64_t end = stop - start < AT_ONCE ? stop : start + AT_ONCE, bytes;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (!pieces_in(theirs, start, end, MAX_PIECES))
        return end;
    int count = vectors_of(theirs, start, end, MAX_PIECES, pieces, &bytes);
    for (int i = 0; i < count; i++) {
        uintptr_t first = (uintptr_t)pieces[i].iov_base & ~(page - 1);
        madvise((void *)first, (uintptr_t)pieces[i].iov_base + pieces[i].iov_len - first, MADV_POPULATE_READ);
    }
    return end;
}

/* The seal is a word of its owner's in memory that both see: broken before anything else there is changed. */
int is_sealed_here(const stream_t *stream) {
    atomic_thread_fence(memory_order_acquire); /* what was copied was loaded before */
    const volatile unsigned char *seal = (const volatile unsigned char *)(uintptr_t)stream->seal_address;
    unsigned char different = 0;
    for (int i = 0; i < SEAL_BYTES; i++)
        different |= (unsigned char)(seal[i] ^ stream->seal[i]);
    return !different;
}

/* As memcpy; what is long goes past the caches, and is hashed on the way, though nobody asks for that. */
static void copy_past(unsigned char *to, const unsigned char *from, size_t length) {
    digest_t unasked;
    if (length < LONG_PIECE || (uintptr_t)to % STORE_ALIGN || !digest_streams()) {
        memcpy(to, from, length);
        return;
    }
    digest_begin(&unasked, length);
    digest_copy(&unasked, to, from, length);
}

static void copy_pieces(stream_t *stream, const both_t *both) {
    const struct iovec *from = both->theirs;
    size_t used = 0;
    for (int i = 0; i < both->ours_count; i++) { /* each of ours lies within one of theirs */
        size_t length = both->ours[i].iov_len;
        if (used == from->iov_len)
            from++, used = 0;
        const unsigned char *bytes = (const unsigned char *)from->iov_base + used;
        if (stream->is_hashing)
            digest_copy(&stream->digest, both->ours[i].iov_base, bytes, length);
        else
            copy_past(both->ours[i].iov_base, bytes, length);
        used += length;
    }
}

int copy_mapped(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop) {
    read_t *read = stream->read;
    both_t both;
    uint64_t populated = start;
    while (start < stop) {
        uint64_t end = stop - start < read->tile_bytes ? stop : start + read->tile_bytes;
        if (atomic_load(&read->is_over))
            return OVER;
        vectors_of_both(into, &stream->theirs, start, end, 0, &both);
        if (!both.stream_bytes)
            return LOST;
        if (start >= populated)
            populated = populate(&stream->theirs, start, stop);
        copy_pieces(stream, &both);
        start += both.stream_bytes;
    }
    return 0;
}
