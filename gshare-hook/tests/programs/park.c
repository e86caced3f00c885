/* A program whose memory is moved while it runs.
   KIND FOLDER: waits for files in the folder, and makes others, between its steps.
   random FOLDER: threads allocate, write, copy, launch, capture and look, and compare all bytes (SEED, THREADS, OPERATIONS; LARGEST in MiB). */
#include "driver.h"
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define MIB (1ull << 20)
#define CHUNK (256ull << 10)
#define BLOCKS 6
#define ONE 1, 1, 1, 32, 1, 1, 0

Result cuLaunchHostFunc(Handle, void (*)(void *), void *);
Result cuMemsetD8Async(Pointer, unsigned char, size_t, Handle);
Result cuMemcpyDtoHAsync_v2(void *, Pointer, size_t, Handle);
Result cuMemcpyHtoDAsync_v2(Pointer, const void *, size_t, Handle);
Result cuMemGetAddressRange_v2(Pointer *, size_t *, Pointer);
Result cuPointerGetAttribute(void *, int, Pointer);
Result cuMemSetAccess(Pointer, size_t, const void *, size_t);
Result cuMemcpyDtoA_v2(Handle, size_t, Pointer, size_t);
Result cuMemcpyAtoD_v2(Pointer, Handle, size_t, size_t);
Result cuMemPoolGetAttribute(Handle, int, void *);
Result cuMemPoolSetAttribute(Handle, int, void *);
Result cuMemGetAllocationPropertiesFromHandle(MemoryProps *, unsigned long long);

static Handle context, pool;
static long operations;
static size_t largest;
static pthread_barrier_t all_did;
static const PoolProps POOL = {1, 0, {1, 0}, 0, {0}};
static const MemoryProps PROPS = {1, 0, {1, 0}, 0, {0}};
static const struct { Location at; int flags; } ACCESS = {{1, 0}, 3};

/* Maps new physical memory at an address. */
static unsigned long long map_at(Pointer at, size_t bytes) {
    unsigned long long physical;
    MUST(cuMemCreate(&physical, bytes, &PROPS, 0));
    MUST(cuMemMap(at, bytes, 0, physical, 0));
    return physical;
}

static unsigned next(unsigned long long *state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(*state >> 33);
}

/* An allocation, and the byte that each chunk of it holds. */
enum { PLAIN, MAPPED, POOLED };
typedef struct { Pointer at; size_t bytes, chunks; unsigned char *holds; unsigned long long physical; int kind; } Block;

static void allocate(Block *block, unsigned long long *state, Handle stream) {
    unsigned size = next(state), kind = next(state) % 8;
    block->bytes = size % 3 ? MIB + (size_t)size * 7919 % largest : 1 + size % MIB;
    block->kind = kind < 3 ? PLAIN : kind == 3 && block->bytes >= 2 * MIB ? MAPPED : POOLED;
    if (block->kind == MAPPED) block->bytes = block->bytes / (2 * MIB) * (2 * MIB);
    block->chunks = (block->bytes + CHUNK - 1) / CHUNK;
    block->holds = calloc(block->chunks, 1);
    if (block->kind == PLAIN)
        MUST(cuMemAlloc_v2(&block->at, block->bytes));
    else if (block->kind == POOLED && kind < 6)
        MUST(cuMemAllocAsync(&block->at, block->bytes, stream));
    else if (block->kind == POOLED)
        MUST(cuMemAllocFromPoolAsync(&block->at, block->bytes, pool, stream));
    else {
        MUST(cuMemAddressReserve(&block->at, block->bytes, 0, 0, 0));
        block->physical = map_at(block->at, block->bytes);
        MUST(cuMemSetAccess(block->at, block->bytes, &ACCESS, 1));
    }
    MUST(cuMemsetD8Async(block->at, 0, block->bytes, stream));
}

static void release(Block *block, unsigned long long *state, Handle stream) {
    if (block->kind == MAPPED) {
        MUST(cuCtxSynchronize());
        MUST(cuMemUnmap(block->at, block->bytes));
        MUST(cuMemRelease(block->physical));
        MUST(cuMemAddressFree(block->at, block->bytes));
    } else if (next(state) % 4 < (block->kind == POOLED ? 3 : 1))
        MUST(cuMemFreeAsync(block->at, stream));
    else
        MUST(cuMemFree_v2(block->at));
    free(block->holds);
    block->at = 0;
}

static void compare(Block *block, size_t chunk, Handle stream, int thread) {
    static __thread unsigned char *seen;
    size_t length = block->bytes - chunk * CHUNK < CHUNK ? block->bytes - chunk * CHUNK : CHUNK;
    if (!seen) seen = malloc(CHUNK);
    MUST(cuMemcpyDtoHAsync_v2(seen, block->at + chunk * CHUNK, length, stream));
    MUST(cuStreamSynchronize(stream));
    for (size_t i = 0; i < length; i++)
        if (seen[i] != block->holds[chunk]) {
            printf("thread %d: byte %zu of chunk %zu of %zu is %d and not %d\n", thread, i, chunk, block->bytes, seen[i],
                block->holds[chunk]);
            fflush(stdout);
            _exit(3);
        }
}

static void pauses(void *us) { usleep((unsigned)(size_t)us); }

/* Has a graph write a byte to a chunk, by memory of its own. */
static void write_by_graph(Pointer at, unsigned char value, Handle stream, unsigned us) {
    Handle graph, exec;
    Pointer own;
    MUST(cuStreamBeginCapture_v2(stream, 1));
    MUST(cuMemAllocAsync(&own, 3 * MIB, stream));
    MUST(cuMemsetD8Async(own, value, CHUNK, stream));
    MUST(cuMemcpyDtoDAsync_v2(at, own, CHUNK, stream));
    MUST(cuMemFreeAsync(own, stream));
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    usleep(us);
    MUST(cuGraphLaunch(exec, stream));
    MUST(cuGraphLaunch(exec, stream));
    MUST(cuStreamSynchronize(stream));
    MUST(cuGraphExecDestroy(exec));
    MUST(cuGraphDestroy(graph));
}

/* Sends a chunk through the memory of a pool which is destroyed before its memory is free. */
static void send_through_pool(Pointer at, unsigned long long *state, Handle stream) {
    Handle brief;
    Pointer middle;
    MUST(cuMemPoolCreate(&brief, &POOL));
    MUST(cuMemAllocFromPoolAsync(&middle, MIB + next(state) % (4 * MIB), brief, stream));
    MUST(cuMemcpyDtoDAsync_v2(middle, at, CHUNK, stream));
    MUST(cuMemsetD8Async(at, 255, CHUNK, stream));
    unsigned early = next(state) % 2;
    if (early) MUST(cuMemPoolDestroy(brief));
    MUST(cuMemcpyDtoDAsync_v2(at, middle, CHUNK, stream));
    MUST(cuMemFreeAsync(middle, stream));
    if (!early) MUST(cuMemPoolDestroy(brief));
}

static void *work(void *argument) {
    unsigned long long state = (unsigned long long)(size_t)argument;
    int thread = (int)state & 15;
    Handle stream, own = 0, use, brief, array;
    Block blocks[BLOCKS] = {{0}};
    ArrayDesc row = {CHUNK, 0, 1, 1};
    unsigned most = largest > 64 * MIB ? 2 : BLOCKS;
    /* Every third thread has a context of its own. */
    if (thread % 3 == 2) MUST(cuCtxCreate_v2(&own, 0, 0));
    else MUST(cuCtxSetCurrent(context));
    use = kernel("use_200us");
    brief = kernel("use_3us");
    MUST(cuStreamCreate(&stream, thread & 1));
    MUST(cuArrayCreate_v2(&array, &row));
    for (long i = 0; i < operations; i++) {
        Block *block = &blocks[next(&state) % most], *other = &blocks[next(&state) % most];
        if (!block->at) {
            allocate(block, &state, stream);
            continue;
        }
        size_t chunk = next(&state) % block->chunks, from;
        size_t whole = block->bytes / CHUNK;
        void *arguments[] = {&block->at};
        switch (next(&state) % 20) {
        case 0: {
            Pointer base;
            size_t length;
            MUST(cuMemGetAddressRange_v2(&base, &length, block->at + block->bytes / 2));
            if (base != block->at || length != block->bytes) printf("another range\n"), _exit(4);
            /* A free waits for the device, here for a copy behind a function of the host. */
            from = other->at ? next(&state) % other->chunks : 0;
            if (other->at && other != block && chunk < whole && from < other->bytes / CHUNK) {
                MUST(cuLaunchHostFunc(stream, pauses, (void *)(size_t)(1000 + next(&state) % 2000)));
                MUST(cuMemcpyDtoDAsync_v2(other->at + from * CHUNK, block->at + chunk * CHUNK, CHUNK, stream));
                other->holds[from] = block->holds[chunk];
            }
            release(block, &state, stream);
            break;
        }
        case 1: case 2: case 3:
            if (chunk < whole) {
                block->holds[chunk] = (unsigned char)next(&state);
                MUST(cuMemsetD8Async(block->at + chunk * CHUNK, block->holds[chunk], CHUNK, stream));
            }
            break;
        case 4: case 5:
            if (other->at && chunk < whole && (from = next(&state) % other->chunks) < other->bytes / CHUNK
                && (other != block || from != chunk)) {
                MUST(cuMemcpyDtoDAsync_v2(block->at + chunk * CHUNK, other->at + from * CHUNK, CHUNK, stream));
                block->holds[chunk] = other->holds[from];
            }
            break;
        case 6: case 7:
            MUST(cuLaunchKernel(use, ONE, stream, arguments, 0));
            break;
        case 8: case 9:
            /* Short launches are paid for ahead of time. */
            for (int j = 0; j < 200; j++) MUST(cuLaunchKernel(brief, ONE, stream, arguments, 0));
            break;
        case 10: case 11: case 12:
            compare(block, chunk, stream, thread);
            break;
        case 13:
            MUST(cuStreamSynchronize(stream));
            usleep(next(&state) % 4000);
            break;
        case 14: {
            int kind = 0;
            MUST(cuPointerGetAttribute(&kind, 2, block->at));
            if (kind != 2) printf("another kind of memory: %d\n", kind), _exit(5);
            break;
        }
        case 15:
            if (chunk < whole) send_through_pool(block->at + chunk * CHUNK, &state, stream);
            break;
        case 16:
            /* A capture would refuse the others to synchronise their context. */
            if (own && chunk < whole) {
                block->holds[chunk] = (unsigned char)next(&state);
                write_by_graph(block->at + chunk * CHUNK, block->holds[chunk], stream, next(&state) % 2000);
            }
            break;
        case 17:
            /* The array keeps a chunk while the block has other bytes. */
            if (chunk < whole) {
                MUST(cuStreamSynchronize(stream));
                MUST(cuMemcpyDtoA_v2(array, 0, block->at + chunk * CHUNK, CHUNK));
                MUST(cuMemsetD8Async(block->at + chunk * CHUNK, 254, CHUNK, stream));
                MUST(cuStreamSynchronize(stream));
                usleep(next(&state) % 4000);
                MUST(cuMemcpyAtoD_v2(block->at + chunk * CHUNK, array, 0, CHUNK));
            }
            break;
        default:
            MUST(cuCtxSynchronize());
        }
    }
    MUST(cuStreamSynchronize(stream));
    pthread_barrier_wait(&all_did);
    pthread_barrier_wait(&all_did);
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at) {
            for (size_t chunk = 0; chunk < blocks[i].chunks; chunk++) compare(&blocks[i], chunk, stream, thread);
            /* A context takes its memory with it, but no pool's. */
            if (!own || blocks[i].kind != PLAIN) release(&blocks[i], &state, stream);
        }
    if (!own) MUST(cuArrayDestroy(array));
    if (own) MUST(cuCtxDestroy_v2(own));
    return 0;
}

static const char *folder;

static void make(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    fclose(fopen(path, "w"));
}

static void await(const char *name) {
    char path[512];
    struct stat found;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    while (stat(path, &found)) usleep(1000);
}

static long number(const char *name) { return atol(getenv(name)); }

static int random_work(void) {
    unsigned long long seed = (unsigned long long)number("SEED"), keep = ~0ull;
    int count = (int)number("THREADS");
    size_t unused;
    pthread_t threads[16];
    operations = number("OPERATIONS");
    largest = (size_t)number("LARGEST") * MIB;
    MUST(cuMemPoolCreate(&pool, &POOL));
    /* This pool keeps its memory, and the default pool gives it up at each synchronising call. */
    MUST(cuMemPoolSetAttribute(pool, 4, &keep));
    pthread_barrier_init(&all_did, 0, (unsigned)count + 1);
    make("ready");
    for (int i = 0; i < count; i++) pthread_create(&threads[i], 0, work, (void *)(size_t)(seed << 8 | (unsigned)i));
    pthread_barrier_wait(&all_did);
    MUST(cuMemGetInfo_v2(&unused, &unused));
    make("done");
    await("end");
    pthread_barrier_wait(&all_did);
    for (int i = 0; i < count; i++) pthread_join(threads[i], 0);
    printf("all bytes are equal\n");
    return 0;
}

static void fill(Pointer at, size_t bytes, unsigned char value) {
    MUST(cuMemsetD8_v2(at, value, bytes));
    MUST(cuCtxSynchronize());
}

static void look(const char *what, Pointer at, size_t bytes, unsigned char value) {
    unsigned char *seen = malloc(bytes);
    Result result = cuMemcpyDtoH_v2(seen, at, bytes);
    size_t i = 0;
    while (!result && i < bytes && seen[i] == value) i++;
    printf("%s: %d, %s\n", what, result, i == bytes ? "equal" : "different");
    free(seen);
}

/* Leaves room for so many more bytes in the process's address space. */
static void limit_addresses(size_t bytes) {
    unsigned long pages = 0;
    struct rlimit limit;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu", &pages) != 1) _exit(6);
    fclose(file);
    MUST(getrlimit(RLIMIT_AS, &limit));
    limit.rlim_cur = pages * 4096 + bytes;
    MUST(setrlimit(RLIMIT_AS, &limit));
}

/* Memory of the device as the program sees it, in MiB, by both libraries. */
static void show_figures(const char *when) {
    typedef struct { unsigned long long total, free, used; } Memory;
    Memory memory;
    Handle device;
    size_t free_bytes, total;
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*by_index)(unsigned, Handle *) = (int (*)(unsigned, Handle *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(Handle, Memory *) = (int (*)(Handle, Memory *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    MUST(init());
    MUST(by_index(0, &device));
    MUST(info(device, &memory));
    printf("%s: %llu of %llu free; %llu of %llu free, %llu used\n", when, free_bytes / MIB, total / MIB, memory.free / MIB,
        memory.total / MIB, memory.used / MIB);
}

static void waits(void *name) { await(name); }

static void show_pool(const char *when, Handle pool) {
    unsigned long long used = 0, reserved = 0, most_used = 0, most_reserved = 0;
    MUST(cuMemPoolGetAttribute(pool, 7, &used));
    MUST(cuMemPoolGetAttribute(pool, 8, &most_used));
    MUST(cuMemPoolGetAttribute(pool, 5, &reserved));
    MUST(cuMemPoolGetAttribute(pool, 6, &most_reserved));
    printf("%s: %llu of %llu bytes, at most %llu of %llu\n", when, used, reserved, most_used, most_reserved);
}

/* A default stream has freed memory again before its work is over. */
static void take_again(const char *name, Handle stream) {
    Pointer first, again;
    MUST(cuMemAllocAsync(&first, 4 * MIB, stream));
    MUST(cuLaunchHostFunc(stream, waits, (void *)name));
    MUST(cuMemFreeAsync(first, stream));
    MUST(cuMemAllocAsync(&again, 4 * MIB, stream));
    printf("the %s stream: %s memory\n", name, again == first ? "the same" : "other");
    MUST(cuMemFreeAsync(again, stream));
    make(name);
    MUST(cuStreamSynchronize(stream));
}

/* Large allocations of pools, in use and free. */
static void use_pools(Handle stream) {
    Pointer first, second, third, small;
    Handle other;
    unsigned long long threshold = 64 * MIB, none = 0;
    MUST(cuStreamCreate(&other, 1));
    MUST(cuMemPoolCreate(&pool, &POOL));
    MUST(cuMemAllocAsync(&first, 6 * MIB, stream));
    MUST(cuMemAllocFromPoolAsync(&second, 9 * MIB + 7, pool, stream));
    MUST(cuStreamSynchronize(stream));
    fill(first, 6 * MIB, 3);
    fill(second, 9 * MIB + 7, 4);
    show_pool("in use", pool);
    make("ready");
    await("go");
    look("first", first, 6 * MIB, 3);
    look("second", second, 9 * MIB + 7, 4);
    make("looked");
    await("on");
    /* Only this stream gets the memory before its work is over. */
    MUST(cuLaunchHostFunc(stream, waits, "over"));
    SHOW(cuMemFreeAsync(second, stream));
    show_pool("freed", pool);
    SHOW(cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, other));
    printf("another stream: %s memory\n", third == second ? "the same" : "other");
    SHOW(cuMemFreeAsync(third, other));
    SHOW(cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, stream));
    printf("the same stream: %s memory\n", third == second ? "the same" : "other");
    SHOW(cuMemFreeAsync(third, stream));
    SHOW(cuMemFreeAsync(third, stream));
    make("over");
    MUST(cuCtxSynchronize());
    take_again("legacy", 0);
    take_again("thread's", (Handle)2);
    show_pool("synchronised", pool);
    MUST(cuMemPoolSetAttribute(pool, 4, &threshold));
    MUST(cuMemPoolSetAttribute(pool, 6, &none));
    MUST(cuMemPoolSetAttribute(pool, 8, &none));
    MUST(cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, stream));
    MUST(cuMemAllocFromPoolAsync(&small, MIB, pool, stream));
    show_pool("with small", pool);
    MUST(cuMemFreeAsync(small, stream));
    MUST(cuMemFreeAsync(third, stream));
    MUST(cuCtxSynchronize());
    show_pool("below the threshold", pool);
    make("spare");
    await("parked");
    show_pool("after parking", pool);
    MUST(cuMemAllocFromPoolAsync(&third, 9 * MIB, pool, stream));
    MUST(cuMemFreeAsync(third, stream));
    MUST(cuStreamSynchronize(stream));
    SHOW(cuMemPoolTrimTo(pool, 0));
    show_pool("trimmed", pool);
    /* Free memory of a pool is there for others, also while a stream uses it still. */
    MUST(cuMemAllocFromPoolAsync(&third, 300 * MIB, pool, stream));
    MUST(cuMemsetD8Async(third, 1, MIB, stream));
    MUST(cuMemFreeAsync(third, stream));
    SHOW(cuMemAlloc_v2(&second, 400 * MIB));
    SHOW(cuMemFreeAsync(second, stream));
    MUST(cuMemAllocFromPoolAsync(&second, 4 * MIB, pool, stream));
    MUST(cuStreamSynchronize(stream));
    SHOW(cuMemPoolDestroy(pool));
    fill(second, 4 * MIB, 8);
    look("without a pool", second, 4 * MIB, 8);
    SHOW(cuMemFree_v2(first));
    SHOW(cuMemFreeAsync(second, stream));
    MUST(cuStreamSynchronize(stream));
    make("gone");
    await("end");
}

int main(int argc, char **argv) {
    const char *kind = argv[1];
    Pointer big, small, others[4];
    Handle stream, f, graph;
    setvbuf(stdout, 0, _IOLBF, 0);
    context = context_of_device_0();
    folder = argv[2];
    if (!strcmp(kind, "random")) return random_work();
    MUST(cuStreamCreate(&stream, 1));
    f = kernel("use_1ms");
    if (!strcmp(kind, "figures")) show_figures("first");
    if (!strcmp(kind, "unused")) {
        MUST(cuMemAllocAsync(&big, 8 * MIB, stream));
        make("ready");
        await("go");
        fill(big, 8 * MIB, 6);
        look("big", big, 8 * MIB, 6);
        return 0;
    }
    if (!strcmp(kind, "pooled")) {
        SHOW(cuMemAllocAsync(&big, MIB, stream));
        return 0;
    }
    if (!strcmp(kind, "refused")) {
        SHOW(cuMemAlloc_v2(&big, 26 * MIB));
        SHOW(cuMemAlloc_v2(&big, 16 * MIB));
        return 0;
    }
    MUST(cuMemAlloc_v2(&big, 24 * MIB + 5));
    MUST(cuMemAlloc_v2(&small, MIB));
    fill(big, 24 * MIB + 5, 7);
    fill(small, MIB, 9);
    void *arguments[] = {&big};
    MUST(cuLaunchKernel(f, ONE, stream, arguments, 0));
    MUST(cuStreamSynchronize(stream));
    if (!strcmp(kind, "hold") || !strcmp(kind, "launch")) {
        make("ready");
        await("go");
        /* Synchronising needs no memory. */
        SHOW(cuCtxSynchronize());
        make("synchronised");
        await("on");
        if (!strcmp(kind, "launch")) SHOW(cuLaunchKernel(f, ONE, stream, arguments, 0));
        SHOW(cuStreamSynchronize(stream));
        look("big", big, 24 * MIB + 5, 7);
        look("small", small, MIB, 9);
        make("looked");
        await("end");
        SHOW(cuMemFree_v2(big));
    } else if (!strcmp(kind, "query")) {
        int memory = 0;
        make("ready");
        await("go");
        /* No launch asks for the memory, and the gate has nothing to say. */
        SHOW(cuPointerGetAttribute(&memory, 2, big));
        look("big", big, 24 * MIB + 5, 7);
    } else if (!strcmp(kind, "allocate")) {
        make("ready");
        await("go");
        /* Both happen while the other memory is away. */
        for (int i = 0; i < 4; i++) SHOW(cuMemAlloc_v2(&others[i], 4 * MIB));
        SHOW(cuMemFree_v2(others[3]));
        SHOW(cuMemFree_v2(big));
        make("done");
        await("on");
        fill(others[0], 4 * MIB, 3);
        look("other", others[0], 4 * MIB, 3);
    } else if (!strcmp(kind, "capture")) {
        MUST(cuStreamBeginCapture_v2(stream, 0));
        make("ready");
        await("go");
        SHOW(cuLaunchKernel(f, ONE, stream, arguments, 0));
        /* A block may be freed meanwhile. */
        SHOW(cuStreamEndCapture(stream, &graph));
        make("done");
        await("on");
        look("big", big, 24 * MIB + 5, 7);
    } else if (!strcmp(kind, "stuck")) {
        /* The stream waits for a step of the program, which a launch must precede. */
        MUST(cuLaunchHostFunc(stream, waits, "go"));
        make("ready");
        await("parking");
        SHOW(cuLaunchKernel(f, ONE, 0, arguments, 0));
        make("go");
        SHOW(cuCtxSynchronize());
        look("big", big, 24 * MIB + 5, 7);
    } else if (!strcmp(kind, "fork")) {
        make("ready");
        await("go");
        pid_t child = fork();
        if (!child) {
            Pointer mine;
            /* No driver is there for a child, and its parent's memory is not its own. */
            printf("child: %d\n", cuMemAlloc_v2(&mine, 4 * MIB));
            fflush(stdout);
            _exit(0);
        }
        waitpid(child, 0, 0);
        look("big", big, 24 * MIB + 5, 7);
    } else if (!strcmp(kind, "exit") || !strcmp(kind, "destroy")) {
        make("ready");
        await("go");
        if (!strcmp(kind, "destroy")) {
            SHOW(cuDevicePrimaryCtxReset_v2(0));
            make("done");
            await("on");
        }
    } else if (!strcmp(kind, "figures")) {
        show_figures("here");
        make("ready");
        await("go");
        show_figures("away");
        MUST(cuLaunchKernel(f, ONE, stream, arguments, 0));
        show_figures("back");
    } else if (!strcmp(kind, "pools")) {
        MUST(cuMemFree_v2(big));
        use_pools(stream);
    } else if (!strcmp(kind, "others")) {
        /* Memory that stays: small and of a pool, mapped twice by the program, managed. */
        Pointer range;
        unsigned long long physical;
        MUST(cuMemFree_v2(big));
        for (int i = 0; i < 4; i++) MUST(cuMemAllocAsync(&others[i], MIB, stream));
        MUST(cuMemAddressReserve(&range, 128 * MIB, 0, 0, 0));
        physical = map_at(range, 64 * MIB);
        MUST(cuMemMap(range + 64 * MIB, 64 * MIB, 0, physical, 0));
        MUST(cuMemSetAccess(range, 128 * MIB, &ACCESS, 1));
        fill(range, 64 * MIB, 5);
        make("ready");
        await("go");
        look("range", range + 64 * MIB, 64 * MIB, 5);
    } else if (!strcmp(kind, "segments") || !strcmp(kind, "poor")) {
        /* Memory in segments that the program maps one behind the other, as PyTorch does. */
        struct rlimit before;
        Pointer range, moved;
        unsigned long long first, second, again;
        MemoryProps props = {0};
        int descriptor = -1;
        MUST(cuMemFree_v2(big));
        MUST(cuMemAddressReserve(&range, 64 * MIB, 0, 0, 0));
        MUST(cuMemAddressReserve(&moved, 16 * MIB, 0, 0, 0));
        first = map_at(range, 16 * MIB);
        second = map_at(range + 16 * MIB, 16 * MIB);
        MUST(cuMemSetAccess(range, 32 * MIB, &ACCESS, 1));
        /* The mapping alone holds the second segment. */
        MUST(cuMemRelease(second));
        fill(range, 32 * MIB, 5);
        MUST(getrlimit(RLIMIT_AS, &before));
        if (!strcmp(kind, "poor")) limit_addresses(28 * MIB);
        make("ready");
        await("go");
        MUST(setrlimit(RLIMIT_AS, &before));
        look("segments", range, 32 * MIB, 5);
        make("looked");
        await("on");
        SHOW(cuMemAddressFree(range, 64 * MIB));
        SHOW(cuMemUnmap(range, 16 * MIB));
        SHOW(cuMemMap(moved, 16 * MIB, 0, first, 0));
        SHOW(cuMemSetAccess(moved, 16 * MIB, &ACCESS, 1));
        look("moved", moved, 16 * MIB, 5);
        SHOW(cuMemGetAllocationPropertiesFromHandle(&props, first));
        SHOW(cuMemRetainAllocationHandle(&again, (void *)(moved + MIB)));
        printf("type %d, %s\n", props.type, again == first ? "the same handle" : "another handle");
        SHOW(cuMemRelease(again));
        SHOW(cuMemExportToShareableHandle(&descriptor, first, 1, 0));
        SHOW(cuMemRelease(first));
        SHOW(cuMemUnmap(moved, 16 * MIB));
        SHOW(cuMemRelease(first));
        make("unmapped");
        await("end");
        look("second", range + 16 * MIB, 16 * MIB, 5);
    }
    return 0;
}
