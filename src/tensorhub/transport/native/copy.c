/* Chunks that the reader fetches itself, out of another process's memory, as `local_reader.py` does it.
 *
 * A chunk counts only if the source's seal was seen there after the copy. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* It could not be read: is that the end of the export, or memory of a kind that nobody else can read? */
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
