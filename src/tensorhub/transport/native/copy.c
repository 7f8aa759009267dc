/* Bytes from memory to memory: out of another process, out of a mapping of it, to a host copy; and what copies need. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* -- Parts of a stream as the kernel wants to hear them: lists of address and length. */

static unsigned char bin[GAP_BYTES]; /* where the bytes of gaps go; they are never read */

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

/* -- Chunks that the reader fetches itself, out of another process's memory, as local/transport.py does it.
 *
 * A chunk counts only if the source's seal was seen there after the copy. */

enum { COUNT_BYTES = 8 };

/* Wait until the chunk, which is the next due, is announced. */
int await_ready(stream_t *stream, uint64_t chunk) {
    if (!stream->ready_count) {
        int status = next_frame(stream);
        if (status)
            return status;
        uint64_t count;
        if (stream->kind != READY || stream->length != COUNT_BYTES)
            return GARBLED;
        status = receive_all(stream->descriptor, &count, sizeof count, &stream->heard_bytes, &stream->error);
        if (status)
            return status;
        if (count < 1 || count > 1ull << 62 || stream->number > 1ull << 62)
            return GARBLED;
        stream->ready = stream->number;
        stream->ready_count = count;
    }
    if (stream->ready != chunk) {
        stream->number = stream->ready;
        return GARBLED;
    }
    stream->ready++;
    stream->ready_count--;
    return 0;
}

/* A process that has ended is not asked, for another may have its number by now. */
static int is_there(stream_t *stream) {
    if (syscall(SYS_pidfd_send_signal, stream->pidfd, 0, NULL, 0) == 0 || errno != ESRCH)
        return 1; /* or a filter forbids to ask: the seal tells afterwards */
    stream->error = ESRCH;
    return 0;
}

/* Whether the seal is there: the export has not ended, and this is still the process that made it. */
static int is_sealed(stream_t *stream) {
    unsigned char found[SEAL_BYTES] = {0};
    struct iovec ours = {found, SEAL_BYTES}, theirs = {(void *)(uintptr_t)stream->seal_address, SEAL_BYTES};
    ssize_t moved = process_vm_readv(stream->pid, &ours, 1, &theirs, 1, 0);
    if (moved != SEAL_BYTES) {
        stream->error = moved < 0 ? errno : 0;
        return 0;
    }
    return !memcmp(found, stream->seal, SEAL_BYTES);
}

/* It could not be read: is that the end of the export, or memory of a kind that no other process can read? */
static int failed(stream_t *stream, int error) {
    int status = is_sealed(stream) ? UNREADABLE : LOST;
    stream->error = error;
    return status;
}

static void see(stream_t *stream, const table_t *into, const both_t *both, uint64_t start) {
    struct iovec vectors[MAX_VECTORS / 4];
    uint64_t stop = start + both->stream_bytes, bytes;
    if (both->bytes == both->stream_bytes) { /* no gaps: what was read into is what is looked at */
        for (int i = 0; i < both->ours_count; i++)
            digest_update(&stream->digest, both->ours[i].iov_base, both->ours[i].iov_len);
        return;
    }
    for (; start < stop; start += bytes) {
        int count = vectors_of(into, start, stop, MAX_VECTORS / 4, vectors, &bytes);
        for (int i = 0; i < count; i++)
            digest_update(&stream->digest, vectors[i].iov_base, vectors[i].iov_len);
    }
}

int copy_begin(stream_t *stream) { return stream->is_mapped || is_there(stream) ? 0 : LOST; }

int copy_bytes(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop) {
    read_t *read = stream->read;
    both_t both;
    if (stream->is_mapped)
        return copy_mapped(stream, into, start, stop);
    while (start < stop) {
        uint64_t end = stop - start < read->tile_bytes ? stop : start + read->tile_bytes;
        if (atomic_load(&read->is_over))
            return OVER;
        vectors_of_both(into, &stream->theirs, start, end, stream->is_bridging, &both);
        ssize_t moved = process_vm_readv(stream->pid, both.ours, (unsigned long)both.ours_count, both.theirs,
                                         (unsigned long)both.theirs_count, 0);
        if (moved <= 0 || (uint64_t)moved != both.bytes) {
            if (stream->is_bridging && both.bytes != both.stream_bytes) {
                stream->is_bridging = 0; /* a page is not there: a tensor's, or in vain a gap's */
                continue;
            }
            return failed(stream, moved < 0 ? errno : EFAULT);
        }
        if (stream->is_hashing)
            see(stream, into, &both, start);
        start += both.stream_bytes;
    }
    return 0;
}

/* So many bytes more have come, which the source counts; it is told with the next request, or now if there is none. */
int tell_read(stream_t *stream, uint64_t size) {
    stream->read_bytes += size;
    return stream->count ? 0 : ask_for(stream, NULL, 0, stream->read_bytes);
}

int copy_end(stream_t *stream, uint64_t size) {
    if (stream->is_mapped)
        stream->error = 0;
    if (stream->is_mapped ? !is_sealed_here(stream) : !is_sealed(stream))
        return LOST;
    return tell_read(stream, size);
}

/* -- Chunks out of another process's memory that is mapped here: copied and hashed in one go, without the kernel.
 *
 * Python has mapped it, and has seen that its size is sealed, so no look at it can fail. Its owner may write there at
 * any time: what counts is what arrived, by its digest, and only if the seal was still there afterwards. */

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

/* As memcpy; what is long goes past the caches, and is hashed on the way, also where no digest is wanted. */
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

/* -- Chunks copied inside this process, from registered memory to a host copy of it, and judged while a cache has them.
 *
 * The kernel does the reading, for what is registered may be freed at any moment. Threads of our own take one chunk
 * after another; the caller waits for all of them. */

enum { MAX_COPIERS = 16 };

static int copy_chunk_here(const offload_t *offload, uint64_t chunk, uint64_t *at, int *error) {
    uint64_t start = chunk * offload->chunk_bytes, left = offload->source.size - start;
    uint64_t stop = start + (left < offload->chunk_bytes ? left : offload->chunk_bytes);
    unsigned char found[DIGEST_BYTES];
    digest_t digest;
    both_t both;
    digest_begin(&digest, stop - start);
    have_large_for(offload->large, &offload->into, start, stop);
    while (start < stop) {
        uint64_t end = stop - start < offload->tile_bytes ? stop : start + offload->tile_bytes;
        vectors_of_both(&offload->into, &offload->source, start, end, 0, &both);
        ssize_t moved = process_vm_readv(getpid(), both.ours, (unsigned long)both.ours_count, both.theirs,
                                         (unsigned long)both.theirs_count, 0);
        if (moved < 0 || (uint64_t)moved != both.bytes) {
            *error = moved < 0 ? errno : EFAULT;
            *at = start + (moved < 0 ? 0 : (uint64_t)moved);
            return *error == EFAULT ? UNREADABLE : LOST;
        }
        for (int i = 0; offload->digests && i < both.ours_count; i++)
            digest_update(&digest, both.ours[i].iov_base, both.ours[i].iov_len);
        start += both.stream_bytes;
    }
    const unsigned char *announced = offload->digests;
    if (announced && (!digest_end(&digest, found) || memcmp(found, announced + chunk * DIGEST_BYTES, DIGEST_BYTES)))
        return CORRUPT;
    return DONE;
}

static void *copy_in_thread(void *given) {
    offload_t *offload = given;
    uint64_t chunk, at = 0;
    int error = 0;
    while (!atomic_load(&offload->has_failed) && (chunk = atomic_fetch_add(&offload->next, 1)) < offload->stop) {
        int status = copy_chunk_here(offload, chunk, &at, &error);
        if (status && !atomic_exchange(&offload->has_failed, 1)) { /* the first that fails says how */
            offload->status = status;
            offload->error = error;
            offload->chunk = chunk;
            offload->at = at;
        }
    }
    return NULL;
}

/* The chunks from `next` to `stop`, in this thread and so many more as can be started. */
EXPORT int th_offload(offload_t *offload) {
    pthread_t threads[MAX_COPIERS];
    uint32_t started = 0;
    sigset_t all, before;
    offload->status = DONE;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started + 1 < offload->threads && started < MAX_COPIERS &&
           !pthread_create(&threads[started], NULL, copy_in_thread, offload))
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    copy_in_thread(offload);
    while (started)
        pthread_join(threads[--started], NULL);
    return offload->status;
}

/* -- Large pages under memory of ours that readers map.
 *
 * The kernel gives shared memory none by itself (`shmem_enabled` is `never` nearly everywhere): then a GiB is 262,144
 * pages, each to be found missing by its owner once, and to be put into the tables of every reader. Since Linux 6.1 one
 * may ask for them: MADV_COLLAPSE puts what is there of 2 MiB into one page, and zeros beside it. Whoever writes there
 * meanwhile waits for a moment. Where the kernel refuses, all stays as it was, and it is not asked again. */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { LARGE_BYTES = 2 << 20, PAGES_AT_ONCE = 4 }; /* each call waits for all processors once: not for each page */
enum { NOT_ASKED, BEING_ASKED, ASKED };
enum { MOMENT_NS = 50 * 1000, MAX_MOMENTS = 10 * 1000 };
enum { MAX_RUNS = 64 };

static void collapse(large_t *large, uint64_t first, uint64_t stop) {
    uint64_t address = large->address + first * LARGE_BYTES;
    if (!madvise((void *)(uintptr_t)address, (stop - first) * LARGE_BYTES, MADV_COLLAPSE))
        return;
    if (errno != EAGAIN) /* there is none, or it costs too much to find: for all of this memory */
        atomic_store(&large->is_refused, 1);
    else if (stop - first > 1) /* one of them was in use: it stays, and the others are asked for */
        for (; first < stop && !atomic_load(&large->is_refused); first++)
            collapse(large, first, first + 1);
}

/* Ask for these pages, which are few, unless that was done before; wait where another thread does it: a page that is
 * written to meanwhile is left as it was. */
static void ask_few(large_t *large, uint64_t first, uint64_t stop) {
    const struct timespec moment = {.tv_nsec = MOMENT_NS};
    for (uint64_t next; first < stop && !atomic_load(&large->is_refused); first = next) {
        for (next = first; next < stop; next++) {
            unsigned char nothing = NOT_ASKED;
            if (!atomic_compare_exchange_strong(&large->asked[next], &nothing, BEING_ASKED))
                break;
            /* where there is nothing at all there is nothing to put together */
            (void)*(const volatile unsigned char *)(uintptr_t)(large->address + next * LARGE_BYTES);
        }
        if (next > first)
            collapse(large, first, next);
        for (uint64_t page = first; page < next; page++)
            atomic_store(&large->asked[page], ASKED);
        if (next == first) {
            int moments = 0;
            while (atomic_load(&large->asked[next]) == BEING_ASKED && moments++ < MAX_MOMENTS)
                nanosleep(&moment, NULL);
            atomic_store(&large->asked[next++], ASKED);
        }
    }
}

static int is_within(const large_t *large, uint64_t address, uint64_t length) {
    return length && address >= large->address && address - large->address <= large->size &&
           length <= large->size - (address - large->address);
}

/* These bytes will be written: have what they lie in, and what lies beside it. */
static void have_run(large_t *large, uint64_t address, uint64_t length) {
    if (!is_within(large, address, length))
        return;
    uint64_t first = (address - large->address) / LARGE_BYTES, pages = large->size / LARGE_BYTES;
    uint64_t last = (address - large->address + length - 1) / LARGE_BYTES;
    for (first -= first % PAGES_AT_ONCE; first <= last && first < pages; first += PAGES_AT_ONCE)
        ask_few(large, first, first + PAGES_AT_ONCE < pages ? first + PAGES_AT_ONCE : pages);
}

/* The same for bytes of a stream, all of which lies there. */
void have_large_for(large_t *large, const table_t *table, uint64_t start, uint64_t stop) {
    struct iovec runs[MAX_RUNS];
    uint64_t bytes;
    while (large && !atomic_load(&large->is_refused) && start < stop) {
        int count = vectors_of(table, start, stop, MAX_RUNS, runs, &bytes);
        for (int i = 0; i < count; i++)
            have_run(large, (uint64_t)(uintptr_t)runs[i].iov_base, runs[i].iov_len);
        if (!bytes)
            return;
        start += bytes;
    }
}

/* The large pages that have nothing but these bytes. Returns whether there are some, and the kernel never refused. */
EXPORT int th_have_large(large_t *large, uint64_t address, uint64_t length) {
    if (!is_within(large, address, length))
        return 0;
    uint64_t first = (address - large->address + LARGE_BYTES - 1) / LARGE_BYTES;
    uint64_t stop = (address - large->address + length) / LARGE_BYTES, next = first;
    for (; next < stop; next += PAGES_AT_ONCE)
        ask_few(large, next, next + PAGES_AT_ONCE < stop ? next + PAGES_AT_ONCE : stop);
    return first < stop && !atomic_load(&large->is_refused);
}

/* -- Words of memory that threads look at and wait on: stop flags, progress, and the clock. */

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Until the word is no longer what was seen; it may also return for no reason. */
void wait_word(_Atomic uint32_t *word, uint32_t seen, double timeout_s) {
    if (!(timeout_s > 0))
        return;
    if (timeout_s > 3600)
        timeout_s = 3600;
    struct timespec limit = {(time_t)timeout_s, 0};
    limit.tv_nsec = (long)((timeout_s - (double)limit.tv_sec) * 1e9);
    syscall(SYS_futex, (uint32_t *)(void *)word, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0);
}

void wake_word(_Atomic uint32_t *word) {
    syscall(SYS_futex, (uint32_t *)(void *)word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* What chunk flags are is a byte each, which Python reads too. */
static _Atomic unsigned char *flag_of(const progress_t *progress, uint64_t chunk) {
    return (_Atomic unsigned char *)(void *)(progress->have + chunk);
}

int has_chunk(const progress_t *progress, uint64_t chunk) {
    return atomic_load(flag_of(progress, chunk)) != 0;
}

void th_wake(progress_t *progress) {
    atomic_fetch_add(&progress->changed, 1);
    if (atomic_load(&progress->waiters))
        wake_word(&progress->changed);
}

uint64_t th_mark(progress_t *progress, uint64_t chunk) {
    atomic_store(flag_of(progress, chunk), 1);
    uint64_t prefix = atomic_load(&progress->prefix);
    while (prefix < progress->count && has_chunk(progress, prefix))
        if (atomic_compare_exchange_weak(&progress->prefix, &prefix, prefix + 1))
            prefix++;
    th_wake(progress);
    return prefix;
}

/* A waiter counts itself first: who changes the word later sees it, who changed it before is seen in the word. */
void th_wait(progress_t *progress, uint32_t seen, double timeout_s) {
    atomic_fetch_add(&progress->waiters, 1);
    wait_word(&progress->changed, seen, timeout_s);
    atomic_fetch_sub(&progress->waiters, 1);
}

uint32_t th_swap(_Atomic uint32_t *word, uint32_t from, uint32_t to) {
    atomic_compare_exchange_strong(word, &from, to);
    return from;
}
