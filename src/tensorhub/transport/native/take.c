/* One chunk: it comes, straight to where it belongs, and is judged while a cache has it, and counts. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

enum { RECEIVE_VECTORS = MAX_VECTORS / 4 }; /* of one call, which rarely moves more */

static int await_chunk(stream_t *stream, uint64_t chunk, uint64_t size) {
    int status = next_frame(stream);
    if (status)
        return status;
    stream->is_lent = stream->kind == LENT && stream->read->digests;
    if (stream->is_lent)
        atomic_store(&stream->read->is_lent_to, 1);
    if (stream->length != size || stream->number != chunk || (stream->kind != CHUNK && !stream->is_lent))
        return GARBLED;
    return 0;
}

static ssize_t receive_some(int descriptor, struct iovec *vectors, int count) {
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = (size_t)count};
    ssize_t got;
    do {
        got = count == 1 ? recv(descriptor, vectors->iov_base, vectors->iov_len, 0) : recvmsg(descriptor, &message, 0);
    } while (got < 0 && errno == EINTR);
    return got;
}

int receive_bytes(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop) {
    read_t *read = stream->read;
    struct iovec vectors[RECEIVE_VECTORS];
    while (start < stop) {
        uint64_t most = stop - start < read->tile_bytes ? stop - start : read->tile_bytes, bytes;
        int count = vectors_of(into, start, start + most, RECEIVE_VECTORS, vectors, &bytes);
        if (atomic_load(&read->is_over))
            return OVER;
        ssize_t got = receive_some(stream->descriptor, vectors, count);
        if (got <= 0) {
            stream->error = got ? errno : 0;
            return got && (errno == EAGAIN || errno == EWOULDBLOCK) ? SILENT : VANISHED;
        }
        atomic_fetch_add_explicit(&stream->heard_bytes, (uint64_t)got, memory_order_relaxed);
        start += (uint64_t)got;
        for (struct iovec *vector = vectors; stream->is_hashing && got > 0; vector++) {
            size_t length = (size_t)got < vector->iov_len ? (size_t)got : vector->iov_len;
            digest_update(&stream->digest, vector->iov_base, length);
            got -= (ssize_t)length;
        }
    }
    return 0;
}

/* The digest of what has just come is that of this chunk, or tile. */
int is_as_announced(const stream_t *stream, uint64_t at) {
    unsigned char found[DIGEST_BYTES];
    const unsigned char *announced = stream->read->digests;
    return !announced ||
           (digest_end(&stream->digest, found) && !memcmp(found, announced + at * DIGEST_BYTES, DIGEST_BYTES));
}

static void enter(read_t *read, uint32_t one) {
    for (int i = 0; i < MAX_STOP_FLAGS; i++)
        if (read->stop_flags[i])
            atomic_fetch_add(&read->stop_flags[i]->inside, one);
}

/* The chunk counts from now on, unless a stop flag was set before. Who sets one waits until no thread is in between. */
static int count_chunk(stream_t *stream, uint64_t chunk, uint64_t size) {
    read_t *read = stream->read;
    enter(read, 1);
    int is_good = is_trusted(read);
    if (is_good)
        th_mark(read->progress, chunk);
    enter(read, (uint32_t)-1);
    if (!is_good)
        return UNTRUSTED;
    atomic_fetch_add(&read->stored_bytes, size);
    uint64_t stored = atomic_fetch_add(&read->stored_chunks, 1) + 1;
    raise_event(read, stored == read->wanted_count ? HAS_NEWS | IS_WHOLE : HAS_NEWS);
    return 0;
}

/* Bytes [start, stop), which are a chunk. `wrong` is what is not as announced, or NOTHING. */
static int bring_chunk(stream_t *stream, uint64_t chunk, uint64_t start, uint64_t stop, uint64_t *wrong) {
    read_t *read = stream->read;
    stream->is_hashing = read->digests != NULL;
    if (stream->is_hashing)
        digest_begin(&stream->digest, stop - start);
    have_large_for(read->large, &read->ours, start, stop);
    int status = stream->is_local ? copy_bytes(stream, &read->ours, start, stop)
                                  : receive_bytes(stream, &read->ours, start, stop);
    *wrong = status || is_as_announced(stream, chunk) ? NOTHING : chunk;
    return status;
}

int take_chunk(stream_t *stream, uint64_t chunk) {
    read_t *read = stream->read;
    const batches_t *batches = read->batches;
    uint64_t start, size = span_of(batches, read->chunk_bytes, read->ours.size, chunk, &start);
    int is_fetched = stream->is_local && !is_sent(batches, chunk);
    int status = is_fetched ? await_ready(stream, chunk) : await_chunk(stream, chunk, size);
    if (!status)
        status = may_write(stream);
    if (!status && is_fetched)
        status = copy_begin(stream);
    uint64_t wrong = NOTHING;
    if (!status)
        status = batches ? bring_tiles(stream, chunk, is_fetched, &wrong)
                         : bring_chunk(stream, chunk, start, start + size, &wrong);
    if (!status && stream->is_local)
        status = is_fetched ? copy_end(stream, size) : tell_read(stream, size);
    if (status)
        return status;
    atomic_fetch_add(&read->received_bytes, size);
    atomic_fetch_add(&read->received_chunks, 1);
    if (!is_trusted(read))
        return UNTRUSTED;
    stream->tile = wrong;
    if (wrong != NOTHING)
        return CORRUPT;
    if (batches)
        keep_parts(stream, chunk);
    return count_chunk(stream, chunk, size);
}
