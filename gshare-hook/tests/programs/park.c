/* A program whose memory is moved while it runs.
   random SEED THREADS OPERATIONS: threads allocate, write, copy, launch and look, and compare all bytes.
   KIND FOLDER: waits for files in the folder, and makes others, between its steps. */
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
Result cuMemGetAllocationPropertiesFromHandle(MemoryProps *, unsigned long long);

static Handle context;
static long operations;
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
typedef struct { Pointer at; size_t bytes, chunks; unsigned char *holds; unsigned long long physical; } Block;

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

static void release(Block *block) {
    if (!block->physical) {
        MUST(cuMemFree_v2(block->at));
        return;
    }
    MUST(cuCtxSynchronize());
    MUST(cuMemUnmap(block->at, block->bytes));
    MUST(cuMemRelease(block->physical));
    MUST(cuMemAddressFree(block->at, block->bytes));
    block->physical = 0;
}

static void pauses(void *us) { usleep((unsigned)(size_t)us); }

static void *work(void *argument) {
    unsigned long long state = (unsigned long long)(size_t)argument;
    int thread = (int)state & 15;
    Handle stream, own = 0, use, brief;
    Block blocks[BLOCKS] = {{0}};
    /* Every third thread has a context of its own. */
    if (thread % 3 == 2) MUST(cuCtxCreate_v2(&own, 0, 0));
    else MUST(cuCtxSetCurrent(context));
    use = kernel("use_200us");
    brief = kernel("use_3us");
    MUST(cuStreamCreate(&stream, thread & 1));
    for (long i = 0; i < operations; i++) {
        Block *block = &blocks[next(&state) % BLOCKS], *other = &blocks[next(&state) % BLOCKS];
        if (!block->at) {
            unsigned size = next(&state);
            block->bytes = size % 3 ? MIB + size % (5 * MIB) : 1 + size % MIB;
            block->chunks = (block->bytes + CHUNK - 1) / CHUNK;
            if (size % 5 || block->bytes < 2 * MIB)
                MUST(cuMemAlloc_v2(&block->at, block->bytes));
            else {
                /* The program maps it by itself. */
                block->bytes = block->bytes / (2 * MIB) * (2 * MIB);
                block->chunks = block->bytes / CHUNK;
                MUST(cuMemAddressReserve(&block->at, block->bytes, 0, 0, 0));
                block->physical = map_at(block->at, block->bytes);
                MUST(cuMemSetAccess(block->at, block->bytes, &ACCESS, 1));
            }
            block->holds = calloc(block->chunks, 1);
            MUST(cuMemsetD8Async(block->at, 0, block->bytes, stream));
            continue;
        }
        size_t chunk = next(&state) % block->chunks, from;
        size_t whole = block->bytes / CHUNK;
        void *arguments[] = {&block->at};
        switch (next(&state) % 16) {
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
            release(block);
            free(block->holds);
            block->at = 0;
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
        default:
            MUST(cuCtxSynchronize());
        }
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at) {
            for (size_t chunk = 0; chunk < blocks[i].chunks; chunk++) compare(&blocks[i], chunk, stream, thread);
            /* A context takes its memory with it. */
            if (!own) release(&blocks[i]);
        }
    if (own) MUST(cuCtxDestroy_v2(own));
    return 0;
}

static int random_work(unsigned long long seed, int count) {
    pthread_t threads[16];
    for (int i = 0; i < count; i++) pthread_create(&threads[i], 0, work, (void *)(size_t)(seed << 8 | (unsigned)i));
    for (int i = 0; i < count; i++) pthread_join(threads[i], 0);
    printf("all bytes are equal\n");
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

static void waits(void *unused) { await("go"); }

int main(int argc, char **argv) {
    const char *kind = argv[1];
    Pointer big, small, others[4];
    Handle stream, f, graph;
    setvbuf(stdout, 0, _IOLBF, 0);
    context = context_of_device_0();
    if (!strcmp(kind, "random")) {
        operations = atol(argv[4]);
        return random_work(strtoull(argv[2], 0, 10), atoi(argv[3]));
    }
    folder = argv[2];
    MUST(cuStreamCreate(&stream, 1));
    f = kernel("use_1ms");
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
        MUST(cuLaunchHostFunc(stream, waits, 0));
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
    } else if (!strcmp(kind, "others")) {
        /* Memory that stays: of a pool, mapped twice by the program, managed. */
        Pointer range;
        unsigned long long physical;
        MUST(cuMemFree_v2(big));
        MUST(cuMemAllocAsync(&others[0], 6 * MIB, stream));
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
