/* Parts of a stream as the kernel wants to hear them: lists of address and length. */
#include "mover.h"

static unsigned char bin[GAP_BYTES]; /* where the bytes of gaps go; nobody looks at it */

/* The piece that has this byte of the stream, which lies in it. */
uint64_t piece_at(const table_t *table, uint64_t at) {
    uint64_t low = 0, high = table->count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (table->starts[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A place in a table, run by run. */
typedef struct {
    const table_t *table;
    uint64_t piece, inner, outer, address, left;
} cursor_t;

static void enter_run(cursor_t *cursor, uint64_t inside) {
    const table_t *table = cursor->table;
    cursor->address = table->pairs[2 * cursor->piece] + inside;
    cursor->left = table->pairs[2 * cursor->piece + 1] - inside;
    if (table->loops) {
        const loop_t *loop = table->loops + cursor->piece;
        cursor->address += cursor->outer * loop->strides + cursor->inner * loop->stride;
    }
}

static cursor_t cursor_at(const table_t *table, uint64_t at) {
    cursor_t cursor = {.table = table, .piece = piece_at(table, at)};
    uint64_t inside = at - table->starts[cursor.piece];
    if (table->loops) {
        uint64_t run = table->pairs[2 * cursor.piece + 1], count = table->loops[cursor.piece].count;
        cursor.inner = inside / run % count;
        cursor.outer = inside / run / count;
        inside %= run;
    }
    enter_run(&cursor, inside);
    return cursor;
}

static int is_inside(const cursor_t *cursor) { return cursor->piece < cursor->table->count; }

static void advance(cursor_t *cursor, uint64_t length) {
    const table_t *table = cursor->table;
    cursor->address += length;
    cursor->left -= length;
    if (cursor->left)
        return;
    if (table->loops) {
        const loop_t *loop = table->loops + cursor->piece;
        if (++cursor->inner < loop->count)
            return enter_run(cursor, 0);
        cursor->inner = 0;
        if (++cursor->outer < loop->counts)
            return enter_run(cursor, 0);
        cursor->outer = 0;
    }
    if (++cursor->piece >= table->count)
        return;
    cursor->address = table->pairs[2 * cursor->piece];
    cursor->left = table->pairs[2 * cursor->piece + 1];
}

static int runs_of(const table_t *table, uint64_t start, uint64_t stop, int most, struct iovec *out, uint64_t *bytes) {
    int count = 0;
    uint64_t at = start, end = 0;
    for (cursor_t cursor = cursor_at(table, start); at < stop && is_inside(&cursor);) {
        uint64_t length = cursor.left < stop - at ? cursor.left : stop - at;
        if (count && cursor.address == end)
            out[count - 1].iov_len += (size_t)length;
        else if (count < most)
            out[count++] = (struct iovec){(void *)(uintptr_t)cursor.address, (size_t)length};
        else
            break;
        end = cursor.address + length;
        at += length;
        advance(&cursor, length);
    }
    *bytes = at - start;
    return count;
}

/* The first bytes of [start, stop) in at most `most` pieces; how many pieces, and how many bytes they are. */
int vectors_of(const table_t *table, uint64_t start, uint64_t stop, int most, struct iovec *out, uint64_t *bytes) {
    if (table->loops)
        return runs_of(table, start, stop, most, out, bytes);
    int count = 0;
    uint64_t at = start;
    for (uint64_t piece = piece_at(table, start); at < stop && count < most && piece < table->count; piece++) {
        uint64_t inside = at - table->starts[piece], left = table->pairs[2 * piece + 1] - inside;
        uint64_t length = left < stop - at ? left : stop - at;
        out[count++] = (struct iovec){(void *)(uintptr_t)(table->pairs[2 * piece] + inside), (size_t)length};
        at += length;
    }
    *bytes = at - start;
    return count;
}

/* Whether [start, stop) lies in at most so many pieces. Of loops all runs count, also those outside. */
int pieces_in(const table_t *table, uint64_t start, uint64_t stop, uint64_t most) {
    if (start == stop)
        return 1;
    uint64_t first = piece_at(table, start), last = piece_at(table, stop - 1), runs = last - first + 1;
    for (uint64_t piece = first; table->loops && piece <= last && runs <= most; piece++)
        runs += table->loops[piece].count * table->loops[piece].counts - 1;
    return runs <= most;
}

/* The first bytes of [start, stop), theirs and ours. Small pieces of theirs that lie near each other are asked for in
 * one piece with the gaps between them, since the kernel takes longer over a piece than over a page: the gaps' bytes go
 * into the bin. */
void vectors_of_both(const table_t *ours, const table_t *theirs, uint64_t start, uint64_t stop, int is_bridging,
                     both_t *out) {
    cursor_t from = cursor_at(theirs, start), into = cursor_at(ours, start);
    uint64_t at = start, end = 0; /* where their last piece so far ends */
    out->ours_count = out->theirs_count = 0;
    out->bytes = 0;
    while (at < stop && out->ours_count < MAX_VECTORS - 1 && out->theirs_count < MAX_VECTORS) {
        uint64_t length = from.left < into.left ? from.left : into.left;
        length = length < stop - at ? length : stop - at;
        if (!length)
            break; /* the tables end before the stream does: the caller has moved less than it wanted */
        uint64_t gap = from.address - end;
        if (out->theirs_count && from.address >= end && gap < (is_bridging ? GAP_BYTES : 1)) {
            if (gap)
                out->ours[out->ours_count++] = (struct iovec){bin, (size_t)gap};
            out->theirs[out->theirs_count - 1].iov_len += (size_t)(gap + length);
            out->bytes += gap;
        } else {
            out->theirs[out->theirs_count++] = (struct iovec){(void *)(uintptr_t)from.address, (size_t)length};
        }
        end = from.address + length;
        out->ours[out->ours_count++] = (struct iovec){(void *)(uintptr_t)into.address, (size_t)length};
        out->bytes += length;
        at += length;
        advance(&from, length);
        advance(&into, length);
    }
    out->stream_bytes = at - start;
}
