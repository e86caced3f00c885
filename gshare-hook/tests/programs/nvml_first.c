/* Asks NVML about all devices before CUDA is used at all. */
#include <dlfcn.h>
#include <stdio.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;

int main(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*memory)(void *, Memory *) = (int (*)(void *, Memory *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    int (*processes)(void *, unsigned *, Process *) =
        (int (*)(void *, unsigned *, Process *))dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    init();
    for (unsigned i = 0; i < 2 && !by_index(i, &device); i++) {
        Memory m;
        Process list[64];
        unsigned count = 64;
        memory(device, &m);
        processes(device, &count, list);
        printf("device %u: total %llu used %llu free %llu MiB, %u processes\n", i, m.total >> 20, m.used >> 20, m.free >> 20, count);
    }
    return 0;
}
