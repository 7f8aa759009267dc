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

/* The first bytes of [start, stop) in at most `most` pieces; how many pieces, and how many bytes they are. */
int vectors_of(const table_t *table, uint64_t start, uint64_t stop, int most, struct iovec *out, uint64_t *bytes) {
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

/* Whether [start, stop) lies in at most so many pieces. */
int pieces_in(const table_t *table, uint64_t start, uint64_t stop, uint64_t most) {
    return start == stop || piece_at(table, stop - 1) - piece_at(table, start) < most;
}

typedef struct {
    const table_t *table;
    uint64_t piece, address, left;
} cursor_t;

static cursor_t cursor_at(const table_t *table, uint64_t at) {
    uint64_t piece = piece_at(table, at), inside = at - table->starts[piece];
    return (cursor_t){table, piece, table->pairs[2 * piece] + inside, table->pairs[2 * piece + 1] - inside};
}

static void advance(cursor_t *cursor, uint64_t length) {
    cursor->address += length;
    cursor->left -= length;
    if (cursor->left || ++cursor->piece >= cursor->table->count)
        return;
    cursor->address = cursor->table->pairs[2 * cursor->piece];
    cursor->left = cursor->table->pairs[2 * cursor->piece + 1];
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
