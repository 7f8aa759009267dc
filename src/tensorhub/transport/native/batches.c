/* Streams that are made of parts of other ones: rows of runs, tiles that are judged one by one, and scratch memory.
 *
 * `rows.py` says what a row is. What a reader wants comes from a peer: `th_check_rows` looks at every number of it. */
#include "mover.h"

#include <string.h>

enum { NEAR_BYTES = 4096 }; /* gathered, and then hashed at once */

/* Where a chunk, or batch, begins; returns how long it is. */
uint64_t span_of(const batches_t *batches, uint64_t chunk_bytes, uint64_t size, uint64_t chunk, uint64_t *start) {
    if (batches) {
        *start = batches->bounds[chunk];
        return batches->bounds[chunk + 1] - *start;
    }
    *start = chunk * chunk_bytes;
    return size - *start < chunk_bytes ? size - *start : chunk_bytes;
}

/* A batch that comes over the socket, also where its reader could fetch it. */
int is_sent(const batches_t *batches, uint64_t chunk) { return batches && batches->flags[chunk] & IS_SENT; }

/* -- at a source -------------------------------------------------------------------------------------------------- */

/* All chunks that it takes bytes from are there. Rows are a peer's wish, and each may span all chunks: so what is known
 * to be there is passed over, and nobody is kept waiting for the answer who ends the export. */
int has_batch(const serve_t *serve, uint64_t batch) {
    const batches_t *batches = serve->batches;
    const progress_t *progress = serve->progress;
    uint64_t prefix = atomic_load(&progress->prefix);
    if (prefix == progress->count)
        return 1;
    for (uint64_t row = batches->first_row[batch]; row < batches->first_row[batch + 1]; row++) {
        uint64_t first = batches->needs[2 * row], last = batches->needs[2 * row + 1];
        if (last < prefix)
            continue;
        if (atomic_load(&serve->ended->is_set))
            return 0;
        for (uint64_t chunk = first > prefix ? first : prefix; chunk <= last; chunk++)
            if (!has_chunk(progress, chunk))
                return 0;
    }
    return 1;
}

/* -- rows --------------------------------------------------------------------------------------------------------- */

/* How many bytes lie from the first to behind the last of a row; 0: its numbers cannot be. */
static uint64_t reach_of(const uint64_t *row, uint64_t *bytes) {
    uint64_t run = row[1], count = row[2], stride = row[3], counts = row[4], strides = row[5], inner, outer, reach;
    if (!run || !count || !counts)
        return 0;
    if (__builtin_mul_overflow(run, count, bytes) || __builtin_mul_overflow(*bytes, counts, bytes))
        return 0;
    if (__builtin_mul_overflow(count - 1, stride, &inner) || __builtin_mul_overflow(counts - 1, strides, &outer))
        return 0;
    if (__builtin_add_overflow(inner, outer, &reach) || __builtin_add_overflow(reach, run, &reach))
        return 0;
    return *bytes <= MAX_BATCH_BYTES ? reach : 0;
}

/* Whether rows lie within a stream of `size` bytes: 0, or 1 and the number of the first that does not. Says where each
 * begins in the stream that they make, `count` + 1 places, and which chunks it takes bytes from. */
uint64_t th_check_rows(const uint64_t *rows, uint64_t count, uint64_t size, uint64_t chunk_bytes, uint64_t *starts,
                       uint64_t *needs) {
    uint64_t at = 0;
    starts[0] = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *row = rows + ROW_WORDS * i;
        uint64_t bytes = 0, reach = reach_of(row, &bytes);
        if (!reach || row[0] > size || reach > size - row[0] || __builtin_add_overflow(at, bytes, &at))
            return i + 1;
        starts[i + 1] = at;
        needs[2 * i] = row[0] / chunk_bytes;
        needs[2 * i + 1] = (row[0] + reach - 1) / chunk_bytes;
    }
    return 0;
}

/* Where rows lie in memory: 0, or 1 and the number of the first that lies in several pieces of it. */
uint64_t th_place_rows(const uint64_t *rows, uint64_t count, const table_t *memory, uint64_t *pairs, loop_t *loops) {
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *row = rows + ROW_WORDS * i;
        uint64_t bytes, reach = reach_of(row, &bytes), piece = memory->count ? piece_at(memory, row[0]) : 0;
        if (!reach || !memory->count || row[0] < memory->starts[piece])
            return i + 1;
        uint64_t inside = row[0] - memory->starts[piece], length = memory->pairs[2 * piece + 1];
        if (inside > length || reach > length - inside)
            return i + 1;
        pairs[2 * i] = memory->pairs[2 * piece] + inside;
        pairs[2 * i + 1] = row[1];
        loops[i] = (loop_t){row[2], row[3], row[4], row[5]};
    }
    return 0;
}

/* Runs of a few bytes are elements: of these sizes they are one instruction. */
static inline void copy_run(unsigned char *to, const unsigned char *from, uint64_t run) {
    if (run == 2)
        memcpy(to, from, 2);
    else if (run == 4)
        memcpy(to, from, 4);
    else if (run == 1)
        *to = *from;
    else
        memcpy(to, from, run);
}

/* The bytes of a row, whose place is counted from `base` on. */
static void see_row(digest_t *digest, uintptr_t base, const uint64_t row[ROW_WORDS]) {
    unsigned char near[NEAR_BYTES];
    uint64_t run = row[1], count = row[2], stride = row[3], counts = row[4], strides = row[5], have = 0;
    for (uint64_t i = 0; i < counts; i++)
        for (uint64_t j = 0; j < count; j++) {
            const unsigned char *from = (const unsigned char *)(base + row[0] + i * strides + j * stride);
            if (run > NEAR_BYTES - have) {
                digest_update(digest, near, have);
                have = 0;
            }
            if (run > NEAR_BYTES) {
                digest_update(digest, from, run);
                continue;
            }
            copy_run(near + have, from, run);
            have += run;
        }
    digest_update(digest, near, have);
}

/* The digests of tiles that rows make, each from tiles[i] to tiles[i + 1]. 0: the rows are not those of the tiles. */
int th_digest_tiles(const table_t *memory, const uint64_t *tiles, uint64_t count, unsigned char *out) {
    digest_t digest;
    for (uint64_t tile = 0, piece = 0; tile < count; tile++) {
        digest_begin(&digest, tiles[tile + 1] - tiles[tile]);
        for (; piece < memory->count && memory->starts[piece] < tiles[tile + 1]; piece++) {
            const loop_t *loop = memory->loops + piece;
            const uint64_t *pair = memory->pairs + 2 * piece;
            uint64_t row[ROW_WORDS] = {pair[0], pair[1], loop->count, loop->stride, loop->counts, loop->strides};
            see_row(&digest, 0, row);
        }
        if (!digest_end(&digest, out + tile * DIGEST_BYTES))
            return 0;
    }
    return 1;
}

/* -- at a reader -------------------------------------------------------------------------------------------------- */

/* A tile that came in the order of its source's memory is gone through in its own. */
static void see_turned(stream_t *stream, uint64_t tile) {
    const batches_t *batches = stream->read->batches;
    for (uint64_t row = batches->first_turn[tile]; row < batches->first_turn[tile + 1]; row++)
        see_row(&stream->digest, (uintptr_t)stream->scratch, batches->turns + ROW_WORDS * row);
}

/* A batch comes, straight to where it belongs or into scratch memory. `wrong` is its first tile that is not as
 * announced: the caller judges it, for what the source took back while it was read is not wrong, but lost. */
int bring_tiles(stream_t *stream, uint64_t batch, int is_fetched, uint64_t *wrong) {
    const read_t *read = stream->read;
    const batches_t *batches = read->batches;
    uint64_t start = batches->bounds[batch], stop = batches->bounds[batch + 1];
    uint64_t pair[2] = {(uint64_t)(uintptr_t)stream->scratch, stop - start};
    table_t scratch = {.pairs = pair, .starts = &start, .count = 1, .size = stop};
    const table_t *into = batches->flags[batch] & IS_KEPT ? &scratch : &read->ours;
    if (into != &scratch)
        have_large_for(read->large, into, start, stop);
    for (uint64_t tile = batches->first_tile[batch]; tile < batches->first_tile[batch + 1]; tile++) {
        uint64_t from = batches->tiles[tile], to = batches->tiles[tile + 1];
        int is_turned = batches->first_turn[tile] < batches->first_turn[tile + 1];
        stream->is_hashing = read->digests && !is_turned;
        if (read->digests)
            digest_begin(&stream->digest, to - from);
        int status = is_fetched ? copy_bytes(stream, into, from, to) : receive_bytes(stream, into, from, to);
        if (status)
            return status;
        if (read->digests && is_turned)
            see_turned(stream, tile);
        if (*wrong == NOTHING && !is_as_announced(stream, tile))
            *wrong = tile;
    }
    return 0;
}

/* Put the parts of a batch that are kept where they belong. */
void keep_parts(const stream_t *stream, uint64_t batch) {
    const batches_t *batches = stream->read->batches;
    if (!(batches->flags[batch] & IS_KEPT))
        return;
    for (uint64_t at = batches->first_keep[batch]; at < batches->first_keep[batch + 1]; at++) {
        const keep_t *keep = batches->keeps + at;
        for (uint64_t i = 0; i < keep->counts; i++)
            for (uint64_t j = 0; j < keep->count; j++)
                copy_run((unsigned char *)(uintptr_t)(keep->to + i * keep->to_strides + j * keep->to_stride),
                         stream->scratch + keep->from + i * keep->from_strides + j * keep->from_stride, keep->run);
    }
}
