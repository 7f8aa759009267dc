/* xxh3-128 of the chunks of a stream, on a CUDA device: the same digests that the host computes. And strided copies.

A stream lies in segments of device memory. A chunk's digest is XXH3's long path (chunks above 240 bytes), cut in two:

    sums    of each block of 1 KiB: Σ lo32(w^k)·hi32(w^k) plus the neighbour's word. They do not depend on the
            accumulator, so all blocks are summed at once, at the rate of the memory. The same pass can copy the bytes.
    chain   from block to block: acc = ((acc + sums) ^ acc>>47 ^ k)·p. All chunks and lanes run side by side.

Source: the xxHash specification, section "XXH3 algorithm for long inputs", with the default secret.
No kernel waits for another block of threads, or for the whole device.
*/

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

#define WARP 32
#define BLOCK 1024 /* bytes between two scrambles: 16 stripes of 64 bytes */
#define GROUP 4    /* blocks that a warp loads at once */
#define AHEAD 32   /* sums that a chain loads before it needs them */
#define PART 8192  /* bytes of a row that a warp copies at once */
#define AT_ONCE 4  /* units that a lane loads before it stores the first one */

/* Where bytes [start, next segment's start) of the stream lie. */
struct Segment {
    u64 start;
    u64 address;
};

struct Map {
    const Segment* segments; /* by start; the first one starts at or before the first byte that is asked for */
    u64 count;
};

/* A chunk anywhere in the stream. Behind the last chunk of a table there is one more, of which only `first` counts. */
struct Chunk {
    u64 start; /* in the stream, bytes */
    u64 size;  /* bytes, at least one */
    u64 first; /* of its groups of blocks, counted over the chunks of the table */
};

/* Chunks that are digested by one launch. */
struct Window {
    const Chunk* chunks;
    u64 count;
    u64 usual_groups; /* of most of its chunks: where a chunk is looked for first */
};

__device__ __forceinline__ u64 shuffled(u64 value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }

__device__ __forceinline__ u64 product(u64 word, u64 key) {
    u64 x = word ^ key;
    return (x & 0xFFFFFFFFull) * (x >> 32);
}

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 scrambled(u64 acc, u64 key) { return (acc ^ acc >> 47 ^ key) * 0x9E3779B1ull; }

/* The index of the segment that holds a byte of the stream. */
__device__ __forceinline__ u32 find(const Map& map, u64 at) {
    u32 low = 0, high = map.count;
    while (high - low > 1) {
        u32 middle = low + ((high - low) >> 1);
        if (map.segments[middle].start <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ u64 end_of(const Map& map, u32 segment) {
    return segment + 1 < map.count ? map.segments[segment + 1].start : ~0ull;
}

__device__ __forceinline__ u8* place(const Map& map, u32 segment, u64 at) {
    return (u8*)(map.segments[segment].address + (at - map.segments[segment].start));
}

/* 16 bytes from any address. Whole words are read: each has a byte that is wanted, so each is mapped. */
__device__ __forceinline__ ulonglong2 load(const u8* from) {
    u32 shift = 8 * (u32)((u64)from & 7);
    const u64* words = (const u64*)((u64)from & ~7ull);
    if (!shift) return make_ulonglong2(words[0], words[1]);
    u64 a = words[0], b = words[1], c = words[2];
    return make_ulonglong2(a >> shift | b << (64 - shift), b >> shift | c << (64 - shift));
}

/* 16 bytes of the stream that may lie in several segments. */
__device__ __noinline__ ulonglong2 gather(const Map& map, u32 segment, u64 at) {
    u64 words[2] = {0, 0};
    for (u32 i = 0; i < 16; i++, at++) {
        while (at >= end_of(map, segment)) segment++;
        words[i >> 3] |= (u64)*place(map, segment, at) << (8 * (i & 7));
    }
    return make_ulonglong2(words[0], words[1]);
}

__device__ __noinline__ void scatter(const Map& map, u32 segment, u64 at, u64 size, ulonglong2 bytes) {
    for (u32 i = 0; i < size; i++, at++) {
        while (at >= end_of(map, segment)) segment++;
        *place(map, segment, at) = (u8)((i < 8 ? bytes.x : bytes.y) >> (8 * (i & 7)));
    }
}

/* 16 bytes of the stream from `at` on, of which `size` count; the rest is 0. */
__device__ __forceinline__ ulonglong2 read(const Map& map, u32 segment, u64 at, u64 size) {
    while (at >= end_of(map, segment)) segment++;
    if (size == 16 && at + 16 <= end_of(map, segment)) {
        const u8* from = place(map, segment, at);
        return (u64)from & 15 ? load(from) : __ldcs((const ulonglong2*)from);
    }
    if (size == 16) return gather(map, segment, at);
    u64 words[2] = {0, 0};
    for (u32 i = 0; i < size; i++, at++) {
        while (at >= end_of(map, segment)) segment++;
        words[i >> 3] |= (u64)*place(map, segment, at) << (8 * (i & 7));
    }
    return make_ulonglong2(words[0], words[1]);
}

__device__ __forceinline__ void write(const Map& map, u32 segment, u64 at, u64 size, ulonglong2 bytes) {
    while (at >= end_of(map, segment)) segment++;
    u8* to = place(map, segment, at);
    if (size == 16 && at + 16 <= end_of(map, segment) && !((u64)to & 15))
        __stcs((ulonglong2*)to, bytes);
    else
        scatter(map, segment, at, size, bytes);
}

/* The entry of a table that has number `at`: the last one whose `first` is not above it. `guess` is looked at first. */
template <class Entry>
__device__ __forceinline__ u32 entry_of(const Entry* table, u32 count, u64 at, u32 guess) {
    if (guess < count && table[guess].first <= at && at < table[guess + 1].first) return guess;
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + ((high - low) >> 1);
        if (table[middle].first <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The sums of one block of 1 KiB: lane t sees words 2j and 2j+1 of stripes s and s+8. `whole`: stripes that count. */
__device__ __forceinline__ void sum_block(ulonglong2 x, ulonglong2 y, const u64* secret, u32 whole, ulonglong2* out) {
    int t = threadIdx.x & (WARP - 1), s = t >> 2, j = t & 3;
    u64 even = 0, odd = 0;
    if (s < whole) {
        even = product(x.x, secret[s + 2 * j]) + x.y;
        odd = product(x.y, secret[s + 2 * j + 1]) + x.x;
    }
    if (s + 8 < whole) {
        even += product(y.x, secret[s + 8 + 2 * j]) + y.y;
        odd += product(y.y, secret[s + 8 + 2 * j + 1]) + y.x;
    }
    for (int mask = 4; mask < WARP; mask <<= 1) {
        even += shuffled(even, mask);
        odd += shuffled(odd, mask);
    }
    if (s == 0) out[j] = make_ulonglong2(even, odd);
}

__device__ __forceinline__ bool is_aligned(const u8* address) { return !((u64)address & 15); }

/* The segment of `at`: the one that is known, if it still holds. */
__device__ __forceinline__ u32 seek(const Map& map, u32 known, u64 at) {
    return map.segments[known].start <= at && at < end_of(map, known) ? known : find(map, at);
}

/* One block of at most 1 KiB, of a chunk that has `left` bytes from here on; at any address, in any segments. */
template <bool COPIES>
__device__ __noinline__ void sum_any(const Map& from, u32 source, const Map& to, u32 target, u64 at, u64 left,
                                     const u64* secret, ulonglong2* out) {
    u64 first = 16ull * (threadIdx.x & (WARP - 1)), second = first + BLOCK / 2;
    u64 n = left > first ? (left - first < 16 ? left - first : 16) : 0;
    u64 m = left > second ? (left - second < 16 ? left - second : 16) : 0;
    ulonglong2 x = n ? read(from, source, at + first, n) : make_ulonglong2(0, 0);
    ulonglong2 y = m ? read(from, source, at + second, m) : make_ulonglong2(0, 0);
    if (COPIES) {
        if (n) write(to, target, at + first, n, x);
        if (m) write(to, target, at + second, m, y);
    }
    /* stripes count that end before the chunk's last byte */
    sum_block(x, y, secret, left > BLOCK ? BLOCK / 64 : (u32)((left - 1) / 64), out);
}

template <bool COPIES>
__device__ __forceinline__ void sum_window(const Map& from, const Map& to, const Window& window, const u64* secret,
                                           ulonglong2* sums) {
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, warps = gridDim.x * blockDim.x / WARP;
    u64 before = window.chunks[0].first;
    u32 groups = (u32)(window.chunks[window.count].first - before); /* of a window: few */
    u32 t = threadIdx.x & (WARP - 1), source = 0, target = 0;
    for (u32 g = warp; g < groups; g += warps) {
        u32 guess = g / (u32)window.usual_groups;
        const Chunk chunk = window.chunks[entry_of(window.chunks, (u32)window.count, before + g, guess)];
        u64 inside = (before + g - chunk.first) * GROUP * BLOCK, at = chunk.start + inside, left = chunk.size - inside;
        ulonglong2* out = sums + (u64)g * GROUP * 4;
        source = seek(from, source, at);
        if (COPIES) target = seek(to, target, at);
        const u8* src = place(from, source, at);
        u8* dst = COPIES ? place(to, target, at) : 0;
        bool is_plain = left > GROUP * BLOCK && is_aligned(src) && at + GROUP * BLOCK <= end_of(from, source);
        if (COPIES) is_plain = is_plain && is_aligned(dst) && at + GROUP * BLOCK <= end_of(to, target);
        if (!is_plain) {
            for (u32 i = 0; i < GROUP && i * BLOCK < left; i++)
                sum_any<COPIES>(from, source, to, target, at + i * BLOCK, left - i * BLOCK, secret, out + i * 4);
            continue;
        }
        ulonglong2 v[2 * GROUP]; /* all loads of a group are under way before the first one is used */
#pragma unroll
        for (u32 i = 0; i < 2 * GROUP; i++) v[i] = __ldcs((const ulonglong2*)src + i * WARP + t);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (COPIES) {
                __stcs((ulonglong2*)dst + 2 * i * WARP + t, v[2 * i]);
                __stcs((ulonglong2*)dst + (2 * i + 1) * WARP + t, v[2 * i + 1]);
            }
            sum_block(v[2 * i], v[2 * i + 1], secret, BLOCK / 64, out + i * 4);
        }
    }
}

/* Bytes that are copied by two loops around a run, as `reshard/copies.py` says. */
struct Row {
    u64 from, to, run, count, from_stride, to_stride, counts, from_strides, to_strides; /* all but counts in bytes */
    u64 first; /* of its parts of PART bytes, counted over the rows of the table */
};

/* Rows that are copied by one launch. Behind the last row of a table there is one more, of which only `first` counts. */
struct Move {
    const Row* rows;
    u64 count;
    u64 from, to; /* added to the places of each row */
};

/* Bytes [first, last) of a row, of which all places are multiples of the unit. No division but for a lane's first one. */
template <class Unit>
__device__ __forceinline__ void copy_part(const Row& row, const u8* from, u8* to, u32 first, u32 last) {
    u32 run = row.run / sizeof(Unit), count = row.count, end = last / sizeof(Unit);
    u32 at = first / sizeof(Unit) + (threadIdx.x & (WARP - 1));
    u32 inside = at % run, i = at / run, outer = i / count, inner = i % count;
    u32 steps = WARP / run, step = WARP % run, outer_step = steps / count, inner_step = steps % count;
    while (at < end) {
        Unit units[AT_ONCE];
        u8* places[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            if (at < end) {
                u64 byte = (u64)inside * sizeof(Unit);
                units[k] = __ldcs((const Unit*)(from + outer * row.from_strides + inner * row.from_stride + byte));
                places[k] = to + outer * row.to_strides + inner * row.to_stride + byte;
            } else {
                places[k] = 0;
            }
            at += WARP;
            inside += step;
            inner += inner_step;
            outer += outer_step;
            if (inside >= run) inside -= run, inner++;
            if (inner >= count) inner -= count, outer++;
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++)
            if (places[k]) __stcs((Unit*)places[k], units[k]);
    }
}

/* One launch that digests, as the host describes it (`job` in xxh3.py). */
struct Job {
    Map from, to; /* `to` is empty where nothing is copied */
    Window window;
    const u64* secret; /* 24 words */
    const u64* keys;   /* the accumulator's start, then the secret's words from bytes 128, 121, 11, 117 on: 8 each */
    u64* sums;         /* 8 words a block */
    u64* digests;      /* of each chunk the low and the high half; nothing right for chunks up to 240 bytes */
};

extern "C" {

__global__ void sum_only(const Job* job) {
    sum_window<false>(job->from, job->from, job->window, job->secret, (ulonglong2*)job->sums);
}

__global__ void sum_and_copy(const Job* job) {
    sum_window<true>(job->from, job->to, job->window, job->secret, (ulonglong2*)job->sums);
}

/* Eight lanes a chunk. The last stripe is read from where the bytes lie now: after a copy, in the target. */
__global__ void chain(const Job* job) {
    const Map data = job->to.count ? job->to : job->from;
    const Window window = job->window;
    const u64 *sums = job->sums, *keys = job->keys;
    u32 id = blockIdx.x * blockDim.x + threadIdx.x, chunk = id >> 3, lane = id & 7;
    bool is_real = chunk < window.count;
    u64 start = is_real ? window.chunks[chunk].start : 0, length = is_real ? window.chunks[chunk].size : 0;
    if (length <= 240) is_real = false;
    u64 acc = keys[lane], key = keys[8 + lane];
    if (is_real) {
        const u64* mine = sums + (window.chunks[chunk].first - window.chunks[0].first) * GROUP * 8 + lane;
        u32 blocks = (length - 1) / BLOCK, rest = (u32)((length - 1) % BLOCK) / 64;
        u64 now[AHEAD], next[AHEAD];
        u32 whole = blocks - blocks % AHEAD;
        if (whole) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) next[i] = __ldcs(mine + 8 * i);
        }
        for (u32 b = 0; b < whole; b += AHEAD) {
            const u64* behind = mine + 8ull * (b + AHEAD < whole ? b + AHEAD : b);
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) now[i] = next[i];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) next[i] = __ldcs(behind + 8 * i);
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) acc = scrambled(acc + now[i], key);
        }
        for (u32 b = whole; b < blocks; b++) acc = scrambled(acc + mine[8ull * b], key);
        if (rest) acc += mine[(u64)blocks * 8];
        u64 at = start + length - 64 + 16 * (lane >> 1);
        ulonglong2 pair = read(data, find(data, at), at, 16);
        u64 word = lane & 1 ? pair.y : pair.x, other = lane & 1 ? pair.x : pair.y;
        acc += product(word, keys[16 + lane]) + other;
    }
    u64 low = fold(acc ^ keys[24 + lane], shuffled(acc, 1) ^ keys[24 + (lane ^ 1)]);
    u64 high = fold(acc ^ keys[32 + lane], shuffled(acc, 1) ^ keys[32 + (lane ^ 1)]);
    for (int mask = 2; mask < 8; mask <<= 1) low += shuffled(low, mask), high += shuffled(high, mask);
    if (lane > 1 || !is_real) return;
    u64 h = lane ? high + ~(length * 0xC2B2AE3D27D4EB4Full) : low + length * 0x9E3779B185EBCA87ull;
    h ^= h >> 37;
    h *= 0x165667919E3779F9ull;
    job->digests[2 * chunk + lane] = h ^ (h >> 32);
}

/* Copies rows that do not overlap, in the widest units that their places and runs allow. */
__global__ void move(const Move* job) {
    const Move its = *job;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, warps = gridDim.x * blockDim.x / WARP;
    u64 before = its.rows[0].first;
    u32 parts = (u32)(its.rows[its.count].first - before), usual = (parts - 1) / (u32)its.count + 1;
    for (u32 part = warp; part < parts; part += warps) {
        const Row& row = its.rows[entry_of(its.rows, (u32)its.count, before + part, part / usual)];
        u32 first = (u32)(before + part - row.first) * PART, size = (u32)(row.run * row.count * row.counts);
        u32 last = size - first < PART ? size : first + PART;
        const u8* from = (const u8*)(its.from + row.from);
        u8* to = (u8*)(its.to + row.to);
        u64 all = (u64)from | (u64)to | row.run | (row.count > 1 ? row.from_stride | row.to_stride : 0) |
                  (row.counts > 1 ? row.from_strides | row.to_strides : 0);
        if (!(all & 15))
            copy_part<ulonglong2>(row, from, to, first, last);
        else if (!(all & 7))
            copy_part<u64>(row, from, to, first, last);
        else if (!(all & 3))
            copy_part<u32>(row, from, to, first, last);
        else if (!(all & 1))
            copy_part<unsigned short>(row, from, to, first, last);
        else
            copy_part<u8>(row, from, to, first, last);
    }
}
}
