/* A client without CUDA headers. Built twice: with -DDLOPEN it loads the driver itself and asks cuGetProcAddress_v2 for
 * base names, as libcudart does; without it is linked against libcuda.so.1.
 *   client spin NAME           launches NAME until its standard input ends, synchronising every 10, prints how many
 *   client hammer              allocates, launches, queries and frees without a pause: mostly inside the driver's lock
 *   client memory MIB          allocates, prints "free total" before and after
 */
#include <dlfcn.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
#ifdef DLOPEN
static void *library;
static R (*get)(const char *, void **, int, unsigned long long, unsigned *);
static void *address(const char *base) {
    void *at = NULL;
    unsigned status = 9;
    if (get(base, &at, 12080, 0, &status) || status || !at) {
        fprintf(stderr, "%s: status %u\n", base, status);
        exit(3);
    }
    return at;
}
#define DRIVER(name, ...) static R (*name)(__VA_ARGS__);
#else
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemGetInfo cuMemGetInfo_v2
#define DRIVER(name, ...) extern R name(__VA_ARGS__);
#endif
DRIVER(cuInit, unsigned)
DRIVER(cuDevicePrimaryCtxRetain, void **, int)
DRIVER(cuCtxSetCurrent, void *)
DRIVER(cuModuleLoadData, void **, const void *)
DRIVER(cuModuleGetFunction, void **, void *, const char *)
DRIVER(cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)
DRIVER(cuCtxSynchronize, void)
DRIVER(cuMemAlloc, unsigned long long *, size_t)
DRIVER(cuMemFree, unsigned long long)
DRIVER(cuMemGetInfo, size_t *, size_t *)

#define OK(call) do { R r = (call); if (r) { fprintf(stderr, "%s: %d\n", #call, r); exit(2); } } while (0)

/* Whether the parent process has closed the standard input. */
static int told_to_end(void) {
    struct pollfd input = {0, POLLIN, 0};
    return poll(&input, 1, 0) != 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return 1;
#ifdef DLOPEN
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    get = (R (*)(const char *, void **, int, unsigned long long, unsigned *))dlsym(library, "cuGetProcAddress_v2");
#define FIND(name) *(void **)&name = address(#name)
    FIND(cuInit); FIND(cuDevicePrimaryCtxRetain); FIND(cuCtxSetCurrent); FIND(cuModuleLoadData); FIND(cuModuleGetFunction);
    FIND(cuLaunchKernel); FIND(cuCtxSynchronize); FIND(cuMemAlloc); FIND(cuMemFree);
    FIND(cuMemGetInfo);
#endif
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    if (!strcmp(argv[1], "spin") && argc == 3) {
        char ptx[256];
        void *module, *kernel;
        snprintf(ptx, sizeof ptx, ".version 7.0\n.entry %s() { ret; }\n", argv[2]);
        OK(cuModuleLoadData(&module, ptx));
        OK(cuModuleGetFunction(&kernel, module, argv[2]));
        long n = 0;
        printf("ready\n");
        fflush(stdout);
        while (!told_to_end()) {
            for (int i = 0; i < 10; i++, n++) OK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
            OK(cuCtxSynchronize());
        }
        printf("%ld\n", n);
    } else if (!strcmp(argv[1], "hammer")) {
        void *module, *kernel;
        OK(cuModuleLoadData(&module, ".version 7.0\n.entry spin_500ns() { ret; }\n"));
        OK(cuModuleGetFunction(&kernel, module, "spin_500ns"));
        printf("ready\n");
        fflush(stdout);
        for (;;) {
            unsigned long long p[16];
            size_t free, total;
            for (int i = 0; i < 16; i++) OK(cuMemAlloc(&p[i], 1 << 16));
            for (int i = 0; i < 16; i++) OK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
            OK(cuMemGetInfo(&free, &total));
            for (int i = 0; i < 16; i++) OK(cuMemFree(p[i]));
        }
    } else if (!strcmp(argv[1], "memory") && argc == 3) {
        size_t free_before, free_after, total;
        unsigned long long p;
        OK(cuMemGetInfo(&free_before, &total));
        OK(cuMemAlloc(&p, (size_t)atol(argv[2]) << 20));
        OK(cuMemGetInfo(&free_after, &total));
        printf("%zu %zu %zu\n", free_before, free_after, total);
    }
    return 0;
}
