/* Large pages under memory of ours that readers map.
 *
 * The kernel gives shared memory none by itself (`shmem_enabled` is `never` nearly everywhere): then a GiB is 262,144
 * pages, each to be found missing by its owner once, and to be put into the tables of every reader. Since Linux 6.1 one
 * may ask for them: MADV_COLLAPSE puts what is there of 2 MiB into one page, and zeros beside it. Whoever writes there
 * meanwhile waits for a moment. Where the kernel refuses, all stays as it was, and it is not asked again. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { LARGE_BYTES = 2 << 20, AT_ONCE = 4 }; /* each call waits for all processors once: not for each page */
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

/* Ask for these pages, which are few, unless that was done before; wait for whoever does it now: a page that somebody
 * writes to meanwhile is left as it was. */
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
    for (first -= first % AT_ONCE; first <= last && first < pages; first += AT_ONCE)
        ask_few(large, first, first + AT_ONCE < pages ? first + AT_ONCE : pages);
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
    for (; next < stop; next += AT_ONCE)
        ask_few(large, next, next + AT_ONCE < stop ? next + AT_ONCE : stop);
    return first < stop && !atomic_load(&large->is_refused);
}
