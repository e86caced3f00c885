/* Memory with a size or an owner other than the call's: pools which keep and fragment, graphs, heaps, arrays without memory, and
   calls of another thread meanwhile. */
#include "driver.h"

typedef struct { unsigned type; int reserved[3]; AllocNode node; char room[232 - sizeof(AllocNode)]; long long reserved2; } Node;

Result cuMemPoolGetAttribute(Handle, unsigned, void *);
Result cuMemPoolSetAttribute(Handle, unsigned, void *);
Result cuDeviceGetDefaultMemPool(Handle *, int);
Result cuMemGetDefaultMemPool(Handle *, Location *, unsigned);
Result cuGraphAddNode(Handle *, Handle, const Handle *, size_t, Node *);
Result cuGraphAddNode_v2(Handle *, Handle, const Handle *, const void *, size_t, Node *);
Result cuCtxSetLimit(unsigned, size_t);
Result cuCtxGetLimit(size_t *, unsigned);

#define MIB (1ull << 20)
static const PoolProps on_device[2] = {{1, 0, {1, 0}, 0, {0}}, {1, 0, {1, 1}, 0, {0}}};
static const MemoryProps plain = {1, 0, {1, 0}, 0, {0}};
static Handle contexts[2], streams[2], pool;
static Pointer addresses[16];

static void on(int device) { MUST(cuCtxSetCurrent(contexts[device])); }

/* Makes a context and a stream on each device. */
static void use(int devices) {
    MUST(cuInit(0));
    for (int i = devices; i-- > 0;) {
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
        on(i);
        MUST(cuStreamCreate(&streams[i], 1));
    }
}

static void show_both(const char *when) {
    static long long first[2];
    for (int i = 0; i < 2; i++) {
        size_t free_bytes, total;
        on(i);
        MUST(cuMemGetInfo_v2(&free_bytes, &total));
        if (!first[i]) first[i] = free_bytes;
        printf("%s: %lld bytes taken of device %d\n", when, first[i] - (long long)free_bytes, i);
    }
    on(0);
}

static void show_reserved(Handle of) {
    unsigned long long reserved = 0;
    MUST(cuMemPoolGetAttribute(of, 5, &reserved));
    printf("reserved %llu MiB\n", reserved / MIB);
}

/* A pool which keeps freed memory. */
static void make_pool(void) {
    unsigned long long all = ~0ull;
    MUST(cuMemPoolCreate(&pool, &on_device[0]));
    MUST(cuMemPoolSetAttribute(pool, 4, &all));
}

static Result from_pool(int n, size_t bytes) { return cuMemAllocFromPoolAsync(&addresses[n], bytes, pool, streams[0]); }
static Result free_to_pool(int n) { return cuMemFreeAsync(addresses[n], streams[0]); }

/* Under 256 MiB: the pool keeps 72 MiB in three pieces of 24. */
static void pieces(void) {
    use(1);
    make_pool();
    show_taken("start");
    for (int n = 0; n < 3; n++) {
        MUST(from_pool(3, 64 * MIB));
        MUST(free_to_pool(3));
        MUST(from_pool(n, 40 * MIB));
    }
    show_reserved(pool);
    printf("64 MiB: %d\n", from_pool(3, 64 * MIB));
    printf("48 MiB: %d\n", from_pool(4, 48 * MIB));
    printf("address: %llu\n", addresses[4]);
    show_reserved(pool);
    printf("20 MiB: %d\n", from_pool(4, 20 * MIB));
    show_taken("held");
    for (int n = 0; n < 5; n++) MUST(free_to_pool(n));
    MUST(cuMemPoolTrimTo(pool, 0));
    show_taken("freed");
}

/* Under 256 MiB: the pool's kept memory has no use, but can be given back. */
static void kept(void) {
    use(1);
    make_pool();
    MUST(from_pool(0, 100 * MIB));
    MUST(free_to_pool(0));
    printf("160 MiB: %d\n", from_pool(0, 160 * MIB));
    show_reserved(pool);
}

static void *churn(void *number) {
    unsigned seed = (unsigned)(uintptr_t)number;
    Pointer held[8] = {0};
    Handle stream;
    on(0);
    MUST(cuStreamCreate(&stream, 1));
    for (int n = 0; n < 400; n++) {
        Pointer *p = &held[rand_r(&seed) % 8];
        size_t bytes = (rand_r(&seed) % 16 + 1) * MIB;
        if (*p) {
            MUST(cuMemFreeAsync(*p, stream));
            *p = 0;
        } else if (n % 2 ? cuMemAllocAsync(p, bytes, stream) : cuMemAllocFromPoolAsync(p, bytes, pool, stream)) {
            *p = 0;
        }
    }
    for (int n = 0; n < 8; n++)
        if (held[n]) MUST(cuMemFreeAsync(held[n], stream));
    return 0;
}

/* Under 256 MiB: threads use two pools, with some refusals, and no byte stays charged. */
static void pool_threads(void) {
    pthread_t all[8];
    use(1);
    make_pool();
    show_taken("start");
    for (uintptr_t i = 0; i < 8; i++) pthread_create(&all[i], 0, churn, (void *)(i + 1));
    for (int i = 0; i < 8; i++) pthread_join(all[i], 0);
    MUST(cuMemPoolTrimTo(pool, 0));
    MUST(cuCtxSynchronize());
    show_taken("end");
    printf("256 MiB: %d\n", cuMemAlloc_v2(&addresses[0], 256 * MIB));
}

static void destroyed(void) {
    use(1);
    make_pool();
    show_taken("start");
    MUST(from_pool(0, 64 * MIB));
    MUST(from_pool(1, 32 * MIB));
    MUST(from_pool(2, 16 * MIB));
    MUST(free_to_pool(2));
    show_taken("held");
    SHOW(cuMemPoolDestroy(pool));
    show_taken("destroyed");
    SHOW(free_to_pool(0));
    show_taken("freed one");
    SHOW(cuMemFree_v2(addresses[1]));
    SHOW(cuMemFree_v2(addresses[1]));
    show_taken("freed all");
}

/* An executable graph with an allocation and a free on a device. */
static Handle graph_of(size_t bytes, int device, int variant) {
    Handle graph, exec, node, freed;
    Node general = {10, {0}, {on_device[device], 0, 0, bytes, 0}, {0}, 0};
    AllocNode own = general.node;
    MUST(cuGraphCreate(&graph, 0));
    if (variant == 0) MUST(cuGraphAddMemAllocNode(&node, graph, 0, 0, &own));
    if (variant == 1) MUST(cuGraphAddNode(&node, graph, 0, 0, &general));
    if (variant == 2) MUST(cuGraphAddNode_v2(&node, graph, 0, 0, 0, &general));
    MUST(cuGraphAddMemFreeNode(&freed, graph, &node, 1, variant ? general.node.address : own.address));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

/* Under 256 MiB. */
static void graph_beyond(void) {
    use(1);
    Handle exec = graph_of(300 * MIB, 0, 0);
    printf("graph: %d\n", cuGraphLaunch(exec, streams[0]));
    /* The daemon is not asked again at each of them. */
    for (int n = 0; n < 100; n++) MUST(cuGraphLaunch(exec, streams[0]));
    printf("1 MiB: %d\n", cuMemAlloc_v2(&addresses[0], MIB));
    MUST(cuStreamSynchronize(streams[0]));
    SHOW(cuDeviceGraphMemTrim(0));
    printf("256 MiB: %d\n", cuMemAlloc_v2(&addresses[0], 256 * MIB));
}

static void graph_nodes(int variant) {
    use(1);
    show_taken("start");
    MUST(cuGraphLaunch(graph_of(16 * MIB, 0, variant), streams[0]));
    MUST(cuStreamSynchronize(streams[0]));
    show_taken("launched");
    MUST(cuDeviceGraphMemTrim(0));
    show_taken("trimmed");
}

/* Under 256 MiB: device 0 is current when device 1's memory is taken and given back. */
static void graph_devices(void) {
    use(2);
    MUST(cuGraphLaunch(graph_of(200 * MIB, 1, 0), streams[0]));
    MUST(cuStreamSynchronize(streams[0]));
    on(1);
    printf("128 MiB: %d\n", cuMemAlloc_v2(&addresses[0], 128 * MIB));
    on(0);
    printf("128 MiB of device 0: %d\n", cuMemAlloc_v2(&addresses[0], 128 * MIB));
    MUST(cuDeviceGraphMemTrim(1));
    on(1);
    printf("256 MiB: %d\n", cuMemAlloc_v2(&addresses[0], 256 * MIB));
}

/* The stream's device decides, not the current one. */
static void stream_of_other(void) {
    use(2);
    show_both("start");
    MUST(cuMemAllocAsync(&addresses[0], 16 * MIB, streams[1]));
    show_both("held");
    MUST(cuMemFreeAsync(addresses[0], streams[1]));
    MUST(cuStreamSynchronize(streams[1]));
    show_both("freed");
}

/* Default pools, and pools from before the first context. */
static void pool_of_other(void) {
    Handle early;
    MUST(cuInit(0));
    MUST(cuMemPoolCreate(&early, &on_device[1]));
    use(2);
    show_both("start");
    MUST(cuDeviceGetDefaultMemPool(&pool, 1));
    MUST(from_pool(0, 16 * MIB));
    show_both("default pool");
    MUST(cuMemAllocFromPoolAsync(&addresses[1], 32 * MIB, early, streams[0]));
    show_both("early pool");
}

static void host_pools(void) {
    static const PoolProps on_host = {1, 0, {2, 0}, 0, {0}};
    Location host = {2, 0};
    Handle early;
    MUST(cuInit(0));
    MUST(cuMemPoolCreate(&early, &on_host));
    use(1);
    show_taken("start");
    MUST(cuMemGetDefaultMemPool(&pool, &host, 1));
    MUST(from_pool(0, 16 * MIB));
    MUST(cuMemAllocFromPoolAsync(&addresses[1], 32 * MIB, early, streams[0]));
    show_taken("held");
}

static void sparse(void) {
    Array3Desc desc = {4096, 4096, 0, 0x20, 4, 0x40}, deferred = {4096, 4096, 0, 0x20, 4, 0x80};
    Handle array, mipmap, third;
    use(1);
    show_taken("start");
    SHOW(cuArray3DCreate_v2(&array, &desc));
    SHOW(cuMipmappedArrayCreate(&mipmap, &desc, 4));
    SHOW(cuArray3DCreate_v2(&third, &deferred));
    show_taken("held");
    SHOW(cuArrayDestroy(array));
    SHOW(cuMipmappedArrayDestroy(mipmap));
    SHOW(cuArrayDestroy(third));
    show_taken("destroyed");
}

static void heap(void) {
    Handle second;
    use(1);
    MUST(cuCtxCreate_v2(&second, 0, 0));
    show_taken("start");
    SHOW(cuCtxSetLimit(2, 4 * MIB));
    SHOW(cuCtxSetLimit(0, 2048));
    show_taken("less than by default");
    SHOW(cuCtxSetLimit(2, 64 * MIB));
    show_taken("more");
    SHOW(cuCtxSetLimit(2, 32 * MIB));
    show_taken("less");
    SHOW(cuCtxSetLimit(99, 1024 * MIB));
    SHOW(cuCtxDestroy_v2(second));
    MUST(cuCtxSetCurrent(contexts[0]));
    MUST(cuCtxCreate_v2(&second, 0, 0));
    show_taken("destroyed and another made");
}

/* Under 256 MiB. */
static void heap_beyond(void) {
    size_t size;
    use(1);
    SHOW(cuCtxSetLimit(2, 128 * MIB));
    SHOW(cuCtxSetLimit(2, 512 * MIB));
    MUST(cuCtxGetLimit(&size, 2));
    printf("%zu MiB\n", size >> 20);
    printf("136 MiB: %d\n", cuMemAlloc_v2(&addresses[0], 136 * MIB));
    printf("1 MiB: %d\n", cuMemAlloc_v2(&addresses[1], MIB));
}

/* Under 256 MiB: the padding of a pitch exceeds the limit. */
static void pitch_beyond(void) {
    size_t pitch = 7;
    use(1);
    MUST(cuMemAlloc_v2(&addresses[0], 255 * MIB));
    printf("1000 times 1040: %d\n", cuMemAllocPitch_v2(&addresses[1], &pitch, 1000, 1040, 4));
    printf("address: %llu, pitch: %zu\n", addresses[1], pitch);
    printf("1 MiB: %d\n", cuMemAlloc_v2(&addresses[1], MIB));
}

/* ---- between: these run with a driver which calls back ---- */

static unsigned long long second_handle;
static int expecting;

static void *destroy_the_pool(void *unused) {
    (void)unused;
    MUST(cuMemPoolDestroy(pool));
    return 0;
}

static void *use_the_other_device(void *unused) {
    (void)unused;
    on(1);
    MUST(cuMemAllocAsync(&addresses[1], MIB, streams[1]));
    return 0;
}

/* Does something in another thread, and waits for it for some seconds. */
static void meanwhile(void *(*what)(void *), const char *name, int seconds) {
    static pthread_t thread;
    struct timespec until;
    pthread_create(&thread, 0, what, 0);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    printf("%s: %s\n", name, pthread_timedjoin_np(thread, 0, &until) ? "waits" : "done");
}

void between(const char *when) {
    if (!expecting) return;
    expecting = 0;
    if (!strcmp(when, "unmapped")) MUST(cuMemCreate(&second_handle, 64 * MIB, &plain, 0));
    if (!strcmp(when, "trimming")) meanwhile(destroy_the_pool, "destroys the pool", 1);
    if (!strcmp(when, "allocating")) meanwhile(use_the_other_device, "allocates on the other device", 10);
}

/* The name of physical memory goes to another thread during the call which ends it. */
static void name_again(void) {
    unsigned long long handle;
    use(1);
    show_taken("start");
    MUST(cuMemCreate(&handle, 64 * MIB, &plain, 0));
    MUST(cuMemAddressReserve(&addresses[0], 64 * MIB, 0, 0, 0));
    MUST(cuMemMap(addresses[0], 64 * MIB, 0, handle, 0));
    MUST(cuMemRelease(handle));
    expecting = 1;
    MUST(cuMemUnmap(addresses[0], 64 * MIB));
    printf("same name: %d\n", handle == second_handle);
    show_taken("another's");
    MUST(cuMemRelease(second_handle));
    show_taken("end");
}

/* A refused unmapping changes nothing. */
static void unmap_refused(void) {
    unsigned long long handle;
    use(1);
    show_taken("start");
    MUST(cuMemCreate(&handle, 32 * MIB, &plain, 0));
    MUST(cuMemAddressReserve(&addresses[0], 64 * MIB, 0, 0, 0));
    MUST(cuMemMap(addresses[0], 32 * MIB, 0, handle, 0));
    MUST(cuMemMap(addresses[0] + 32 * MIB, 32 * MIB, 0, handle, 0));
    MUST(cuMemRelease(handle));
    SHOW(cuMemUnmap(addresses[0], 128 * MIB));
    show_taken("refused");
    SHOW(cuMemUnmap(addresses[0], 32 * MIB));
    show_taken("one left");
    SHOW(cuMemUnmap(addresses[0] + 32 * MIB, 32 * MIB));
    show_taken("end");
}

/* Under 256 MiB. */
static void trim_and_destroy(void) {
    use(1);
    make_pool();
    MUST(from_pool(0, 192 * MIB));
    MUST(free_to_pool(0));
    expecting = 1;
    printf("128 MiB: %d\n", cuMemAlloc_v2(&addresses[1], 128 * MIB));
}

static void two_at_once(void) {
    use(2);
    expecting = 1;
    MUST(cuMemAllocAsync(&addresses[0], MIB, streams[0]));
}

/* A reset frees a pool's allocations, and their address is reused. */
static void address_again(void) {
    use(1);
    show_taken("start");
    MUST(cuMemAllocAsync(&addresses[0], 64 * MIB, streams[0]));
    MUST(cuDevicePrimaryCtxReset_v2(0));
    use(1);
    MUST(cuMemAlloc_v2(&addresses[1], 64 * MIB));
    printf("same address: %d\n", addresses[0] == addresses[1]);
    MUST(cuMemFree_v2(addresses[1]));
    MUST(cuCtxSynchronize());
    show_taken("end");
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    setvbuf(stdout, 0, _IONBF, 0);
    if (!strcmp(kind, "pieces")) pieces();
    else if (!strcmp(kind, "kept")) kept();
    else if (!strcmp(kind, "pool_threads")) pool_threads();
    else if (!strcmp(kind, "destroyed")) destroyed();
    else if (!strcmp(kind, "graph_beyond")) graph_beyond();
    else if (!strcmp(kind, "graph_node")) graph_nodes(1);
    else if (!strcmp(kind, "graph_node_v2")) graph_nodes(2);
    else if (!strcmp(kind, "graph_devices")) graph_devices();
    else if (!strcmp(kind, "stream_of_other")) stream_of_other();
    else if (!strcmp(kind, "pool_of_other")) pool_of_other();
    else if (!strcmp(kind, "host_pools")) host_pools();
    else if (!strcmp(kind, "sparse")) sparse();
    else if (!strcmp(kind, "heap")) heap();
    else if (!strcmp(kind, "heap_beyond")) heap_beyond();
    else if (!strcmp(kind, "pitch_beyond")) pitch_beyond();
    else if (!strcmp(kind, "name_again")) name_again();
    else if (!strcmp(kind, "unmap_refused")) unmap_refused();
    else if (!strcmp(kind, "address_again")) address_again();
    else if (!strcmp(kind, "trim_and_destroy")) trim_and_destroy();
    else if (!strcmp(kind, "two_at_once")) two_at_once();
    else return 2;
    return 0;
}
