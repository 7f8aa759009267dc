/* Chunks copied inside this process, from registered memory to a host copy of it, and judged while a cache has them.
 *
 * The kernel does the reading, for what is registered may be freed at any moment. Threads of our own take one chunk
 * after another; the caller waits for all of them. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

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
