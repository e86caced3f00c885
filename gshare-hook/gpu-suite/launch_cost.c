/* Prints the median time in ns of one cuLaunchKernel of an empty kernel, as an unmodified program sees it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry zero() { ret; }\n";

enum { BATCHES = 41, LAUNCHES = 1000 };

static void *driver;

static void *get(const char *name) {
    void *address = dlsym(driver, name);
    if (!address) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return address;
}

static void check(int result, const char *what) {
    if (result) {
        fprintf(stderr, "%s gave %d\n", what, result);
        exit(2);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*init)(unsigned) = get("cuInit");
    int (*retain)(void **, int) = get("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = get("cuCtxSetCurrent");
    int (*load)(void **, const void *) = get("cuModuleLoadData");
    int (*function)(void **, void *, const char *) = get("cuModuleGetFunction");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **) = get("cuLaunchKernel");
    int (*synchronize)(void) = get("cuCtxSynchronize");
    void *context, *module, *kernel;
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(set(context), "cuCtxSetCurrent");
    check(load(&module, PTX), "cuModuleLoadData");
    check(function(&kernel, module, "zero"), "cuModuleGetFunction");

    double ns[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < LAUNCHES; i++)
            check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        clock_gettime(CLOCK_MONOTONIC, &end);
        check(synchronize(), "cuCtxSynchronize");
        ns[batch] = ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / LAUNCHES;
    }
    qsort(ns, BATCHES, sizeof ns[0], by_value);
    printf("suite: {\"ns\": %.2f}\n", ns[BATCHES / 2]);
    return 0;
}
