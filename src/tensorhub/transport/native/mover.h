/* Bytes between two workers without the interpreter: what the parts of the mover share.
 *
 * Python does what happens once: it connects, greets, fetches the manifest, and checks every number that it puts into
 * the structures below. It owns all of their memory, and keeps it until the functions that were given it have returned.
 * From then on threads in here move, judge and count, and see what Python wants by words of memory that both know.
 *
 * Nothing in here allocates, and nothing in here calls Python. */
#ifndef TENSORHUB_MOVER_H
#define TENSORHUB_MOVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "digest.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    ABI = 6, /* raised with every change of a structure or a function that Python knows */
    MAX_RANGES = 1024,
    MAX_WANT_BYTES = 64 * 1024,
    WANT_BYTES = 16 + 3 + MAX_RANGES * 19, /* what we send: header, count, and two numbers of 9 bytes for each range */
    MAX_GONE_BYTES = 16 * 1024,
    MAX_VECTORS = 1024,
    MAX_STOP_FLAGS = 4,
    MAX_AHEAD = 1024,
    GAP_BYTES = 4096, /* no page is smaller: each byte of a smaller gap shares a page with a byte that is wanted */
    SEAL_BYTES = 16,
    HEADER_BYTES = 16,
};

enum { WANT = 1, MANIFEST, CHUNK, WAITING, GONE, LENT, READY = 16 }; /* kinds of frames: tcp/wire.py, announcing.py */
enum { COPIED = 1 };

/* How a stream or a conversation ended. */
enum {
    DONE,
    OVER,       /* it was told to stop */
    VANISHED,   /* the peer hung up, or the network did: `error`, or 0 */
    SILENT,     /* no byte moved for the whole limit */
    GARBLED,    /* the frame in `kind`, `length`, `number` is none that can come here */
    SAID_GONE,  /* the reason that the source gave is in `words` */
    CORRUPT,    /* `chunk` has another digest */
    UNTRUSTED,  /* a stop flag is set, the lease has ended, or nothing may be written */
    LOST,       /* the other process cannot be read: `error` */
    UNREADABLE, /* it is there and its export lasts, but the kernel will not read that memory: `error` */
    ENDED,      /* the export ended */
    FAILED,     /* no further chunk will come */
    NEEDS_PIPE, /* the connection is fast enough to lend memory to */
};

/* Shut once, for good. Who shuts it then waits until nobody is between looking and counting. */
typedef struct {
    _Atomic uint32_t is_set, inside;
} stop_flag_t;

/* Which chunks are there. `changed` is what waiters wait on. */
typedef struct {
    unsigned char *have;
    uint64_t count;
    _Atomic uint64_t prefix;
    _Atomic uint32_t changed, waiters, has_failed, unused;
} progress_t;

/* Two loops around a run of bytes: `counts` times, each time `count` times. */
typedef struct {
    uint64_t count, stride, counts, strides;
} loop_t;

/* Where the bytes of a stream lie: address and length of each piece, and where in the stream it begins. */
typedef struct {
    const uint64_t *pairs, *starts;
    uint64_t count, size;
    const loop_t *loops; /* around each piece, which is their first run then; NULL: a piece is one run */
} table_t;

/* Memory of ours that others map, from the beginning of a large page on. `asked` is a byte for each of its large pages:
 * whether the kernel was asked for it. */
typedef struct {
    uint64_t address, size;
    _Atomic unsigned char *asked;
    _Atomic uint32_t is_refused, unused;
} large_t;

/* Part of a batch that lies in scratch memory, and where it is kept: a run in two loops, on both sides. */
typedef struct {
    uint64_t from, to, run, count, from_stride, to_stride, counts, from_strides, to_strides;
} keep_t;

/* A stream made of what a reader wants of another one: batches, which take the place of chunks. Each is some whole
 * tiles, one after another; a tile has a digest of its own. */
typedef struct {
    const uint64_t *bounds;     /* [count + 1] where each batch begins in the stream */
    const unsigned char *flags; /* [count] */
    uint64_t count;
    /* at a source */
    const uint64_t *first_row; /* [count + 1] */
    const uint64_t *needs;     /* [rows] the first and the last chunk of the export that it takes bytes from */
    /* at a reader */
    const uint64_t *first_tile; /* [count + 1] */
    const uint64_t *tiles;      /* [tiles + 1] where each begins in the stream */
    const uint64_t *first_keep; /* [count + 1] */
    const keep_t *keeps;
    const uint64_t *first_turn; /* [tiles + 1] */
    const uint64_t *turns;      /* rows of scratch memory: how a tile that comes in another order is gone through */
} batches_t;

enum { IS_SENT = 1, IS_KEPT = 2 }; /* batches_t.flags: over the socket by any transport; by way of scratch memory */
enum { ROW_WORDS = 6 };            /* place, run, count, stride, counts, strides */
#define MAX_BATCH_BYTES (1ull << 30)
#define NOTHING UINT64_MAX

/* What the streams of one read share. */
typedef struct {
    table_t ours;
    uint64_t chunk_bytes;
    const uint64_t *wanted;
    uint64_t wanted_count;
    const unsigned char *digests; /* of every chunk, or tile; NULL: nothing is checked */
    const batches_t *batches;     /* NULL: the stream is cut into chunks */
    progress_t *progress;
    stop_flag_t *stop_flags[MAX_STOP_FLAGS];
    const double *until; /* the lease's end on the monotonic clock; NULL: none */
    large_t *large; /* what all of `ours` lies in; NULL: it is none of that kind */
    unsigned char *doubted; /* a byte for each chunk: came lent and wrong, and was asked for once more */
    double ahead_s, fast_bytes_per_s, tell_s;
    uint64_t ahead_first, max_ahead, tile_bytes;
    /* From here on: what changes. */
    _Atomic uint32_t lock; /* of `next`: 0 free, 1 taken, 2 taken and waited for */
    _Atomic uint32_t streams; /* those with a higher index ask for no more */
    uint64_t next;
    _Atomic uint32_t is_over, events, may_write, is_lent_to;
    _Atomic uint64_t received_bytes, received_chunks, stored_chunks, stored_bytes;
    double tell_at; /* of the one thread that waits */
} read_t;

enum { WAIT_FOR_LEAVE, MAY_WRITE, MAY_NOT_WRITE }; /* read_t.may_write */
enum { ASKS_LEAVE = 1, IS_FAST = 2, HAS_NEWS = 4, HAS_ENDED = 8, IS_WHOLE = 16 }; /* read_t.events */

/* One connection of a read. */
typedef struct {
    read_t *read;
    int32_t descriptor, is_local;
    /* local: whose memory, where, and what must be found there */
    int32_t pid, pidfd;
    int32_t is_mapped; /* all of it is mapped: `theirs` are addresses here */
    int32_t is_hashing; /* what comes is looked at as it comes */
    table_t theirs;
    uint64_t seal_address; /* in the other process; mapped: here */
    unsigned char seal[SEAL_BYTES];
    unsigned char *scratch; /* for the largest batch that is kept in part */
    /* how it ended */
    int32_t status, error;
    uint64_t kind, length, number, chunk, tile;
    /* what changes */
    _Atomic uint64_t heard_bytes;
    uint64_t read_bytes;
    uint64_t ready, ready_count; /* announced and not yet begun */
    uint64_t ahead, first, count; /* the ring of chunks that were asked for */
    uint64_t asked[MAX_AHEAD];
    double asked_at[MAX_AHEAD];
    int32_t is_lent, is_bridging, is_judging_speed, is_started;
    uint32_t index, unused;
    digest_t digest;
    pthread_t thread;
    unsigned char words[MAX_GONE_BYTES > WANT_BYTES ? MAX_GONE_BYTES : WANT_BYTES];
} stream_t;

/* One connection of a source. */
typedef struct {
    table_t table;
    uint64_t chunk_bytes, chunk_count; /* or how many batches there are */
    const batches_t *batches;          /* NULL: the stream is cut into chunks */
    progress_t *progress;
    stop_flag_t *ended;
    int32_t descriptor, is_announcing;
    double keepalive_s;
    /* lending */
    _Atomic uint32_t *lent; /* 0 nothing yet, 1 lent to, 2 called out before anything was lent */
    int32_t may_lend, pipe_in, pipe_out, is_fast;
    double lend_bytes_per_s, window_began;
    uint64_t lend_piece_bytes, window_bytes;
    /* how it ended */
    int32_t status, error;
    uint64_t kind, length, number;
    /* what changes */
    _Atomic uint64_t sent_bytes, sent_chunks, lent_bytes;
    uint64_t range_count, range_next, at;
    double idle_since; /* the reader asks for nothing; 0: it is served */
    uint64_t ranges[2 * MAX_RANGES];
    unsigned char words[MAX_WANT_BYTES];
} serve_t;

/* Chunks that are copied from one memory of this process to another. */
typedef struct {
    table_t source, into;
    uint64_t chunk_bytes, tile_bytes;
    const unsigned char *digests; /* of every chunk; NULL: nothing is checked */
    large_t *large;               /* what all of `into` lies in, or NULL */
    _Atomic uint64_t next;
    uint64_t stop;
    uint32_t threads;
    _Atomic uint32_t has_failed;
    /* how it ended */
    int32_t status, error;
    uint64_t chunk, at; /* the one that failed, and the first byte that was not there */
} offload_t;

/* copy.c */
double now_s(void);
void wait_word(_Atomic uint32_t *word, uint32_t seen, double timeout_s);
void wake_word(_Atomic uint32_t *word);
int has_chunk(const progress_t *progress, uint64_t chunk);
EXPORT uint64_t th_mark(progress_t *progress, uint64_t chunk);
EXPORT void th_wake(progress_t *progress);
EXPORT void th_wait(progress_t *progress, uint32_t seen, double timeout_s);
EXPORT uint32_t th_swap(_Atomic uint32_t *word, uint32_t from, uint32_t to);

/* copy.c: lists of address and length */
uint64_t piece_at(const table_t *table, uint64_t at);
int vectors_of(const table_t *table, uint64_t start, uint64_t stop, int most, struct iovec *out, uint64_t *bytes);
int pieces_in(const table_t *table, uint64_t start, uint64_t stop, uint64_t most);

typedef struct {
    struct iovec ours[MAX_VECTORS], theirs[MAX_VECTORS];
    int ours_count, theirs_count;
    uint64_t stream_bytes, bytes; /* of the stream, and with the gaps */
} both_t;
void vectors_of_both(const table_t *ours, const table_t *theirs, uint64_t start, uint64_t stop, int is_bridging,
                     both_t *out);

/* large.c */
void have_large_for(large_t *large, const table_t *table, uint64_t start, uint64_t stop);
EXPORT int th_have_large(large_t *large, uint64_t address, uint64_t length);

/* frames.c: 0, or how it failed */
int send_all(int descriptor, const void *bytes, size_t length, int *error);
int receive_all(int descriptor, void *bytes, size_t length, _Atomic uint64_t *heard, int *error);
void put_header(unsigned char out[HEADER_BYTES], unsigned kind, uint32_t length, uint64_t number);
void get_header(const unsigned char in[HEADER_BYTES], uint64_t *kind, uint64_t *length, uint64_t *number);
size_t encode_want(const uint64_t *ranges, size_t count, unsigned char *out);
EXPORT int64_t th_decode_want(const unsigned char *body, uint64_t length, uint64_t chunk_count, uint64_t *ranges);

/* reading.c */
int is_trusted(const read_t *read);
void raise_event(read_t *read, uint32_t event);
int may_write(stream_t *stream);
int ask_for(stream_t *stream, const uint64_t *chunks, uint64_t count, uint64_t number);
int next_frame(stream_t *stream);

/* read.c, copy.c: `into` is where the stream's bytes belong */
int take_chunk(stream_t *stream, uint64_t chunk);
int is_as_announced(const stream_t *stream, uint64_t at);
int await_ready(stream_t *stream, uint64_t chunk);
int copy_begin(stream_t *stream);
int copy_bytes(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop);
int copy_end(stream_t *stream, uint64_t size);
int copy_mapped(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop);
int is_sealed_here(const stream_t *stream);
int tell_read(stream_t *stream, uint64_t size);
int receive_bytes(stream_t *stream, const table_t *into, uint64_t start, uint64_t stop);

/* batches.c */
uint64_t span_of(const batches_t *batches, uint64_t chunk_bytes, uint64_t size, uint64_t chunk, uint64_t *start);
int is_sent(const batches_t *batches, uint64_t chunk);
int has_batch(const serve_t *serve, uint64_t batch);
int bring_tiles(stream_t *stream, uint64_t batch, int is_fetched, uint64_t *wrong);
void keep_parts(const stream_t *stream, uint64_t batch);
EXPORT uint64_t th_check_rows(const uint64_t *rows, uint64_t count, uint64_t size, uint64_t chunk_bytes,
                              uint64_t *starts, uint64_t *needs);
EXPORT uint64_t th_place_rows(const uint64_t *rows, uint64_t count, const table_t *memory, uint64_t *pairs,
                              loop_t *loops);
EXPORT int th_digest_tiles(const table_t *memory, const uint64_t *tiles, uint64_t count, unsigned char *out);

/* offload.c */
EXPORT int th_offload(offload_t *offload);

/* serve.c: lending */
int send_chunk(serve_t *serve, uint64_t chunk);
void window_sent(serve_t *serve, uint64_t size);

#endif
