/* The source's side of one connection: chunks go out in the order asked for, each as soon as it is there.
 *
 * It is `tcp/server.py` again, between the greetings and the end, which are Python's; and `announcing.py`, where a
 * reader fetches the bytes itself and is only told which are there. */
#define _GNU_SOURCE
#include "mover.h"

#include <string.h>

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
