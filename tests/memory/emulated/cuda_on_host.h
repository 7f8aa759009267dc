/* Runs CUDA kernels on the host, warp by warp: each lane is a coroutine that waits for the others at every shuffle.

It knows what xxh3.cu uses, and no block-wide barrier. Aligned accesses trap where the address is not aligned. */
#include <cstdint>
#include <functional>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define LANES 32
#define STACK_BYTES (1 << 15)

struct ulonglong2 {
    unsigned long long x, y;
};

static struct {
    unsigned x;
} threadIdx, blockIdx, blockDim, gridDim;

static ucontext_t scheduler, lanes[LANES];
static unsigned long long shown[LANES];
static bool has_ended[LANES];
static int lane_now;
static std::function<void()> kernel_now;

static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

template <class T> static inline T __ldcs(const T* from) {
    if ((uintptr_t)from % sizeof(T)) __builtin_trap();
    return *from;
}

template <class T> static inline void __stcs(T* to, T value) {
    if ((uintptr_t)to % sizeof(T)) __builtin_trap();
    *to = value;
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

static void wait_for_warp() {
    int me = lane_now;
    swapcontext(&lanes[me], &scheduler);
}

static unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int mask) {
    int me = lane_now;
    shown[me] = value;
    wait_for_warp();
    unsigned long long found = shown[me ^ mask];
    wait_for_warp();
    return found;
}

static void run_lane() {
    int me = lane_now;
    kernel_now();
    has_ended[me] = true;
    for (;;) swapcontext(&lanes[me], &scheduler);
}

static void run_warp(unsigned first) {
    static char stacks[LANES][STACK_BYTES];
    for (int i = 0; i < LANES; i++) {
        has_ended[i] = false;
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks[i];
        lanes[i].uc_stack.ss_size = STACK_BYTES;
        lanes[i].uc_link = &scheduler;
        makecontext(&lanes[i], run_lane, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (int i = 0; i < LANES; i++)
            if (!has_ended[i]) {
                lane_now = i;
                threadIdx.x = first + i;
                is_running = true;
                swapcontext(&scheduler, &lanes[i]);
            }
    }
}

static void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    kernel_now = kernel;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned b = 0; b < blocks; b++) {
        blockIdx.x = b;
        for (unsigned first = 0; first < threads; first += LANES) run_warp(first);
    }
}
