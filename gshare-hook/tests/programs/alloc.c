/* One kind of device memory: taken, looked at, freed, and refused beyond the limit. */
#include "driver.h"

#define MIB (1 << 20)

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "plain";
    Handle context = context_of_device_0(), stream, array, pool;
    Pointer p = 0, q = 0;
    size_t pitch = 0;
    MUST(cuStreamCreate(&stream, 1));
    show_taken("start");
    if (!strcmp(kind, "plain")) {
        SHOW(cuMemAlloc_v2(&p, 3 * MIB + 1));
        SHOW(cuMemAlloc_v2(&q, 5));
        show_taken("held");
        SHOW(cuMemFree_v2(p));
        SHOW(cuMemFree_v2(q));
        SHOW(cuMemFree_v2(q));
        SHOW(cuMemFree_v2(0));
        SHOW(cuMemAlloc_v2(&p, 0));
        SHOW(cuMemAlloc_v2(0, MIB));
    } else if (!strcmp(kind, "pitch")) {
        SHOW(cuMemAllocPitch_v2(&p, &pitch, 1000, 300, 4));
        printf("pitch %zu\n", pitch);
        show_taken("held");
        SHOW(cuMemFree_v2(p));
    } else if (!strcmp(kind, "managed")) {
        SHOW(cuMemAllocManaged(&p, 4 * MIB, 1));
        SHOW(cuMemFree_v2(p));
    } else if (!strcmp(kind, "host")) {
        void *host = 0;
        SHOW(cuMemAllocHost_v2(&host, 64 * MIB));
        show_taken("held");
        SHOW(cuMemFreeHost(host));
    } else if (!strcmp(kind, "async")) {
        SHOW(cuMemAllocAsync(&p, 4 * MIB, stream));
        SHOW(cuMemAllocAsync_ptsz(&q, 4 * MIB, 0));
        SHOW(cuStreamSynchronize(stream));
        SHOW(cuMemFreeAsync(p, stream));
        SHOW(cuMemFreeAsync_ptsz(q, 0));
        SHOW(cuCtxSynchronize());
    } else if (!strcmp(kind, "async_plain_free")) {
        SHOW(cuMemAllocAsync(&p, 4 * MIB, stream));
        SHOW(cuStreamSynchronize(stream));
        SHOW(cuMemFree_v2(p));
    } else if (!strcmp(kind, "pool")) {
        PoolProps props = {1, 0, {1, 0}, 0, {0}};
        SHOW(cuMemPoolCreate(&pool, &props));
        SHOW(cuMemAllocFromPoolAsync(&p, 4 * MIB, pool, stream));
        SHOW(cuStreamSynchronize(stream));
        SHOW(cuMemFreeAsync(p, stream));
        SHOW(cuStreamSynchronize(stream));
        SHOW(cuMemPoolTrimTo(pool, 0));
        SHOW(cuMemPoolDestroy(pool));
    } else if (!strcmp(kind, "physical")) {
        MemoryProps props = {1, 0, {1, 0}, 0, {0}};
        unsigned long long handle = 0, again = 0;
        SHOW(cuMemCreate(&handle, 4 * MIB, &props, 0));
        show_taken("created");
        SHOW(cuMemAddressReserve(&p, 4 * MIB, 0, 0, 0));
        SHOW(cuMemMap(p, 4 * MIB, 0, handle, 0));
        SHOW(cuMemRetainAllocationHandle(&again, (void *)p));
        printf("same handle: %d\n", handle == again);
        SHOW(cuMemRelease(handle));
        show_taken("released once");
        SHOW(cuMemRelease(again));
        show_taken("mapped only");
        SHOW(cuMemUnmap(p, 4 * MIB));
        show_taken("unmapped");
        SHOW(cuMemAddressFree(p, 4 * MIB));
    } else if (!strcmp(kind, "exported")) {
        MemoryProps props = {1, 1, {1, 0}, 0, {0}};
        unsigned long long handle = 0, again = 0;
        int file = -1;
        SHOW(cuMemCreate(&handle, 4 * MIB, &props, 0));
        MUST(cuMemExportToShareableHandle(&file, handle, 1, 0));
        MUST(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)file, 1));
        show_taken("held twice");
        SHOW(cuMemRelease(again));
        show_taken("held once");
        SHOW(cuMemRelease(handle));
        close(file);
    } else if (!strcmp(kind, "array")) {
        ArrayDesc desc = {1000, 500, 0x20, 4};
        SHOW(cuArrayCreate_v2(&array, &desc));
        show_taken("held");
        SHOW(cuArrayDestroy(array));
    } else if (!strcmp(kind, "array3d")) {
        Array3Desc desc = {100, 50, 20, 0x20, 1, 0};
        SHOW(cuArray3DCreate_v2(&array, &desc));
        show_taken("held");
        SHOW(cuArrayDestroy(array));
    } else if (!strcmp(kind, "mipmap")) {
        Array3Desc desc = {256, 256, 0, 0x20, 1, 0};
        SHOW(cuMipmappedArrayCreate(&array, &desc, 4));
        SHOW(cuMipmappedArrayDestroy(array));
    } else if (!strcmp(kind, "graph")) {
        Handle graph, exec, node, freed;
        AllocNode params = {{1, 0, {1, 0}, 0, {0}}, 0, 0, 4 * MIB, 0};
        SHOW(cuGraphCreate(&graph, 0));
        SHOW(cuGraphAddMemAllocNode(&node, graph, 0, 0, &params));
        SHOW(cuGraphAddMemFreeNode(&freed, graph, &node, 1, params.address));
        SHOW(cuGraphInstantiateWithFlags(&exec, graph, 0));
        SHOW(cuGraphLaunch(exec, stream));
        SHOW(cuStreamSynchronize(stream));
        SHOW(cuGraphExecDestroy(exec));
        SHOW(cuGraphDestroy(graph));
        SHOW(cuDeviceGraphMemTrim(0));
    } else if (!strcmp(kind, "context_takes_it_along")) {
        Handle second;
        SHOW(cuCtxCreate_v2(&second, 0, 0));
        SHOW(cuMemAlloc_v2(&p, 64 * MIB));
        SHOW(cuCtxDestroy_v2(second));
        SHOW(cuCtxSetCurrent(context));
    } else if (!strcmp(kind, "detached_context_takes_it_along")) {
        Handle second;
        SHOW(cuCtxCreate_v2(&second, 0, 0));
        SHOW(cuMemAlloc_v2(&p, 64 * MIB));
        SHOW(cuCtxDetach(second));
        SHOW(cuCtxSetCurrent(context));
    } else if (!strcmp(kind, "reset_takes_it_along")) {
        SHOW(cuMemAlloc_v2(&p, 64 * MIB));
        SHOW(cuDevicePrimaryCtxReset_v2(0));
        SHOW(cuCtxSetCurrent(0));
        MUST(cuDevicePrimaryCtxRetain(&context, 0));
        SHOW(cuCtxSetCurrent(context));
    } else if (!strcmp(kind, "many")) {
        static Pointer all[10000];
        int failed = 0;
        for (int i = 0; i < 10000; i++) failed += cuMemAlloc_v2(&all[i], 4096) != 0;
        show_taken("held");
        for (int i = 0; i < 10000; i++) failed += cuMemFree_v2(all[i]) != 0;
        printf("%d failed\n", failed);
    } else {
        return 2;
    }
    show_taken("end");
    return 0;
}
