/* The driver's interface for the test programs: exported names, linked directly. */
#ifndef DRIVER_H
#define DRIVER_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int Result;
typedef void *Handle;
typedef unsigned long long Pointer;
typedef struct { unsigned type; int id; } Location;
typedef struct { unsigned grid[3], block[3], shared; Handle stream; void *attributes; unsigned count; } Config;
typedef struct { Handle function; unsigned grid[3], block[3], shared; Handle stream; void **params; } MultiLaunch;
typedef struct { size_t width, height; unsigned format, channels; } ArrayDesc;
typedef struct { size_t width, height, depth; unsigned format, channels, flags; } Array3Desc;
typedef struct { unsigned type, handles; Location location; void *security; unsigned char rest[64]; } PoolProps;
typedef struct { unsigned type, handles; Location location; void *meta; unsigned char flags[8]; } MemoryProps;
typedef struct { PoolProps pool; void *access; size_t accesses, bytes; Pointer address; } AllocNode;
typedef struct { Handle function; unsigned grid[3], block[3], shared; void **params, **extra; Handle kernel, context; } KernelNode;

#define STREAM_ARGS Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **
Result cuInit(unsigned);
Result cuDriverGetVersion(int *);
Result cuDeviceGet(int *, int);
Result cuDeviceGetCount(int *);
Result cuDeviceTotalMem_v2(size_t *, int);
Result cuDevicePrimaryCtxRetain(Handle *, int);
Result cuDevicePrimaryCtxRelease_v2(int);
Result cuDevicePrimaryCtxReset_v2(int);
Result cuCtxCreate_v2(Handle *, unsigned, int);
Result cuCtxDestroy_v2(Handle);
Result cuCtxDetach(Handle);
Result cuCtxSetCurrent(Handle);
Result cuCtxGetCurrent(Handle *);
Result cuCtxSynchronize(void);
Result cuModuleLoadData(Handle *, const void *);
Result cuModuleGetFunction(Handle *, Handle, const char *);
Result cuLaunchKernel(STREAM_ARGS, void **);
Result cuLaunchKernel_ptsz(STREAM_ARGS, void **);
Result cuLaunchKernelEx(const Config *, Handle, void **, void **);
Result cuLaunchKernelEx_ptsz(const Config *, Handle, void **, void **);
Result cuLaunchCooperativeKernel(STREAM_ARGS);
Result cuLaunchCooperativeKernel_ptsz(STREAM_ARGS);
Result cuLaunchCooperativeKernelMultiDevice(MultiLaunch *, unsigned, unsigned);
Result cuLaunch(Handle);
Result cuLaunchGrid(Handle, int, int);
Result cuLaunchGridAsync(Handle, int, int, Handle);
Result cuFuncSetBlockShape(Handle, int, int, int);
Result cuStreamCreate(Handle *, unsigned);
Result cuStreamDestroy_v2(Handle);
Result cuStreamSynchronize(Handle);
Result cuStreamSynchronize_ptsz(Handle);
Result cuStreamQuery(Handle);
Result cuStreamBeginCapture_v2(Handle, unsigned);
Result cuStreamEndCapture(Handle, Handle *);
Result cuStreamIsCapturing(Handle, unsigned *);
Result cuGraphCreate(Handle *, unsigned);
Result cuGraphAddKernelNode_v2(Handle *, Handle, const Handle *, size_t, const KernelNode *);
Result cuGraphAddMemAllocNode(Handle *, Handle, const Handle *, size_t, AllocNode *);
Result cuGraphAddMemFreeNode(Handle *, Handle, const Handle *, size_t, Pointer);
Result cuGraphInstantiateWithFlags(Handle *, Handle, unsigned long long);
Result cuGraphLaunch(Handle, Handle);
Result cuGraphLaunch_ptsz(Handle, Handle);
Result cuGraphExecDestroy(Handle);
Result cuGraphDestroy(Handle);
Result cuDeviceGraphMemTrim(int);
Result cuEventCreate(Handle *, unsigned);
Result cuEventRecord(Handle, Handle);
Result cuEventQuery(Handle);
Result cuEventSynchronize(Handle);
Result cuEventElapsedTime(float *, Handle, Handle);
Result cuMemGetInfo_v2(size_t *, size_t *);
Result cuMemAlloc_v2(Pointer *, size_t);
Result cuMemAllocPitch_v2(Pointer *, size_t *, size_t, size_t, unsigned);
Result cuMemAllocManaged(Pointer *, size_t, unsigned);
Result cuMemFree_v2(Pointer);
Result cuMemAllocAsync(Pointer *, size_t, Handle);
Result cuMemAllocAsync_ptsz(Pointer *, size_t, Handle);
Result cuMemFreeAsync(Pointer, Handle);
Result cuMemFreeAsync_ptsz(Pointer, Handle);
Result cuMemAllocFromPoolAsync(Pointer *, size_t, Handle, Handle);
Result cuMemPoolCreate(Handle *, const PoolProps *);
Result cuMemPoolDestroy(Handle);
Result cuMemPoolTrimTo(Handle, size_t);
Result cuMemCreate(unsigned long long *, size_t, const MemoryProps *, unsigned long long);
Result cuMemRelease(unsigned long long);
Result cuMemExportToShareableHandle(void *, unsigned long long, unsigned, unsigned long long);
Result cuMemImportFromShareableHandle(unsigned long long *, void *, unsigned);
Result cuMemRetainAllocationHandle(unsigned long long *, void *);
Result cuMemAddressReserve(Pointer *, size_t, size_t, Pointer, unsigned long long);
Result cuMemAddressFree(Pointer, size_t);
Result cuMemMap(Pointer, size_t, size_t, unsigned long long, unsigned long long);
Result cuMemUnmap(Pointer, size_t);
Result cuArrayCreate_v2(Handle *, const ArrayDesc *);
Result cuArray3DCreate_v2(Handle *, const Array3Desc *);
Result cuArrayDestroy(Handle);
Result cuMipmappedArrayCreate(Handle *, const Array3Desc *, unsigned);
Result cuMipmappedArrayDestroy(Handle);
Result cuMemAllocHost_v2(void **, size_t);
Result cuMemFreeHost(void *);
Result cuMemcpyHtoD_v2(Pointer, const void *, size_t);
Result cuMemcpyDtoH_v2(void *, Pointer, size_t);
Result cuMemcpyAsync(Pointer, Pointer, size_t, Handle);
Result cuMemcpyDtoDAsync_v2(Pointer, Pointer, size_t, Handle);
Result cuMemsetD8_v2(Pointer, unsigned char, size_t);
Result cuMemsetD32Async(Pointer, unsigned, size_t, Handle);
Result cuGetProcAddress_v2(const char *, void **, int, uint64_t, unsigned *);
Result cuGetProcAddress(const char *, void **, int, uint64_t);

/* Prints a call with its result, so that a bare and a hooked run can be compared. */
#define SHOW(call) (printf("%s = %d\n", #call, (call)))
/* A call which must succeed. */
#define MUST(call)                                           \
    do {                                                     \
        Result result_ = (call);                             \
        if (result_) {                                       \
            printf("%s failed: %d\n", #call, result_);       \
            fflush(stdout);                                  \
            _exit(1);                                        \
        }                                                    \
    } while (0)

static Handle context_of_device_0(void) {
    Handle context;
    int device;
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    return context;
}

/* A kernel of this name; the simulated device takes its duration from it. */
static Handle kernel(const char *name) {
    char text[512];
    Handle module, function;
    snprintf(text, sizeof text, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s()\n{\nret;\n}\n", name);
    MUST(cuModuleLoadData(&module, text));
    MUST(cuModuleGetFunction(&function, module, name));
    return function;
}

/* Device memory taken since the first call, as the program sees it. */
static void show_taken(const char *when) {
    static size_t first;
    size_t free_bytes = 0, total = 0;
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    if (!first) first = free_bytes;
    printf("%s: %lld bytes taken\n", when, (long long)first - (long long)free_bytes);
}
#endif
