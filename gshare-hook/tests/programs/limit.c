/* Allocates until the driver refuses, frees everything, and does it again; with threads if asked. */
#include "driver.h"

static Handle context;
static long taken;

static void *fill(void *unused) {
    (void)unused;
    Pointer all[4096];
    int n = 0;
    Result r = 0;
    MUST(cuCtxSetCurrent(context));
    while (n < 4096 && !(r = cuMemAlloc_v2(&all[n], 1 << 20))) n++;
    __atomic_add_fetch(&taken, n, __ATOMIC_SEQ_CST);
    if (r != 2) printf("refused with %d\n", r);
    usleep(100000);
    while (n) MUST(cuMemFree_v2(all[--n]));
    return 0;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    size_t free_bytes, total, device;
    context = context_of_device_0();
    MUST(cuDeviceTotalMem_v2(&device, 0));
    for (int round = 0; round < 2; round++) {
        pthread_t all[64];
        taken = 0;
        for (int i = 0; i < threads; i++) pthread_create(&all[i], 0, fill, 0);
        for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
        MUST(cuMemGetInfo_v2(&free_bytes, &total));
        printf("took %ld MiB; then free %zu total %zu device %zu\n", taken, free_bytes >> 20, total >> 20, device >> 20);
    }
    return 0;
}
