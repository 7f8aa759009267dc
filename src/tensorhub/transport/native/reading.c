/* The target's side: streams that ask for chunks ahead of their arrival, and what they share.
 *
 * One thread runs each stream; one more, Python's, waits for events. */
#define _GNU_SOURCE
#include "mover.h"

#include <signal.h>
#include <string.h>

/* -- what the streams of one read share --------------------------------------------------------------------------- */

int is_trusted(const read_t *read) {
    for (int i = 0; i < MAX_STOP_FLAGS; i++)
        if (read->stop_flags[i] && atomic_load(&read->stop_flags[i]->is_set))
            return 0;
    if (!read->until)
        return 1;
    double until;
    __atomic_load(read->until, &until, __ATOMIC_ACQUIRE);
    return now_s() < until;
}

void raise_event(read_t *read, uint32_t event) {
    uint32_t before = atomic_fetch_or(&read->events, event);
    if ((before | event) != before)
        wake_word(&read->events);
}

EXPORT void th_read_tell(read_t *read, uint32_t event) { raise_event(read, event); }

/* Wait for something to be done about; news only every `tell_s`, however many there are. 0: time ran out. */
EXPORT uint32_t th_read_wait(read_t *read, double timeout_s) {
    double deadline = now_s() + timeout_s;
    for (;;) {
        uint32_t seen = atomic_load(&read->events);
        double now = now_s();
        uint32_t due = now >= read->tell_at ? seen : seen & ~(uint32_t)HAS_NEWS;
        if (due) {
            due &= atomic_fetch_and(&read->events, ~due);
            if (due & HAS_NEWS)
                read->tell_at = now + read->tell_s;
            return due;
        }
        if (now >= deadline)
            return 0;
        double until = seen && read->tell_at < deadline ? read->tell_at : deadline;
        wait_word(&read->events, seen, until - now);
    }
}

/* Let the streams write, or not. */
EXPORT void th_read_answer(read_t *read, uint32_t answer) {
    atomic_store(&read->may_write, answer);
    wake_word(&read->may_write);
}

EXPORT void th_read_stop(read_t *read) {
    atomic_store(&read->is_over, 1);
    wake_word(&read->may_write);
}

static void lock(read_t *read) {
    uint32_t found = 0;
    if (atomic_compare_exchange_strong(&read->lock, &found, 1))
        return;
    while (atomic_exchange(&read->lock, 2))
        wait_word(&read->lock, 2, 1);
}

static void unlock(read_t *read) {
    if (atomic_exchange(&read->lock, 0) == 2)
        wake_word(&read->lock);
}

/* The next chunks that nobody has asked for, at most so many; towards the end fewer, so that all finish together. */
static uint64_t claim(read_t *read, uint64_t most, const uint64_t **chunks) {
    lock(read);
    uint64_t streams = atomic_load(&read->streams);
    uint64_t left = read->wanted_count - read->next, fair = (left + streams - 1) / streams;
    uint64_t count = most < fair ? most : fair;
    *chunks = read->wanted + read->next;
    read->next += count;
    unlock(read);
    return count;
}

/* -- one stream --------------------------------------------------------------------------------------------------- */

/* Whether bytes may be written now. The first time that takes a word from Python. */
int may_write(stream_t *stream) {
    read_t *read = stream->read;
    if (!is_trusted(read))
        return UNTRUSTED;
    uint32_t answer;
    while ((answer = atomic_load(&read->may_write)) == WAIT_FOR_LEAVE) {
        if (atomic_load(&read->is_over))
            return OVER;
        raise_event(read, ASKS_LEAVE);
        wait_word(&read->may_write, WAIT_FOR_LEAVE, 0.1);
    }
    return answer == MAY_WRITE ? 0 : UNTRUSTED;
}

/* Request chunks, in frames of as many ranges as a source takes. None: nothing is asked for, only `number` told.
 * Where the source has hung up that is no failure yet: what it said before can still be read. */
int ask_for(stream_t *stream, const uint64_t *chunks, uint64_t count, uint64_t number) {
    uint64_t ranges[2 * MAX_RANGES], at = 0;
    do {
        size_t found = 0;
        for (; at < count; at++) {
            if (found && ranges[2 * found - 1] == chunks[at]) {
                ranges[2 * found - 1]++;
            } else if (found < MAX_RANGES) {
                ranges[2 * found] = chunks[at];
                ranges[2 * found + 1] = chunks[at] + 1;
                found++;
            } else {
                break;
            }
        }
        size_t length = encode_want(ranges, found, stream->words + HEADER_BYTES);
        put_header(stream->words, WANT, (uint32_t)length, number);
        int status = send_all(stream->descriptor, stream->words, HEADER_BYTES + length, &stream->error);
        if (status)
            return status == VANISHED ? 0 : status;
    } while (at < count);
    return 0;
}

/* The header of the next frame that says something, into the stream. */
int next_frame(stream_t *stream) {
    unsigned char header[HEADER_BYTES];
    for (;;) {
        int status = receive_all(stream->descriptor, header, sizeof header, &stream->heard_bytes, &stream->error);
        if (status)
            return status;
        get_header(header, &stream->kind, &stream->length, &stream->number);
        if (stream->kind == GONE) {
            if (stream->length > MAX_GONE_BYTES)
                return GARBLED;
            status = receive_all(stream->descriptor, stream->words, stream->length, NULL, &stream->error);
            return status ? status : SAID_GONE;
        }
        if (stream->kind != WAITING)
            return 0;
        if (stream->length)
            return GARBLED;
    }
}

static void remember(stream_t *stream, uint64_t chunk, double now) {
    uint64_t at = (stream->first + stream->count++) % MAX_AHEAD;
    stream->asked[at] = chunk;
    stream->asked_at[at] = now;
}

static int ask_ahead(stream_t *stream) {
    read_t *read = stream->read;
    const uint64_t *chunks;
    uint64_t count = claim(read, stream->ahead - stream->count, &chunks);
    if (!count)
        return 0;
    double now = now_s();
    for (uint64_t i = 0; i < count; i++)
        remember(stream, chunks[i], now);
    return ask_for(stream, chunks, count, stream->read_bytes); /* which is 0 where the source counts what it sends */
}

/* As many chunks ahead as come within `ahead_s`: two at least. */
static void adjust(stream_t *stream, double took_s) {
    const read_t *read = stream->read;
    if (took_s < read->ahead_s)
        stream->ahead = stream->ahead * 2 < read->ahead_most ? stream->ahead * 2 : read->ahead_most;
    else if (took_s > 2 * read->ahead_s)
        stream->ahead = stream->ahead / 2 > 2 ? stream->ahead / 2 : 2;
}

/* A lent chunk may have changed on its way: its source is asked once more, for a copy. */
static int ask_again(stream_t *stream, uint64_t chunk) {
    stream->read->doubted[chunk] = 1;
    remember(stream, chunk, now_s());
    return ask_for(stream, &chunk, 1, COPIED);
}

static void judge_speed(stream_t *stream, double took_s) {
    read_t *read = stream->read;
    if ((double)read->chunk_bytes < took_s * read->fast_bytes_per_s)
        return;
    stream->is_judging_speed = 0;
    raise_event(read, IS_FAST);
}

static int pump(stream_t *stream) {
    read_t *read = stream->read;
    double last = now_s();
    while (!atomic_load(&read->is_over)) {
        int is_wanted = stream->index < atomic_load(&read->streams); /* else another one is not worth having */
        int status = is_wanted && stream->count <= stream->ahead / 2 ? ask_ahead(stream) : 0;
        if (status)
            return status;
        if (!stream->count)
            return DONE;
        uint64_t chunk = stream->asked[stream->first];
        double asked_at = stream->asked_at[stream->first];
        stream->first = (stream->first + 1) % MAX_AHEAD;
        stream->count--;
        stream->chunk = chunk;
        status = take_chunk(stream, chunk);
        if (status == CORRUPT && stream->is_lent && !read->doubted[chunk])
            status = ask_again(stream, chunk);
        if (status)
            return status;
        double now = now_s();
        if (stream->is_judging_speed)
            judge_speed(stream, now - last);
        last = now;
        if (stream->count <= stream->ahead / 2)
            adjust(stream, now - asked_at);
    }
    return OVER;
}

/* Ask and receive until nothing is left to ask for, or the read is over; in the calling thread. */
EXPORT void th_stream_run(stream_t *stream) {
    stream->ahead = stream->read->ahead_first;
    stream->is_bridging = !stream->read->batches; /* what lies between rows is a tensor's too */
    stream->status = pump(stream);
    raise_event(stream->read, HAS_ENDED);
}

static void *run_in_thread(void *stream) {
    th_stream_run(stream);
    return NULL;
}

/* The same in a thread of its own, which takes no signals. Returns 0, or why none could be started. */
EXPORT int th_stream_start(stream_t *stream) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&stream->thread, NULL, run_in_thread, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    stream->is_started = !error;
    return error;
}

EXPORT void th_stream_join(stream_t *stream) {
    if (stream->is_started)
        pthread_join(stream->thread, NULL);
    stream->is_started = 0;
}
