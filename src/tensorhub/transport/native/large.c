/* Large pages under memory of ours that readers map.
 *
 * The kernel gives shared memory none by itself (`shmem_enabled` is `never` nearly everywhere): then a GiB is 262,144
 * pages, each to be found missing by its owner once, and to be put into the tables of every reader. Since Linux 6.1 one
 * may ask for them: MADV_COLLAPSE puts what is there of 2 MiB into one page, and zeros beside it. Whoever writes there
 * meanwhile waits for a moment. It never ends a process: where the kernel will not, or memory is short, all stays as
 * it was. */
#define _GNU_SOURCE
#include "mover.h"

#include <sys/mman.h>
#include <time.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { LARGE_BYTES = 2 << 20, AT_ONCE = 8 }; /* each call waits for all processors once: not for each page */
enum { NOT_ASKED, BEING_ASKED, ASKED };
enum { MOMENT_NS = 50 * 1000, MOST_MOMENTS = 10 * 1000 };

static int collapse(const large_t *large, uint64_t first, uint64_t stop) {
    uint64_t address = large->address + first * LARGE_BYTES;
    return madvise((void *)(uintptr_t)address, (stop - first) * LARGE_BYTES, MADV_COLLAPSE);
}

/* Ask for these pages, unless that was done before, and wait for whoever does it now: a page that somebody writes to
 * meanwhile is left as it was, and maybe those behind it. Returns whether the kernel made what this call asked for. */
static int ask(const large_t *large, uint64_t first, uint64_t stop) {
    const struct timespec moment = {.tv_nsec = MOMENT_NS};
    int is_made = 1;
    for (uint64_t next; first < stop; first = next) {
        for (next = first; next < stop; next++) {
            unsigned char nothing = NOT_ASKED;
            if (!atomic_compare_exchange_strong(&large->asked[next], &nothing, BEING_ASKED))
                break;
            /* where there is nothing at all there is nothing to put together */
            (void)*(const volatile unsigned char *)(uintptr_t)(large->address + next * LARGE_BYTES);
        }
        if (next > first && collapse(large, first, next))
            is_made = 0;
        for (uint64_t page = first; page < next; page++)
            atomic_store(&large->asked[page], ASKED);
        if (next == first) {
            for (int i = 0; i < MOST_MOMENTS && atomic_load(&large->asked[next]) == BEING_ASKED; i++)
                nanosleep(&moment, NULL); /* whoever does it may have been left behind by a fork */
            next++;
        }
    }
    return is_made;
}

static int is_within(const large_t *large, uint64_t address, uint64_t length) {
    return address >= large->address && address - large->address <= large->size &&
           length <= large->size - (address - large->address);
}

/* These bytes of a stream will be written, all of which lies there: some more pages at once. */
void have_large_for(const large_t *large, const table_t *table, uint64_t start, uint64_t stop) {
    if (!large || table->loops)
        return;
    uint64_t piece = piece_at(table, start), inside = start - table->starts[piece];
    uint64_t address = table->pairs[2 * piece] + inside, left = table->pairs[2 * piece + 1] - inside;
    uint64_t length = stop - start < left ? stop - start : left;
    if (!is_within(large, address, length))
        return;
    uint64_t first = (address - large->address) / LARGE_BYTES, pages = large->size / LARGE_BYTES;
    uint64_t last = (address - large->address + length + LARGE_BYTES - 1) / LARGE_BYTES;
    first -= first % AT_ONCE;
    last += AT_ONCE - 1 - (last + AT_ONCE - 1) % AT_ONCE;
    ask(large, first, last < pages ? last : pages);
}

/* One of so many parcels comes, which are written here and there: as much of the memory as it is of all of them. */
void have_large_share(const large_t *large, uint64_t parcel, uint64_t count) {
    if (!large)
        return;
    uint64_t groups = (large->size / LARGE_BYTES + AT_ONCE - 1) / AT_ONCE, pages = large->size / LARGE_BYTES;
    uint64_t first = groups * parcel / count * AT_ONCE, stop = groups * (parcel + 1) / count * AT_ONCE;
    ask(large, first, stop < pages ? stop : pages);
}

/* The large pages that have nothing but these bytes. */
EXPORT int th_have_large(const large_t *large, uint64_t address, uint64_t length) {
    return is_within(large, address, length) &&
           ask(large, (address - large->address + LARGE_BYTES - 1) / LARGE_BYTES,
               (address - large->address + length) / LARGE_BYTES);
}
