/* What Python asks when it loads the library: is this the one that it was written for? */
#include "mover.h"

#ifndef SOURCES
#define SOURCES "0000000000000000"
#endif

/* Of which sources it was made, to be found in the file without loading it. */
EXPORT const char th_made_of[] = "tensorhub-mover:" SOURCES;

EXPORT uint32_t th_abi(void) { return ABI; }

/* The sizes of the structures that both know, in the order of `shapes.py`. */
EXPORT uint64_t th_size_of(uint32_t which) {
    static const uint64_t sizes[] = {sizeof(stop_flag_t),   sizeof(progress_t), sizeof(table_t), sizeof(read_t),
                                     sizeof(stream_t), sizeof(serve_t),    sizeof(digest_t), sizeof(loop_t),
                                     sizeof(keep_t),   sizeof(batches_t),  sizeof(offload_t), sizeof(large_t)};
    return which < sizeof sizes / sizeof *sizes ? sizes[which] : 0;
}

/* The instruction set that digests are computed with. */
EXPORT const char *th_digest_way(void) {
    const char *name;
    digest_best(&name);
    return name;
}

EXPORT void th_digest_begin(digest_t *digest, uint64_t size) { digest_begin(digest, size); }
EXPORT void th_digest_update(digest_t *digest, const void *bytes, uint64_t length) {
    digest_update(digest, bytes, (size_t)length);
}
EXPORT void th_digest_copy(digest_t *digest, void *to, const void *from, uint64_t length) {
    digest_copy(digest, to, from, (size_t)length);
}
EXPORT int th_digest_end(const digest_t *digest, unsigned char *out) { return digest_end(digest, out); }

/* The same by the loop that every processor has, so that both can be compared on one machine. */
EXPORT void th_digest_take_plain(uint64_t *lanes, const unsigned char *stripes, uint64_t count, uint32_t index) {
    digest_take_plain(lanes, stripes, (size_t)count, index);
}
EXPORT void th_digest_take_best(uint64_t *lanes, const unsigned char *stripes, uint64_t count, uint32_t index) {
    const char *name;
    digest_best(&name)(lanes, stripes, (size_t)count, index);
}
/* And the loops that copy besides. 0: there is no such here. */
EXPORT int th_digest_store(uint32_t which, uint64_t *lanes, unsigned char *out, const unsigned char *stripes,
                           uint64_t count, uint32_t index) {
    digest_store *store = digest_storing(which);
    if (store)
        store(lanes, out, stripes, (size_t)count, index);
    return store != NULL;
}
