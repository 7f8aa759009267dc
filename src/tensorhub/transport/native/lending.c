/* How a source's bytes come into its socket: copied, or lent page by page, as `tcp/wire.py` explains. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>

enum { WINDOW_BYTES = 16 << 20, NOT_LENT = -1 };

static int failure_of(serve_t *serve, int number) {
    if (number == EAGAIN || number == EWOULDBLOCK)
        return SILENT;
    serve->error = number;
    return VANISHED;
}

static int say_chunk(serve_t *serve, unsigned kind, uint64_t chunk, uint64_t size) {
    unsigned char header[HEADER_BYTES];
    put_header(header, kind, (uint32_t)size, chunk);
    ssize_t sent;
    do {
        sent = send(serve->descriptor, header, sizeof header, MSG_NOSIGNAL | MSG_MORE);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return failure_of(serve, errno);
    size_t done = (size_t)sent;
    return send_all(serve->descriptor, header + done, sizeof header - done, &serve->error);
}

static int copy_out(serve_t *serve, uint64_t start, uint64_t stop) {
    struct iovec vectors[MAX_VECTORS];
    while (start < stop) {
        uint64_t bytes;
        int count = vectors_of(&serve->table, start, stop, MAX_VECTORS, vectors, &bytes);
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(serve->descriptor, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return failure_of(serve, errno);
        start += (uint64_t)sent;
    }
    return 0;
}

/* Pages that are in the pipe go into the socket. */
static int pour(serve_t *serve, size_t lent, unsigned more) {
    for (size_t left = lent; left;) {
        ssize_t moved = splice(serve->pipe_out, NULL, serve->descriptor, NULL, left, more);
        if (moved > 0) {
            left -= (size_t)moved;
            continue;
        }
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0 && errno == EINVAL && left == lent)
            return NOT_LENT; /* this socket takes no pages; those in the pipe are never looked at again */
        return failure_of(serve, moved ? errno : EPIPE);
    }
    return 0;
}

/* Lend as much as can be; what cannot, and all that follows on this connection, is copied. */
static int lend_out(serve_t *serve, uint64_t start, uint64_t stop) {
    struct iovec vectors[MAX_VECTORS];
    while (start < stop) {
        uint64_t bytes;
        int count = vectors_of(&serve->table, start, stop, MAX_VECTORS, vectors, &bytes);
        ssize_t lent = vmsplice(serve->pipe_in, vectors, (size_t)count, SPLICE_F_NONBLOCK);
        int status = lent > 0 ? pour(serve, (size_t)lent, (uint64_t)lent < bytes ? SPLICE_F_MORE : 0) : NOT_LENT;
        if (status == NOT_LENT) {
            serve->may_lend = 0;
            return copy_out(serve, start, stop);
        }
        if (status)
            return status;
        start += (uint64_t)lent;
    }
    return 0;
}

/* How fast chunks go out, judged over a window: a connection that is not fast lends nothing. */
void window_sent(serve_t *serve, uint64_t size) {
    serve->window_bytes += size;
    if (serve->window_bytes < WINDOW_BYTES)
        return;
    double now = now_s();
    serve->is_fast = (double)serve->window_bytes >= serve->lend_bytes_per_s * (now - serve->window_began);
    serve->window_began = now;
    serve->window_bytes = 0;
}

/* Whether this chunk is to be lent: it is worth it, and nobody has called this connection out yet. */
static int shall_lend(serve_t *serve, uint64_t start, uint64_t stop) {
    if (!serve->is_fast || !serve->may_lend)
        return 0;
    uint64_t most = serve->lend_piece_bytes ? (stop - start) / serve->lend_piece_bytes : UINT64_MAX;
    return most && pieces_in(&serve->table, start, stop, most);
}

static int is_called_out(serve_t *serve) { return th_swap(serve->lent, 0, 1) == 2; }

int send_chunk(serve_t *serve, uint64_t chunk) {
    uint64_t start, size = span_of(serve->batches, serve->chunk_bytes, serve->table.size, chunk, &start);
    int is_lent = shall_lend(serve, start, start + size);
    if (is_lent && serve->pipe_in < 0)
        return NEEDS_PIPE;
    is_lent = is_lent && !is_called_out(serve);
    int status = say_chunk(serve, is_lent ? LENT : CHUNK, chunk, size);
    if (!status)
        status = is_lent ? lend_out(serve, start, start + size) : copy_out(serve, start, start + size);
    if (status)
        return status;
    window_sent(serve, size);
    if (serve->is_announcing)
        return 0; /* the reader says what it has read, this too */
    atomic_fetch_add(&serve->sent_bytes, size);
    atomic_fetch_add(&serve->sent_chunks, 1);
    if (is_lent)
        atomic_fetch_add(&serve->lent_bytes, size);
    return 0;
}
