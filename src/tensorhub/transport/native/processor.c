/* What the processor can do, asked of itself. A compiler's own word for that wants a library of
 * the compiler's, which not every compiler can put into a shared one. */
#include "digest.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>

/* As Intel's and AMD's manuals number them: bits of CPUID, and the registers that the kernel keeps for a thread. */
enum { OSXSAVE = 1u << 27, AVX2 = 1u << 5, AVX512F = 1u << 16, YMM_KEPT = 0x06, ZMM_KEPT = 0xE6 };

static uint32_t kept(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(unsigned feature, uint32_t registers) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || (kept() & registers) != registers)
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & feature) != 0;
}

int processor_has_avx2(void) { return has(AVX2, YMM_KEPT); }
int processor_has_avx512(void) { return has(AVX512F, ZMM_KEPT); }

#else

int processor_has_avx2(void) { return 0; }
int processor_has_avx512(void) { return 0; }

#endif
