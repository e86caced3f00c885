/* One kind of launch, 60 times 2 ms of kernels, then a synchronise. */
#include "driver.h"

#define ONE 80, 1, 1, 64, 1, 1, 0

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "kernel";
    int times = argc > 2 ? atoi(argv[2]) : 60;
    context_of_device_0();
    Handle f = kernel("spin_2ms"), varying = kernel("spin_ns"), stream = 0, graph, exec = 0, streams[3] = {0};
    Pointer memory = 0, other = 0;
    Config config = {{80, 1, 1}, {64, 1, 1}, 0, 0, 0, 0};
    MultiLaunch multi = {f, {80, 1, 1}, {64, 1, 1}, 0, 0, 0};
    MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 3; i++) MUST(cuStreamCreate(&streams[i], 1));
    multi.stream = stream;
    if (strstr(kind, "graph")) {
        KernelNode node = {f, {80, 1, 1}, {64, 1, 1}, 0, 0, 0, 0, 0};
        Handle added;
        MUST(cuGraphCreate(&graph, 0));
        MUST(cuGraphAddKernelNode_v2(&added, graph, 0, 0, &node));
        MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    }
    if (!strcmp(kind, "captured")) {
        unsigned status = 9;
        MUST(cuStreamBeginCapture_v2(stream, 0));
        for (int i = 0; i < 5; i++) SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuStreamIsCapturing(stream, &status));
        printf("capturing: %u\n", status);
        MUST(cuStreamEndCapture(stream, &graph));
        MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
        times /= 5;
    }
    if (strstr(kind, "mem")) {
        MUST(cuMemAlloc_v2(&memory, 8 << 20));
        MUST(cuMemAlloc_v2(&other, 8 << 20));
    }
    if (!strncmp(kind, "old", 3)) SHOW(cuFuncSetBlockShape(f, 64, 1, 1));
    Result sum = 0;
    for (int i = 0; i < times; i++) {
        Result r = 0;
        if (!strcmp(kind, "kernel")) r = cuLaunchKernel(f, ONE, stream, 0, 0);
        else if (!strcmp(kind, "default_stream")) r = cuLaunchKernel(f, ONE, 0, 0, 0);
        else if (!strcmp(kind, "kernel_ptsz")) r = cuLaunchKernel_ptsz(f, ONE, 0, 0, 0);
        else if (!strcmp(kind, "per_thread_handle")) r = cuLaunchKernel(f, ONE, (Handle)2, 0, 0);
        else if (!strcmp(kind, "ex")) r = cuLaunchKernelEx(&config, f, 0, 0);
        else if (!strcmp(kind, "ex_ptsz")) r = cuLaunchKernelEx_ptsz(&config, f, 0, 0);
        else if (!strcmp(kind, "cooperative")) r = cuLaunchCooperativeKernel(f, ONE, stream, 0);
        else if (!strcmp(kind, "cooperative_ptsz")) r = cuLaunchCooperativeKernel_ptsz(f, ONE, 0, 0);
        else if (!strcmp(kind, "multi_device")) r = cuLaunchCooperativeKernelMultiDevice(&multi, 1, 0);
        else if (!strcmp(kind, "graph")) r = cuGraphLaunch(exec, stream);
        else if (!strcmp(kind, "graph_ptsz")) r = cuGraphLaunch_ptsz(exec, 0);
        else if (!strcmp(kind, "captured")) r = cuGraphLaunch(exec, stream);
        else if (!strcmp(kind, "old")) r = cuLaunch(f);
        else if (!strcmp(kind, "old_grid")) r = cuLaunchGrid(f, 80, 1);
        else if (!strcmp(kind, "old_grid_async")) r = cuLaunchGridAsync(f, 80, 1, stream);
        else if (!strcmp(kind, "streams")) r = cuLaunchKernel(f, ONE, streams[i % 3], 0, 0);
        else if (!strcmp(kind, "memcpy")) r = cuMemcpyDtoDAsync_v2(memory, other, 8 << 20, stream);
        else if (!strcmp(kind, "memset")) r = cuMemsetD32Async(memory, 1, 2 << 20, stream);
        else if (!strcmp(kind, "sync_each")) {
            r = cuLaunchKernel(f, ONE, stream, 0, 0);
            r |= cuStreamSynchronize(stream);
        } else if (!strcmp(kind, "sync_longer")) {
            /* One function of one size, first of 20 us, then of 4 ms. */
            unsigned long long ns = i < times / 2 ? 20000 : 4000000;
            void *arguments[] = {&ns};
            for (int j = 0; j < (i < times / 2 ? 50 : 1); j++) {
                r |= cuLaunchKernel(varying, ONE, stream, arguments, 0);
                r |= cuStreamSynchronize(stream);
            }
        } else if (!strcmp(kind, "sync_turns")) {
            /* One function of one size, of 20 us and of 2 ms in turns. */
            unsigned long long ns = i % 2 ? 2000000 : 20000;
            void *arguments[] = {&ns};
            r |= cuLaunchKernel(varying, ONE, stream, arguments, 0);
            r |= cuStreamSynchronize(stream);
        } else if (!strcmp(kind, "refused")) r = cuLaunchKernel(f, 0, 0, 0, 0, 0, 0, 0, stream, 0, 0);
        else return 2;
        sum += r;
    }
    printf("%s: results add up to %d\n", kind, sum);
    SHOW(cuCtxSynchronize());
    usleep(60000); /* idle long enough for the meter to close its account */
    if (exec) SHOW(cuGraphExecDestroy(exec));
    SHOW(cuStreamDestroy_v2(stream));
    return 0;
}
