/* Ways to find the driver's functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int (*GetProcV2)(const char *, void **, int, uint64_t, unsigned *);
typedef int (*GetProcV1)(const char *, void **, int, uint64_t);

/* The file name of the function's library. */
static const char *owner(void *pointer) {
    Dl_info info;
    if (!pointer) return "nobody";
    if (!dladdr(pointer, &info) || !info.dli_fname) return "unknown";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static const char *symbol(void *pointer) {
    Dl_info info;
    return pointer && dladdr(pointer, &info) && info.dli_sname ? info.dli_sname : "-";
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "replay";
    if (!strcmp(kind, "absent")) {
        /* No driver in the process: no library may pretend to be one. */
        printf("%d %d %d\n", dlsym(RTLD_DEFAULT, "cuInit") != 0, dlsym(RTLD_DEFAULT, "cuLaunchKernel") != 0,
               dlsym(RTLD_DEFAULT, "printf") != 0);
        printf("error: %d\n", (dlsym(RTLD_DEFAULT, "cuInit"), dlerror() != 0));
        return 0;
    }
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return 3;
    if (!strcmp(kind, "dlsym")) {
        /* argv[2..]: exported names. Prints name, symbol found and its library. */
        for (int i = 2; i < argc; i++) {
            void *found = dlsym(driver, argv[i]);
            printf("%s %s %s\n", argv[i], symbol(found), owner(found));
        }
        return 0;
    }
    if (!strcmp(kind, "next")) {
        printf("%s\n", owner(dlsym(RTLD_NEXT, "malloc")));
        printf("%d\n", dlsym(RTLD_NEXT, "no_such_symbol") == 0);
        void *self = dlopen(0, RTLD_NOW);
        printf("%d\n", dlsym(self, "main") == (void *)main || dlsym(self, "main") == 0);
        printf("%d\n", dlsym(RTLD_DEFAULT, "free") == (void *)free);
        return 0;
    }
    if (!strcmp(kind, "dlclose")) {
        for (int i = 0; i < 3; i++) {
            void *again = dlopen("libcuda.so.1", RTLD_NOW);
            printf("%d\n", dlsym(again, "cuInit") != 0);
            dlclose(again);
        }
        dlclose(driver);
        driver = dlopen("libcuda.so.1", RTLD_NOW);
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
        printf("%d\n", init(0));
        return 0;
    }
    if (!strcmp(kind, "elsewhere")) {
        /* Opened and closed, as by a program which only probes; then another part opens it, at another place. */
        Dl_info before;
        size_t total = 0;
        printf("%d\n", dladdr(dlsym(driver, "cuInit"), &before) && dlsym(driver, "cuDeviceTotalMem_v2"));
        dlclose(driver);
        mmap(before.dli_fbase, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        driver = dlopen("libcuda.so.1", RTLD_NOW);
        printf("%d\n", ((int (*)(unsigned))dlsym(driver, "cuInit"))(0));
        printf("%d\n", ((int (*)(size_t *, int))dlsym(driver, "cuDeviceTotalMem_v2"))(&total, 0));
        return 0;
    }
    if (!strcmp(kind, "call")) {
        /* Everything through cuGetProcAddress, as a runtime does. */
        GetProcV2 get = (GetProcV2)dlsym(driver, "cuGetProcAddress_v2");
        void *f[8] = {0}, *context = 0;
        const char *names[8] = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc", "cuMemFree",
                                "cuCtxSynchronize", "cuMemGetInfo", "cuGetProcAddress"};
        for (int i = 0; i < 8; i++) printf("%s %d\n", names[i], get(names[i], &f[i], 12000, 0, 0));
        unsigned long long address = 0;
        size_t free_bytes = 0, total = 0;
        printf("%d\n", ((int (*)(unsigned))f[0])(0));
        printf("%d\n", ((int (*)(void **, int))f[1])(&context, 0));
        printf("%d\n", ((int (*)(void *))f[2])(context));
        printf("%d\n", ((int (*)(unsigned long long *, size_t))f[3])(&address, 1 << 20));
        printf("%d\n", ((int (*)(size_t *, size_t *))f[6])(&free_bytes, &total));
        printf("%d\n", ((int (*)(unsigned long long))f[4])(address));
        printf("%d\n", ((int (*)(void))f[5])());
        printf("%d %d\n", ((GetProcV2)f[7])("cuInit", &f[0], 12000, 0, 0), f[0] != 0);
        return 0;
    }
    if (!strcmp(kind, "replay")) {
        /* stdin: lines of "base version flags"; prints the results of cuGetProcAddress_v2, and of the first form. */
        GetProcV2 get2 = (GetProcV2)dlsym(driver, "cuGetProcAddress_v2");
        GetProcV1 get1 = (GetProcV1)dlsym(driver, "cuGetProcAddress");
        char base[128];
        int version;
        unsigned long long flags;
        unsigned status = 99;
        void *found = 0;
        int probe = get2("", &found, 0, 0, &status);
        printf("probe %d %s %u\n", probe, owner(found), status);
        while (scanf("%127s %d %llu", base, &version, &flags) == 3) {
            void *first = 0, *second = 0;
            unsigned status = 99;
            int r2 = get2(base, &second, version, flags, &status);
            int r1 = get1(base, &first, version, flags);
            printf("%s %d %llu: %d %u %s %s, %d %s %s\n", base, version, flags, r2, status, symbol(second), owner(second),
                   r1, symbol(first), owner(first));
        }
        return 0;
    }
    return 2;
}
