/* Words of memory that threads look at and wait on: stop flags, progress, and the clock. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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
