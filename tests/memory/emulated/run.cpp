/* The kernels of xxh3.cu as a library for the host: run(name, blocks, threads, job). */
#include "cuda_on_host.h"
#include KERNELS
#include <cstring>

extern "C" int run(const char* name, unsigned blocks, unsigned threads, const void* job) {
    if (!strcmp(name, "sum_only"))
        launch(blocks, threads, [=] { sum_only((const Job*)job); });
    else if (!strcmp(name, "sum_and_copy"))
        launch(blocks, threads, [=] { sum_and_copy((const Job*)job); });
    else if (!strcmp(name, "chain"))
        launch(blocks, threads, [=] { chain((const Job*)job); });
    else if (!strcmp(name, "move"))
        launch(blocks, threads, [=] { move((const Move*)job); });
    else
        return 1;
    return 0;
}
