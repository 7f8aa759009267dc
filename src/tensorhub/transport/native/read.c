/* The reader's side: streams that ask for chunks ahead, what arrives on them, and batches of rows. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>

/* -- The target's side: streams that ask for chunks ahead of their arrival, and what they share.
 *
 * One thread runs each stream; one more, Python's, waits for events. */

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

/* The next chunks that no stream has asked for, at most so many; towards the end fewer, so that all finish together. */
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
        stream->ahead = stream->ahead * 2 < read->max_ahead ? stream->ahead * 2 : read->max_ahead;
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

/* -- One chunk: it comes, straight to where it belongs, and is judged while a cache has it, and counts. */

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

/* -- Streams that are made of parts of other ones: rows of runs, tiles that are judged one by one, and scratch memory.
 *
 * `ranges.py` says what a row is. A request comes from a peer: `th_check_rows` looks at each of its numbers. */

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
 * to be there is passed over, and a thread that ends the export does not wait for the answer. */
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
