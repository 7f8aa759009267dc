/* The kernels of xxh3.cu as a library for the host: run(name, blocks, threads, job). */
#include "cuda_on_host.h"
#include KERNELS
#include <cstring>

extern "C" int run(const char* name, unsigned blocks, unsigned threads, const Job* job) {
    if (!strcmp(name, "sum_only"))
        launch(blocks, threads, [=] { sum_only(job); });
    else if (!strcmp(name, "sum_and_copy"))
        launch(blocks, threads, [=] { sum_and_copy(job); });
    else if (!strcmp(name, "chain"))
        launch(blocks, threads, [=] { chain(job); });
    else
        return 1;
    return 0;
}
