/* The source's side of one connection: chunks go out in the order asked for, copied or lent page by page. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>

/* -- The source's side of one connection: chunks go out in the order asked for, each as soon as it is there.
 *
 * It is `tcp/server.py` again, between the greetings and the end, which are Python's; and `announcing.py`, where a
 * reader fetches the bytes itself and is only told which are there. */

static int say_waiting(serve_t *serve) {
    unsigned char header[HEADER_BYTES];
    put_header(header, WAITING, 0, 0);
    return send_all(serve->descriptor, header, sizeof header, &serve->error);
}

static int is_there(const serve_t *serve, uint64_t chunk) {
    return serve->batches ? has_batch(serve, chunk) : has_chunk(serve->progress, chunk);
}

static int is_announced(const serve_t *serve, uint64_t chunk) {
    return serve->is_announcing && !is_sent(serve->batches, chunk);
}

/* Until the chunk is there; the reader hears four times as often as it needs to that nothing is lost. */
static int await_there(serve_t *serve, uint64_t chunk) {
    progress_t *progress = serve->progress;
    double deadline = now_s() + serve->keepalive_s;
    for (;;) {
        uint32_t seen = atomic_load(&progress->changed);
        if (atomic_load(&serve->ended->is_set))
            return ENDED;
        if (is_there(serve, chunk))
            return 0;
        if (atomic_load(&progress->has_failed))
            return FAILED;
        double left = deadline - now_s();
        if (left > 0) {
            th_wait(progress, seen, left);
            continue;
        }
        int status = say_waiting(serve);
        if (status)
            return status;
        deadline = now_s() + serve->keepalive_s;
    }
}

/* Say that all of [start, stop) is there, up to the first gap. */
static int announce(serve_t *serve, uint64_t start, uint64_t stop) {
    unsigned char frame[HEADER_BYTES + sizeof(uint64_t)];
    uint64_t end = start + 1;
    while (end < stop && is_announced(serve, end) && is_there(serve, end))
        end++;
    uint64_t count = end - start;
    put_header(frame, READY, sizeof count, start);
    memcpy(frame + HEADER_BYTES, &count, sizeof count);
    serve->at = end;
    return send_all(serve->descriptor, frame, sizeof frame, &serve->error);
}

static int serve_range(serve_t *serve) {
    uint64_t stop = serve->ranges[2 * serve->range_next + 1];
    while (serve->at < stop) {
        int is_told = is_announced(serve, serve->at), status = await_there(serve, serve->at);
        if (!status)
            status = is_told ? announce(serve, serve->at, stop) : send_chunk(serve, serve->at);
        if (status)
            return status;
        if (!is_told)
            serve->at++;
    }
    return 0;
}

/* The number that came with a request: what was read so far, or a wish. */
static void hear(serve_t *serve, uint64_t number) {
    if (!serve->is_announcing) {
        serve->may_lend = number == COPIED ? 0 : serve->may_lend;
        return;
    }
    uint64_t told = atomic_load(&serve->sent_bytes);
    if (number <= told || number - told > serve->table.size)
        return;
    atomic_fetch_add(&serve->sent_chunks, (number - told + serve->chunk_bytes - 1) / serve->chunk_bytes);
    atomic_store(&serve->sent_bytes, number);
}

static int receive_want(serve_t *serve) {
    unsigned char header[HEADER_BYTES];
    serve->idle_since = now_s();
    int status = receive_all(serve->descriptor, header, sizeof header, NULL, &serve->error);
    if (status)
        return status;
    get_header(header, &serve->kind, &serve->length, &serve->number);
    if (serve->kind != WANT || serve->length > MAX_WANT_BYTES)
        return GARBLED;
    status = receive_all(serve->descriptor, serve->words, serve->length, NULL, &serve->error);
    if (status)
        return status;
    int64_t count = th_decode_want(serve->words, serve->length, serve->chunk_count, serve->ranges);
    if (count < 0)
        return GARBLED;
    serve->range_count = (uint64_t)count;
    serve->range_next = 0;
    serve->at = serve->ranges[0];
    serve->idle_since = 0;
    hear(serve, serve->number);
    return 0;
}

static int converse(serve_t *serve) {
    for (;;) {
        while (serve->range_next < serve->range_count) {
            int status = serve_range(serve);
            if (status)
                return status;
            if (++serve->range_next < serve->range_count)
                serve->at = serve->ranges[2 * serve->range_next];
        }
        int status = receive_want(serve);
        if (status)
            return status;
    }
}

/* Serve until the reader leaves or the export ends; or until a pipe is needed, and then from there on. */
EXPORT void th_serve(serve_t *serve) {
    if (!(serve->window_began > 0))
        serve->window_began = now_s();
    serve->status = converse(serve);
}

/* -- How a source's bytes come into its socket: copied, or lent page by page, as `tcp/wire.py` explains. */

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

/* Whether this chunk is to be lent: it is worth it, and this connection may still lend. */
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
