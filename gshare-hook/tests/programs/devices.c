/* Several devices, memory of other processes, green contexts, and NVML's answers: each prints the same bare and hooked. */
#include "driver.h"

typedef struct { char reserved[64]; } IpcHandle;
typedef struct { unsigned char bytes[16]; } Uuid;
typedef struct { unsigned type; unsigned char internal[92]; union { unsigned sms; unsigned char room[48]; } of; void *next; } Resource;
typedef struct { unsigned long long total, free, used; } Memory1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned pid; unsigned long long time; unsigned rates[4]; } Sample;
typedef struct { unsigned long long time; unsigned pid, rates[6]; } Rate;
typedef struct { unsigned version, count; unsigned long long since; Rate *list; } Rates;

Result cuIpcGetMemHandle(IpcHandle *, Pointer);
Result cuIpcOpenMemHandle_v2(Pointer *, IpcHandle, unsigned);
Result cuIpcCloseMemHandle(Pointer);
Result cuDeviceGetUuid_v2(Uuid *, int);
Result cuDeviceGetName(char *, int, int);
Result cuDeviceGetDevResource(int, Resource *, unsigned);
Result cuDevResourceGenerateDesc(Handle *, Resource *, unsigned);
Result cuGreenCtxCreate(Handle *, Handle, int, unsigned);
Result cuGreenCtxStreamCreate(Handle *, Handle, unsigned, int);
Result cuGreenCtxDestroy(Handle);
Result cuCtxFromGreenCtx(Handle *, Handle);

static void queues(const char *name, int count);

static long long free_now(void) {
    size_t free_bytes, total;
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    return (long long)free_bytes;
}

static const size_t MIB = 1 << 20;

/* Memory of two devices, freed while the other is current. */
static void two(void) {
    Handle contexts[2];
    Pointer a, b;
    long long before[2];
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) {
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
        MUST(cuCtxSetCurrent(contexts[i]));
        before[i] = free_now();
    }
    MUST(cuCtxSetCurrent(contexts[0]));
    MUST(cuMemAlloc_v2(&a, 64 * MIB));
    MUST(cuCtxSetCurrent(contexts[1]));
    MUST(cuMemAlloc_v2(&b, 32 * MIB));
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            MUST(cuCtxSetCurrent(contexts[i]));
            printf("device %d: %lld bytes taken\n", i, before[i] - free_now());
        }
        if (!round) MUST(cuMemFree_v2(a)); /* device 1 is current */
    }
    for (int i = 0; i < 2; i++) {
        Handle f, stream;
        MUST(cuCtxSetCurrent(contexts[i]));
        f = kernel("spin_1ms");
        MUST(cuStreamCreate(&stream, 1));
        for (int n = 0; n < 30; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0));
        SHOW(cuCtxSynchronize());
    }
}

/* One device of several, named by its UUID: it is number 0 here. */
static void by_uuid(void) {
    Uuid uuid;
    int count;
    context_of_device_0();
    MUST(cuDeviceGetCount(&count));
    MUST(cuDeviceGetUuid_v2(&uuid, 0));
    Handle f = kernel("spin_1ms");
    for (int n = 0; n < 30; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
    show_taken("before");
    Pointer p;
    MUST(cuMemAlloc_v2(&p, 64 * MIB));
    show_taken("after");
    printf("%d device\n", count);
}

/* Prints the second device's UUID as CUDA_VISIBLE_DEVICES takes it. */
static void uuid_of_second(void) {
    Uuid u;
    MUST(cuInit(0));
    MUST(cuDeviceGetUuid_v2(&u, 1));
    printf("GPU-");
    for (int i = 0; i < 16; i++) printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u.bytes[i]);
    printf("\n");
}

/* A child opens its parent's 64 MiB, and can still have 64 MiB of its own under a limit of 96. */
static void ipc(void) {
    int down[2], up[2];
    char byte = 0;
    IpcHandle handle;
    Pointer p = 0, q = 0;
    if (pipe(down) || pipe(up)) _exit(9);
    pid_t child = fork();
    if (!child) {
        if (read(down[0], &handle, sizeof handle) != sizeof handle) _exit(8);
        context_of_device_0();
        printf("open: %d\n", cuIpcOpenMemHandle_v2(&p, handle, 1));
        printf("own: %d\n", cuMemAlloc_v2(&q, 64 * MIB));
        printf("free, close: %d %d\n", cuMemFree_v2(q), cuIpcCloseMemHandle(p));
        fflush(stdout);
        if (write(up[1], &byte, 1) != 1) _exit(7);
        _exit(0);
    }
    context_of_device_0();
    MUST(cuMemAlloc_v2(&p, 64 * MIB));
    MUST(cuIpcGetMemHandle(&handle, p));
    if (write(down[1], &handle, sizeof handle) != sizeof handle || read(up[0], &byte, 1) != 1) _exit(6);
    waitpid(child, 0, 0);
    printf("parent frees: %d\n", cuMemFree_v2(p));
}

/* Half of the SMs as a green context; its kernels are this process's like any. */
static void green(void) {
    Resource all;
    Handle description, context, stream, plain;
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    memset(&all, 0, sizeof all);
    if (cuDeviceGetDevResource(0, &all, 1)) { printf("no green contexts\n"); return; }
    MUST(cuDevResourceGenerateDesc(&description, &all, 1));
    MUST(cuGreenCtxCreate(&context, description, 0, 1));
    MUST(cuGreenCtxStreamCreate(&stream, context, 1, 0));
    MUST(cuStreamCreate(&plain, 1));
    for (int n = 0; n < 30; n++) {
        MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0));
        MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, plain, 0, 0));
    }
    SHOW(cuStreamSynchronize(stream));
    SHOW(cuStreamDestroy_v2(stream));
    SHOW(cuGreenCtxDestroy(context));
    for (int n = 0; n < 30; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, plain, 0, 0));
    SHOW(cuCtxSynchronize());
}

/* A green context as the current one, with kernels on its default stream that become longer; then it is gone. */
static void green_current(void) {
    Resource all;
    Handle description, green, context, primary = context_of_device_0();
    memset(&all, 0, sizeof all);
    if (cuDeviceGetDevResource(0, &all, 1)) { printf("no green contexts\n"); return; }
    MUST(cuDevResourceGenerateDesc(&description, &all, 1));
    MUST(cuGreenCtxCreate(&green, description, 0, 1));
    MUST(cuCtxFromGreenCtx(&context, green));
    MUST(cuCtxSetCurrent(context));
    Handle f = kernel("spin_ns");
    for (int n = 0; n < 3000; n++) {
        unsigned long long ns = n < 1000 ? 20000 : 150000;
        void *arguments[] = {&ns};
        MUST(cuLaunchKernel(f, 80, 1, 1, 64, 1, 1, 0, 0, arguments, 0));
    }
    SHOW(cuCtxSynchronize());
    MUST(cuCtxSetCurrent(primary));
    SHOW(cuGreenCtxDestroy(green));
    f = kernel("spin_1ms");
    for (int n = 0; n < 30; n++) MUST(cuLaunchKernel(f, 80, 1, 1, 64, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* The second device has only a green context; its work and memory do not count for the first device. */
static void green_second(void) {
    Resource all;
    Handle description, green, second, primary = context_of_device_0();
    Pointer p;
    Handle f = kernel("spin_1ms");
    MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    MUST(cuCtxSynchronize());
    memset(&all, 0, sizeof all);
    if (cuDeviceGetDevResource(1, &all, 1)) { printf("no green contexts\n"); return; }
    MUST(cuDevResourceGenerateDesc(&description, &all, 1));
    MUST(cuGreenCtxCreate(&green, description, 1, 1));
    MUST(cuCtxFromGreenCtx(&second, green));
    long long before = free_now();
    MUST(cuCtxSetCurrent(second));
    f = kernel("spin_1ms");
    MUST(cuMemAllocAsync(&p, 64 * MIB, 0));
    for (int n = 0; n < 30; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
    MUST(cuCtxSetCurrent(primary));
    printf("taken of the first: %lld MiB\n", (before - free_now()) / (long long)MIB);
    MUST(cuCtxSetCurrent(second));
    MUST(cuMemFreeAsync(p, 0));
    SHOW(cuCtxSynchronize());
    MUST(cuCtxSetCurrent(primary));
    SHOW(cuGreenCtxDestroy(green));
}

/* All views of one limit: the driver's, NVML's, and NVML's list of processes. */
static void views(void) {
    Pointer p;
    size_t free_bytes, total, device;
    context_of_device_0();
    MUST(cuMemAlloc_v2(&p, 64 * MIB));
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    MUST(cuDeviceTotalMem_v2(&device, 0));
    printf("driver: total %zu %zu used %zu\n", total / MIB, device / MIB, (total - free_bytes) / MIB);
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, Handle *) = (int (*)(unsigned, Handle *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*memory1)(Handle, Memory1 *) = (int (*)(Handle, Memory1 *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    int (*memory2)(Handle, Memory2 *) = (int (*)(Handle, Memory2 *))dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    int (*list)(Handle, unsigned *, Process *) =
        (int (*)(Handle, unsigned *, Process *))dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    Handle handle;
    Memory1 one;
    Memory2 two = {(2u << 24) | sizeof(Memory2), 0, 0, 0, 0};
    unsigned none = 0, count = 8;
    Process processes[8];
    MUST(init());
    MUST(by_index(0, &handle));
    MUST(memory1(handle, &one));
    MUST(memory2(handle, &two));
    printf("nvml: total %llu %llu used %llu %llu\n", one.total / MIB, two.total / MIB, one.used / MIB, two.used / MIB);
    Result asked = list(handle, &none, 0);
    printf("list: %d, %u\n", asked, none);
    MUST(list(handle, &count, processes));
    for (unsigned i = 0; i < count; i++)
        printf("process: mine %d used %llu\n", processes[i].pid == (unsigned)getpid(), processes[i].used / MIB);
}

/* The device's utilisation by this process and by a process outside the instance, as NVML reports it here. */
static void utilisation(void) {
    int ready[2], over[2];
    char byte = 0;
    if (pipe(ready) || pipe(over)) exit(3);
    pid_t other = fork();
    if (!other) {
        setenv("GSHARE_DISABLE", "1", 1);
        queues("spin_30ms", 4);
        exit(write(ready[1], &byte, 1) != 1 || read(over[0], &byte, 1) != 1);
    }
    queues("spin_30ms", 4);
    if (read(ready[0], &byte, 1) != 1) exit(3);
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, Handle *) = (int (*)(unsigned, Handle *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*sample)(Handle, Sample *, unsigned *, unsigned long long) =
        (int (*)(Handle, Sample *, unsigned *, unsigned long long))dlsym(nvml, "nvmlDeviceGetProcessUtilization");
    int (*rate)(Handle, Rates *) = (int (*)(Handle, Rates *))dlsym(nvml, "nvmlDeviceGetProcessesUtilizationInfo");
    Handle handle;
    Sample samples[8];
    Rate list[8];
    Rates rates = {(1u << 24) | sizeof(Rates), 8, 0, list};
    unsigned count = 8, own = getpid();
    MUST(init());
    MUST(by_index(0, &handle));
    MUST(sample(handle, samples, &count, 0));
    MUST(rate(handle, &rates));
    for (unsigned i = 0; i < count; i++) printf("sample: mine %d busy %d\n", samples[i].pid == own, samples[i].rates[0] > 0);
    for (unsigned i = 0; i < rates.count; i++) printf("rate: mine %d busy %d\n", list[i].pid == own, list[i].rates[0] > 0);
    /* Since the end of time no process has used it. */
    count = 8;
    printf("later: %d\n", sample(handle, samples, &count, ~0ull));
    if (write(over[1], &byte, 1) != 1) exit(3);
    waitpid(other, 0, 0);
}

/* The UUIDs of a GPU's MIG devices, as an operator lists them. */
static void mig_list(void) {
    Handle gpu, slice;
    char text[96];
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, Handle *) = (int (*)(unsigned, Handle *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*slice_by_index)(Handle, unsigned, Handle *) =
        (int (*)(Handle, unsigned, Handle *))dlsym(nvml, "nvmlDeviceGetMigDeviceHandleByIndex");
    int (*uuid)(Handle, char *, unsigned) = (int (*)(Handle, char *, unsigned))dlsym(nvml, "nvmlDeviceGetUUID");
    MUST(init());
    MUST(by_index(0, &gpu));
    for (unsigned i = 0; !slice_by_index(gpu, i, &slice); i++) {
        MUST(uuid(slice, text, sizeof text));
        printf("%s\n", text);
    }
}

/* A MIG device: alone, even if the list names more, with its own name and memory, and its UUID in NVML. */
static void mig(void) {
    Uuid uuid;
    Handle whole, slice;
    Memory1 memory;
    Pointer p;
    int count;
    size_t total;
    char name[96], text[96] = "MIG-";
    context_of_device_0();
    MUST(cuDeviceGetCount(&count));
    MUST(cuDeviceGetName(name, sizeof name, 0));
    MUST(cuDeviceTotalMem_v2(&total, 0));
    printf("%d device: %s, %zu MiB\n", count, name, total / MIB);
    MUST(cuDeviceGetUuid_v2(&uuid, 0));
    for (int i = 0; i < 16; i++)
        sprintf(text + strlen(text), "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid.bytes[i]);
    printf("%s\n", text);
    MUST(cuMemAlloc_v2(&p, 64 * MIB));
    printf("too much: %d\n", cuMemAlloc_v2(&p, total));
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_uuid)(const char *, Handle *) = (int (*)(const char *, Handle *))dlsym(nvml, "nvmlDeviceGetHandleByUUID");
    int (*gpu)(Handle, Handle *) = (int (*)(Handle, Handle *))dlsym(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle");
    int (*info)(Handle, Memory1 *) = (int (*)(Handle, Memory1 *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    MUST(init());
    MUST(by_uuid(text, &slice));
    MUST(gpu(slice, &whole));
    MUST(info(slice, &memory));
    printf("nvml: %llu MiB of the slice", memory.total / MIB);
    MUST(info(whole, &memory));
    printf(", %llu MiB of the GPU\n", memory.total / MIB);
    Handle f = kernel("spin_1ms");
    for (int n = 0; n < 50; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
}

/* Launches, with the result of each. */
static void launches(void) {
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (int n = 0; n < 3; n++) SHOW(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
}

/* Waits for each kernel, which is longer than a token. */
static void waits(void) {
    context_of_device_0();
    Handle f = kernel("spin_30ms");
    for (int n = 0; n < 20; n++) {
        MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
        MUST(cuCtxSynchronize());
    }
}

/* A number of kernels of a kind, one behind the other, and waits for all of them. */
static void queues(const char *name, int count) {
    context_of_device_0();
    Handle f = kernel(name);
    for (int n = 0; n < count; n++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    MUST(cuCtxSynchronize());
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    if (!strcmp(kind, "two")) two();
    else if (!strcmp(kind, "by_uuid")) by_uuid();
    else if (!strcmp(kind, "uuid_of_second")) uuid_of_second();
    else if (!strcmp(kind, "ipc")) ipc();
    else if (!strcmp(kind, "green")) green();
    else if (!strcmp(kind, "green_current")) green_current();
    else if (!strcmp(kind, "green_second")) green_second();
    else if (!strcmp(kind, "views")) views();
    else if (!strcmp(kind, "utilisation")) utilisation();
    else if (!strcmp(kind, "mig")) mig();
    else if (!strcmp(kind, "mig_list")) mig_list();
    else if (!strcmp(kind, "launches")) launches();
    else if (!strcmp(kind, "waits")) waits();
    else if (!strcmp(kind, "queues")) queues(argv[2], atoi(argv[3]));
    else return 2;
    return 0;
}
