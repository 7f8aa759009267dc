/* Frames on the wire, as tcp/wire.py says: headers, requests in MessagePack. And what Python asks at loading. */
#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

/* -- What goes over the wire, as tcp/wire.py says it: headers, and requests for chunks in MessagePack. */

static int failure_of(int number, int *error) {
    if (number == EAGAIN || number == EWOULDBLOCK)
        return SILENT;
    *error = number;
    return VANISHED;
}

int send_all(int descriptor, const void *bytes, size_t length, int *error) {
    const unsigned char *at = bytes;
    while (length) {
        ssize_t sent = send(descriptor, at, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return failure_of(errno, error);
        at += sent;
        length -= (size_t)sent;
    }
    return 0;
}

int receive_all(int descriptor, void *bytes, size_t length, _Atomic uint64_t *heard, int *error) {
    unsigned char *at = bytes;
    while (length) {
        ssize_t got = recv(descriptor, at, length, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            *error = 0;
            return got ? failure_of(errno, error) : VANISHED;
        }
        if (heard)
            atomic_fetch_add_explicit(heard, (uint64_t)got, memory_order_relaxed);
        at += got;
        length -= (size_t)got;
    }
    return 0;
}

static uint64_t big_endian(const unsigned char *bytes, int count) {
    uint64_t found = 0;
    for (int i = 0; i < count; i++)
        found = found << 8 | bytes[i];
    return found;
}

static void put_big_endian(unsigned char *out, uint64_t value, int count) {
    for (int i = count - 1; i >= 0; i--, value >>= 8)
        out[i] = (unsigned char)value;
}

void put_header(unsigned char out[HEADER_BYTES], unsigned kind, uint32_t length, uint64_t number) {
    memset(out, 0, 4);
    out[0] = (unsigned char)kind;
    put_big_endian(out + 4, length, 4);
    put_big_endian(out + 8, number, 8);
}

void get_header(const unsigned char in[HEADER_BYTES], uint64_t *kind, uint64_t *length, uint64_t *number) {
    *kind = in[0];
    *length = big_endian(in + 4, 4);
    *number = big_endian(in + 8, 8);
}

/* -- MessagePack: a list of pairs of numbers that are not negative, and nothing else ----------------------------- */

static size_t encode_number(uint64_t value, unsigned char *out) {
    int log2 = value < 1ull << 8 ? 0 : value < 1ull << 16 ? 1 : value < 1ull << 32 ? 2 : 3;
    if (value < 0x80) {
        out[0] = (unsigned char)value;
        return 1;
    }
    out[0] = (unsigned char)(0xCC + log2);
    put_big_endian(out + 1, value, 1 << log2);
    return 1 + (1u << log2);
}

/* At most MAX_RANGES of them. */
size_t encode_want(const uint64_t *ranges, size_t count, unsigned char *out) {
    size_t at = 0;
    if (count < 16) {
        out[at++] = (unsigned char)(0x90 | count);
    } else {
        out[at++] = 0xDC;
        put_big_endian(out + at, count, 2);
        at += 2;
    }
    for (size_t i = 0; i < count; i++) {
        out[at++] = 0x92;
        at += encode_number(ranges[2 * i], out + at);
        at += encode_number(ranges[2 * i + 1], out + at);
    }
    return at;
}

typedef struct {
    const unsigned char *at, *end;
} text_t;

/* The number that is next, 0xCC to 0xCF without a sign, 0xD0 to 0xD3 with one; 0: there is none, or a negative one. */
static int decode_number(text_t *text, uint64_t *value) {
    if (text->at == text->end)
        return 0;
    unsigned char tag = *text->at++;
    if (tag < 0x80)
        return *value = tag, 1;
    if (tag < 0xCC || tag > 0xD3)
        return 0;
    int size = 1 << (tag & 3);
    if (text->end - text->at < size || (tag >= 0xD0 && *text->at >= 0x80))
        return 0;
    *value = big_endian(text->at, size);
    text->at += size;
    return 1;
}

/* How many elements the list has that is next; -1: there is none. */
static int64_t decode_list(text_t *text) {
    if (text->at == text->end)
        return -1;
    unsigned char tag = *text->at++;
    if ((tag & 0xF0) == 0x90)
        return tag & 0x0F;
    int size = tag == 0xDC ? 2 : tag == 0xDD ? 4 : 0;
    if (!size || text->end - text->at < size)
        return -1;
    text->at += size;
    return (int64_t)big_endian(text->at - size, size);
}

/* How many ranges of chunks a request has, each within 0 <= start < stop <= chunk_count; -1: it is malformed.
 * `ranges` has room for MAX_RANGES pairs. */
int64_t th_decode_want(const unsigned char *body, uint64_t length, uint64_t chunk_count, uint64_t *ranges) {
    text_t text = {body, body + length};
    int64_t count = decode_list(&text);
    if (count < 0 || count > MAX_RANGES)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t *range = ranges + 2 * i;
        if (decode_list(&text) != 2 || !decode_number(&text, range) || !decode_number(&text, range + 1))
            return -1;
        if (range[0] >= range[1] || range[1] > chunk_count)
            return -1;
    }
    return text.at == text.end ? count : -1;
}

/* -- What Python asks when it loads the library: is this the one that it was written for? */

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
