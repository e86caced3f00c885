/* A process that allocates when it is told to, and prints every view of memory that a program has.

   alloc BYTES   "ok" or "oom"
   fill BYTES    allocates blocks of this size until there is no memory; prints how many it got
   free          frees all blocks
   view          cuMemGetInfo free and total, cuDeviceTotalMem, NVML v1 and v2 (total, free, used), processes (pid:bytes) */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Pointer;
typedef struct { unsigned long long total, free, used; } Memory1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;

static void *cuda, *nvml;

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(2);
    }
    return found;
}

#define CALL(library, name, types, ...) ((int (*) types)find(library, name))(__VA_ARGS__)

static void check(const char *what, int result) {
    if (result) {
        fprintf(stderr, "%s: %d\n", what, result);
        exit(2);
    }
}

static void view(void) {
    size_t free, total, device;
    void *gpu;
    Memory1 one;
    Memory2 two = {.version = sizeof(Memory2) | 2u << 24};
    Process list[64];
    unsigned count = 0;
    check("info", CALL(cuda, "cuMemGetInfo_v2", (size_t *, size_t *), &free, &total));
    check("total", CALL(cuda, "cuDeviceTotalMem_v2", (size_t *, int), &device, 0));
    check("handle", CALL(nvml, "nvmlDeviceGetHandleByIndex_v2", (unsigned, void **), 0, &gpu));
    check("memory", CALL(nvml, "nvmlDeviceGetMemoryInfo", (void *, Memory1 *), gpu, &one));
    check("memory 2", CALL(nvml, "nvmlDeviceGetMemoryInfo_v2", (void *, Memory2 *), gpu, &two));
    printf("%zu %zu %zu %llu %llu %llu %llu %llu %llu", free, total, device, one.total, one.free, one.used, two.total,
           two.free, two.used);
    int room = CALL(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", (void *, unsigned *, Process *), gpu, &count, NULL);
    if (room != 7)
        check("room", 100 + room);
    check("list", CALL(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", (void *, unsigned *, Process *), gpu, &count, list));
    for (unsigned n = 0; n < count; n++)
        printf(" %u:%llu", list[n].pid, list[n].used);
    printf("\n");
}

int main(void) {
    static Pointer blocks[1 << 16];
    size_t live = 0;
    void *context;
    char line[64];
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!cuda || !nvml)
        return 3;
    setvbuf(stdout, NULL, _IOLBF, 0);
    check("init", CALL(cuda, "cuInit", (unsigned), 0));
    check("nvml", CALL(nvml, "nvmlInit_v2", (void)));
    check("retain", CALL(cuda, "cuDevicePrimaryCtxRetain", (void **, int), &context, 0));
    check("current", CALL(cuda, "cuCtxSetCurrent", (void *), context));
    size_t bytes;
    /* The first look attaches the process. */
    check("info", CALL(cuda, "cuMemGetInfo_v2", (size_t *, size_t *), &bytes, &bytes));
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        size_t argument = strtoull(strchr(line, ' ') ? strchr(line, ' ') : "0", NULL, 10), got = 0;
        if (!strncmp(line, "view", 4)) {
            view();
        } else if (!strncmp(line, "free", 4)) {
            while (live)
                check("free", CALL(cuda, "cuMemFree_v2", (Pointer), blocks[--live]));
            printf("ok\n");
        } else if (!strncmp(line, "fill", 4)) {
            while (!CALL(cuda, "cuMemAlloc_v2", (Pointer *, size_t), &blocks[live], argument))
                live++, got++;
            printf("%zu\n", got);
        } else {
            int result = CALL(cuda, "cuMemAlloc_v2", (Pointer *, size_t), &blocks[live], argument);
            live += !result;
            printf(result == 0 ? "ok\n" : result == 2 ? "oom\n" : "error\n");
        }
    }
    return 0;
}
