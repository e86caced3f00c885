/* A driver which interrupts a call in the middle: preloaded behind the hook, it calls the program. It reuses
   names of physical memory and of executable graphs at once, frees a pool's last allocation at the reset of a primary context, reports
   unrecordable events, and lacks cuStreamGetDevice. */
#include "driver.h"

Result cuThreadExchangeStreamCaptureMode(unsigned *);

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static struct { unsigned long long real; int references; Pointer at; } physical[8];

static void happens(const char *what) {
    void (*between)(const char *) = (void (*)(const char *))dlsym(RTLD_DEFAULT, "between");
    if (between) between(what);
}

Result cuMemCreate(unsigned long long *out, size_t bytes, const MemoryProps *props, unsigned long long flags) {
    int n = 0;
    while (physical[n].references) n++;
    Result result = NEXT(cuMemCreate)(&physical[n].real, bytes, props, flags);
    physical[n].references = !result;
    *out = n + 1;
    return result;
}

Result cuMemRelease(unsigned long long name) {
    physical[name - 1].references--;
    return NEXT(cuMemRelease)(physical[name - 1].real);
}

Result cuMemMap(Pointer at, size_t bytes, size_t offset, unsigned long long name, unsigned long long flags) {
    physical[name - 1].references++;
    physical[name - 1].at = at;
    return NEXT(cuMemMap)(at, bytes, offset, physical[name - 1].real, flags);
}

Result cuMemUnmap(Pointer at, size_t bytes) {
    Result result = NEXT(cuMemUnmap)(at, bytes);
    for (int n = 0; n < 8; n++)
        if (physical[n].references && physical[n].at == at) physical[n].references -= !result;
    happens("unmapped");
    return result;
}

Result cuMemPoolTrimTo(Handle pool, size_t keep) {
    unsigned mode = 2;
    happens("trimming");
    Result result = NEXT(cuMemPoolTrimTo)(pool, keep);
    MUST(cuThreadExchangeStreamCaptureMode(&mode));
    printf("trimmed: %d, in capture mode %u\n", result, mode);
    MUST(cuThreadExchangeStreamCaptureMode(&mode));
    return result;
}

static struct { Pointer address; Handle stream; } pooled;

Result cuMemAllocAsync(Pointer *out, size_t bytes, Handle stream) {
    happens("allocating");
    Result result = NEXT(cuMemAllocAsync)(out, bytes, stream);
    pooled.address = *out;
    pooled.stream = stream;
    return result;
}

Result cuDevicePrimaryCtxReset_v2(int device) {
    MUST(NEXT(cuMemFreeAsync)(pooled.address, pooled.stream));
    return NEXT(cuDevicePrimaryCtxReset_v2)(device);
}

Result cuEventQuery(Handle event) {
    happens("looking");
    return NEXT(cuEventQuery)(event);
}

Result cuEventRecord(Handle event, Handle stream) {
    Result result = NEXT(cuEventRecord)(event, stream);
    if (result) printf("an event cannot be recorded: %d\n", result);
    return result;
}

static Handle executable;

Result cuGraphInstantiateWithFlags(Handle *out, Handle graph, unsigned long long flags) {
    *out = &executable;
    return NEXT(cuGraphInstantiateWithFlags)(&executable, graph, flags);
}

Result cuGraphLaunch(Handle name, Handle stream) {
    return NEXT(cuGraphLaunch)(*(Handle *)name, stream);
}

Result cuGraphExecDestroy(Handle name) {
    return NEXT(cuGraphExecDestroy)(*(Handle *)name);
}

Result cuStreamGetDevice(Handle stream, int *device) {
    (void)stream, (void)device;
    return 801;
}
