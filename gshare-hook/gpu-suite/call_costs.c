/*
 * Prints the cost of calls of the driver to an unmodified program, as one line of JSON: the median CPU time in ns of
 * launching an empty kernel, launching a graph of one such kernel, recording an event, starting a copy, and allocating and
 * freeing 1 MiB and 1 GiB. With the argument `device` also the device's own time: an empty kernel, one more block on every SM,
 * an empty copy (ns), and copies of a quarter GiB (bytes per second).
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry zero() { ret; }\n";

enum { BATCHES = 41, CALLS = 1000, PAIRS = 10, NODES = 1001, SMALL = 4096, LARGE = 256 << 20 };

typedef void *handle;
typedef unsigned long long pointer;

static int (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **);
static int (*graph_launch)(handle, handle);
static int (*event_record)(handle, handle);
static int (*event_synchronize)(handle);
static int (*event_elapsed)(float *, handle, handle);
static int (*copy_down)(pointer, const void *, size_t, handle);
static int (*copy_up)(void *, pointer, size_t, handle);
static int (*copy_within)(pointer, pointer, size_t, handle);
static int (*allocate)(pointer *, size_t);
static int (*release)(pointer);
static int (*synchronize)(void);
static int (*begin_capture)(handle, int);
static int (*end_capture)(handle, handle *);
static int (*instantiate)(handle *, handle, unsigned long long);

static handle driver, kernel, stream, single, chain, copies, marks[2];
static pointer memory[2];
static void *host;

static void get(void *function, const char *name) {
    void *address = dlsym(driver, name);
    if (!address) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    memcpy(function, &address, sizeof address);
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

static void one_kernel(void) { check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel"); }
static void one_graph(void) { check(graph_launch(single, stream), "cuGraphLaunch"); }
static void one_event(void) { check(event_record(marks[0], stream), "cuEventRecord"); }
static void one_copy(void) { check(copy_down(memory[0], host, SMALL, stream), "cuMemcpyHtoDAsync"); }

static void pair_of(size_t bytes) {
    pointer made;
    check(allocate(&made, bytes), "cuMemAlloc");
    check(release(made), "cuMemFree");
}

static void small_pair(void) { pair_of(1 << 20); }
static void large_pair(void) { pair_of(1 << 30); }

/* Median time of a call on the CPU in ns. Little is left in the stream between two batches, so that no call waits for room. */
static double call_ns(void (*call)(void), int calls) {
    double ns[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < calls; i++)
            call();
        clock_gettime(CLOCK_MONOTONIC, &end);
        check(synchronize(), "cuCtxSynchronize");
        ns[batch] = ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / calls;
    }
    qsort(ns, BATCHES, sizeof ns[0], by_value);
    return ns[BATCHES / 2];
}

static void one_small(void) { check(copy_within(memory[0], memory[1], SMALL, stream), "cuMemcpyDtoDAsync"); }
static void many_small(void) { check(graph_launch(copies, stream), "cuGraphLaunch"); }
static void one_chain(void) { check(graph_launch(chain, stream), "cuGraphLaunch"); }
static void many_blocks(void) { check(launch(kernel, 1 << 20, 1, 1, 1024, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel"); }
static void large_down(void) { check(copy_down(memory[0], host, LARGE, stream), "cuMemcpyHtoDAsync"); }
static void large_up(void) { check(copy_up(host, memory[0], LARGE, stream), "cuMemcpyDtoHAsync"); }
static void large_within(void) { check(copy_within(memory[0], memory[1], LARGE, stream), "cuMemcpyDtoDAsync"); }

/* Median device time in ns of a function's work, between two events. */
static double device_ns(void (*work)(void)) {
    double ns[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        float ms;
        check(event_record(marks[0], stream), "cuEventRecord");
        work();
        check(event_record(marks[1], stream), "cuEventRecord");
        check(event_synchronize(marks[1]), "cuEventSynchronize");
        check(event_elapsed(&ms, marks[0], marks[1]), "cuEventElapsedTime");
        ns[batch] = ms * 1e6;
    }
    qsort(ns, BATCHES, sizeof ns[0], by_value);
    return ns[BATCHES / 2];
}

/* A graph with many nodes of one call, each behind its predecessor. */
static handle graph_of(void (*call)(void), int nodes) {
    handle graph, executable;
    check(begin_capture(stream, 2), "cuStreamBeginCapture_v2");
    for (int i = 0; i < nodes; i++)
        call();
    check(end_capture(stream, &graph), "cuStreamEndCapture");
    check(instantiate(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    return executable;
}

int main(int count, char **arguments) {
    int (*init)(unsigned), (*retain)(handle *, int), (*set)(handle), (*load)(handle *, const void *);
    int (*function)(handle *, handle, const char *), (*stream_create)(handle *, unsigned), (*event_create)(handle *, unsigned);
    int (*allocate_host)(void **, size_t);
    handle context, module;
    int of_device = count > 1 && !strcmp(arguments[1], "device");
    size_t size = of_device ? LARGE : SMALL;
    if (!(driver = dlopen("libcuda.so.1", RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    get(&init, "cuInit");
    get(&retain, "cuDevicePrimaryCtxRetain");
    get(&set, "cuCtxSetCurrent");
    get(&load, "cuModuleLoadData");
    get(&function, "cuModuleGetFunction");
    get(&stream_create, "cuStreamCreate");
    get(&event_create, "cuEventCreate");
    get(&event_record, "cuEventRecord");
    get(&event_synchronize, "cuEventSynchronize");
    get(&event_elapsed, "cuEventElapsedTime");
    get(&allocate, "cuMemAlloc_v2");
    get(&release, "cuMemFree_v2");
    get(&allocate_host, "cuMemAllocHost_v2");
    get(&copy_down, "cuMemcpyHtoDAsync_v2");
    get(&copy_up, "cuMemcpyDtoHAsync_v2");
    get(&copy_within, "cuMemcpyDtoDAsync_v2");
    get(&launch, "cuLaunchKernel");
    get(&begin_capture, "cuStreamBeginCapture_v2");
    get(&end_capture, "cuStreamEndCapture");
    get(&instantiate, "cuGraphInstantiateWithFlags");
    get(&graph_launch, "cuGraphLaunch");
    get(&synchronize, "cuCtxSynchronize");
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(set(context), "cuCtxSetCurrent");
    check(load(&module, PTX), "cuModuleLoadData");
    check(function(&kernel, module, "zero"), "cuModuleGetFunction");
    check(stream_create(&stream, 1), "cuStreamCreate");
    for (int i = 0; i < 2; i++) {
        check(event_create(&marks[i], 0), "cuEventCreate");
        check(allocate(&memory[i], size), "cuMemAlloc_v2");
    }
    check(allocate_host(&host, size), "cuMemAllocHost_v2");
    memset(host, 1, size);
    single = graph_of(one_kernel, 1);
    chain = graph_of(one_kernel, NODES);
    copies = graph_of(one_small, NODES);
    one_kernel();
    one_copy();
    one_chain();
    many_small();
    check(synchronize(), "cuCtxSynchronize");

    double graph_ns = call_ns(one_graph, CALLS / 4);
    printf("suite: {\"launch_ns\": %.2f, \"graph_ns\": %.2f, \"graph_node_ns\": %.2f, \"event_ns\": %.2f, \"copy_ns\": %.2f",
           call_ns(one_kernel, CALLS), graph_ns, (call_ns(one_chain, 1) - graph_ns) / (NODES - 1), call_ns(one_event, CALLS),
           call_ns(one_copy, CALLS));
    printf(", \"small_ns\": %.1f, \"large_ns\": %.1f", call_ns(small_pair, PAIRS), call_ns(large_pair, PAIRS));
    if (of_device) {
        double in_chain = (device_ns(one_chain) - device_ns(one_graph)) / (NODES - 1);
        printf(", \"kernel_ns\": %.1f, \"block_ns\": %.3f, \"device_copy_ns\": %.1f", in_chain,
               device_ns(many_blocks) / (1 << 20), (device_ns(many_small) - device_ns(one_graph)) / NODES);
        printf(", \"down_bytes_per_s\": %.0f, \"up_bytes_per_s\": %.0f, \"within_bytes_per_s\": %.0f",
               LARGE / (device_ns(large_down) / 1e9), LARGE / (device_ns(large_up) / 1e9), LARGE / (device_ns(large_within) / 1e9));
    }
    printf("}\n");
    return 0;
}
