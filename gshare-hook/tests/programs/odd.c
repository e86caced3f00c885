/* Correct programs which a meter easily hangs, loses or stops measuring. */
#include "driver.h"
#include <signal.h>

#define ONE 80, 1, 1, 64, 1, 1, 0

Result cuStreamWaitValue32_v2(Handle, Pointer, unsigned, unsigned);
Result cuStreamWriteValue32_v2(Handle, Pointer, unsigned, unsigned);
Result cuStreamWaitValue32_v2_ptsz(Handle, Pointer, unsigned, unsigned);
Result cuStreamWriteValue32_v2_ptsz(Handle, Pointer, unsigned, unsigned);
Result cuLaunchHostFunc(Handle, void (*)(void *), void *);
Result cuLibraryLoadData(Handle *, const void *, void *, void *, unsigned, void *, void *, unsigned);
Result cuLibraryGetKernel(Handle *, Handle, const char *);
Result cuCtxPushCurrent_v2(Handle);
Result cuCtxPopCurrent_v2(Handle *);
Result cuStreamWaitEvent(Handle, Handle, unsigned);

static volatile int go;

static void until_told(void *unused) {
    (void)unused;
    while (!go) usleep(100);
}

/* Work on one stream waits for later work on another: for a word written at its end, or on the host. */
static void work_waits_for_work(int on_the_host) {
    Handle waits, other, long_one, short_one;
    void *word;
    context_of_device_0();
    long_one = kernel("spin_30ms");
    short_one = kernel("spin_1ms");
    MUST(cuStreamCreate(&waits, 1));
    MUST(cuStreamCreate(&other, 1));
    MUST(cuMemAllocHost_v2(&word, 4096));
    *(unsigned *)word = 0;
    for (int i = 0; i < 3; i++) {
        MUST(cuLaunchKernel(long_one, ONE, waits, 0, 0));
        MUST(cuStreamSynchronize(waits));
        MUST(cuLaunchKernel(short_one, ONE, other, 0, 0));
        MUST(cuStreamSynchronize(other));
    }
    if (on_the_host) MUST(cuLaunchHostFunc(waits, until_told, 0));
    else MUST(cuStreamWaitValue32_v2(waits, (Pointer)(uintptr_t)word, 1, 1));
    for (int i = 0; i < 2; i++) MUST(cuLaunchKernel(long_one, ONE, waits, 0, 0));
    MUST(cuLaunchKernel(short_one, ONE, other, 0, 0));
    if (on_the_host) {
        MUST(cuStreamSynchronize(other));
        go = 1;
    } else {
        MUST(cuStreamWriteValue32_v2(other, (Pointer)(uintptr_t)word, 1, 0));
    }
    SHOW(cuStreamSynchronize(other));
    SHOW(cuStreamSynchronize(waits));
}

static void spin(Handle f, unsigned long long ns) {
    void *arguments[] = {&ns};
    MUST(cuLaunchKernel(f, ONE, 0, arguments, 0));
}

/* The default streams of two contexts in turns with one kernel, first short and then long, without a wait. `how` selects the way
   in which the contexts take turns. */
static void takes_turns(const char *how) {
    static const char text[] =
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry spin_ns(.param .u64 p)\n{\nret;\n}\n";
    Handle contexts[2], library, f, before;
    int two_devices = !strcmp(how, "devices");
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) {
        if (two_devices) {
            MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
            MUST(cuCtxSetCurrent(contexts[i]));
        } else {
            MUST(cuCtxCreate_v2(&contexts[i], 0, 0));
        }
    }
    /* A library's kernel belongs to every context. */
    MUST(cuLibraryLoadData(&library, text, 0, 0, 0, 0, 0, 0));
    MUST(cuLibraryGetKernel(&f, library, "spin_ns"));
    for (int n = 0; n < 2200; n++) {
        for (int i = 0; i < 2; i++) {
            unsigned long long ns = n < 200 ? 20000 : 150000;
            if (!strcmp(how, "push")) {
                MUST(cuCtxSetCurrent(contexts[0]));
                if (i) MUST(cuCtxPushCurrent_v2(contexts[1]));
                spin(f, ns);
                if (i) MUST(cuCtxPopCurrent_v2(&before));
            } else {
                MUST(cuCtxSetCurrent(contexts[i]));
                spin(f, ns);
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        MUST(cuCtxSetCurrent(contexts[i]));
        SHOW(cuCtxSynchronize());
    }
    usleep(60000); /* idle long enough for the meter to close its account */
}

/* A thread leaves work without a wait, in the middle of short work with waits; another thread goes on. */
static Handle short_f, f, stream_of_one, stream_of_other;
static volatile int left_behind;

static void *leaves_work_behind(void *context) {
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < 2; i++) {
        MUST(cuLaunchKernel(f, ONE, stream_of_one, 0, 0));
        MUST(cuStreamSynchronize(stream_of_one));
    }
    for (int i = 0; i < 5; i++) {
        MUST(cuLaunchKernel(short_f, ONE, stream_of_one, 0, 0));
        MUST(cuStreamSynchronize(stream_of_one));
    }
    for (int i = 0; i < 3; i++) MUST(cuLaunchKernel(f, ONE, stream_of_one, 0, 0));
    left_behind = 1;
    for (;;) pause();
}

static void left(void) {
    Handle context = context_of_device_0();
    pthread_t thread;
    f = kernel("spin_2ms");
    short_f = kernel("spin_20us");
    MUST(cuStreamCreate(&stream_of_one, 1));
    MUST(cuStreamCreate(&stream_of_other, 1));
    pthread_create(&thread, 0, leaves_work_behind, context);
    while (!left_behind) usleep(1000);
    usleep(50000);
    for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, stream_of_other, 0, 0));
    SHOW(cuStreamSynchronize(stream_of_other));
    fflush(stdout);
    _exit(0);
}

static void spin_on(Handle f, Handle stream, unsigned long long ns) {
    void *arguments[] = {&ns};
    MUST(cuLaunchKernel(f, ONE, stream, arguments, 0));
}

static void *waits_for_each(void *context) {
    Handle stream;
    MUST(cuCtxSetCurrent(context));
    MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 5000; i++) {
        MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0));
        MUST(cuStreamSynchronize(stream));
    }
    return 0;
}

/* Narrow kernels of four threads, side by side, or wide ones, one after the other; each thread waits for each of its kernels. */
static void side_by_side(const char *name) {
    Handle context = context_of_device_0();
    pthread_t all[4];
    f = kernel(name);
    for (int i = 0; i < 4; i++) pthread_create(&all[i], 0, waits_for_each, context);
    for (int i = 0; i < 4; i++) pthread_join(all[i], 0);
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

static int launches_each;

static void *launches_only(void *context) {
    Handle stream;
    MUST(cuCtxSetCurrent(context));
    MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < launches_each; i++) MUST(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0));
    MUST(cuStreamSynchronize(stream));
    return 0;
}

/* Threads with a series of short kernels, each on a stream of its own. */
static void behind_calls(const char *name, int launches, int threads) {
    Handle context = context_of_device_0();
    pthread_t all[8];
    f = kernel(name);
    launches_each = launches;
    for (int i = 0; i < threads; i++) pthread_create(&all[i], 0, launches_only, context);
    for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* A stream is destroyed; on another stream kernels become forty times as long. */
static void longer_after_a_stream_is_gone(void) {
    Handle stays, goes;
    context_of_device_0();
    Handle f = kernel("spin_ns");
    MUST(cuStreamCreate(&stays, 1));
    for (int i = 0; i < 50; i++) spin_on(f, stays, 100000);
    MUST(cuStreamSynchronize(stays));
    MUST(cuStreamCreate(&goes, 1));
    MUST(cuStreamDestroy_v2(goes));
    for (int i = 0; i < 300; i++) spin_on(f, stays, 4000000);
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* Ten launches, then a wait; and the kernels become four hundred times as long. */
static void longer_in_a_loop(void) {
    context_of_device_0();
    Handle f = kernel("spin_ns"), stream;
    MUST(cuStreamCreate(&stream, 1));
    for (int n = 0; n < 60; n++) {
        for (int i = 0; i < 10; i++) {
            spin_on(f, stream, n < 10 ? 10000 : 4000000);
            usleep(5);
        }
        MUST(cuStreamSynchronize(stream));
    }
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* A short kernel now and then, without a wait. */
static void now_and_then(void) {
    context_of_device_0();
    Handle f = kernel("spin_100us"), stream;
    MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 200; i++) {
        MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
        usleep(8000);
    }
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* One kernel on the second device, and then work on the first alone. */
static void one_of_two(void) {
    Handle contexts[2], functions[2];
    MUST(cuInit(0));
    for (int i = 1; i >= 0; i--) {
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
        MUST(cuCtxSetCurrent(contexts[i]));
        functions[i] = kernel("spin_1ms");
        MUST(cuLaunchKernel(functions[i], ONE, 0, 0, 0));
        MUST(cuCtxSynchronize());
    }
    for (int i = 0; i < 1000; i++) MUST(cuLaunchKernel(functions[0], ONE, 0, 0, 0));
    SHOW(cuCtxSynchronize());
}

/* Contexts of two devices are made before any launch or allocation. */
static void made_before(void) {
    Handle contexts[2], functions[2];
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) {
        MUST(cuCtxCreate_v2(&contexts[i], 0, i));
        functions[i] = kernel("spin_1ms");
    }
    for (int i = 0; i < 2; i++) {
        MUST(cuCtxSetCurrent(contexts[i]));
        for (int n = 0; n < 20; n++) MUST(cuLaunchKernel(functions[i], ONE, 0, 0, 0));
    }
    for (int i = 0; i < 2; i++) {
        MUST(cuCtxSetCurrent(contexts[i]));
        SHOW(cuCtxSynchronize());
    }
    usleep(60000);
}

/* Work for a stream of the other device, which need not be current. */
static void foreign_stream(void) {
    Handle contexts[2], streams[2];
    Pointer memory;
    MUST(cuInit(0));
    for (int i = 1; i >= 0; i--) {
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
        MUST(cuCtxSetCurrent(contexts[i]));
        MUST(cuStreamCreate(&streams[i], 1));
        if (i) MUST(cuMemAlloc_v2(&memory, 1 << 20));
    }
    for (int n = 0; n < 51; n++) MUST(cuMemcpyAsync(memory, memory + (1 << 19), 1 << 19, streams[1]));
    SHOW(cuStreamSynchronize(streams[1]));
    usleep(60000);
}

/* Neither another stream nor a query of this stream waits for work in wait on it. */
static void legacy(void) {
    Handle waits, other;
    void *word;
    context_of_device_0();
    Handle f = kernel("spin_20us");
    MUST(cuStreamCreate(&waits, 0));
    MUST(cuStreamCreate(&other, 0));
    MUST(cuMemAllocHost_v2(&word, 4096));
    *(unsigned *)word = 0;
    for (int i = 0; i < 50; i++) {
        MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
        MUST(cuStreamWaitValue32_v2(waits, (Pointer)(uintptr_t)word, i + 1, 1));
        cuStreamQuery(waits);
        MUST(cuStreamWriteValue32_v2(other, (Pointer)(uintptr_t)word, i + 1, 0));
        MUST(cuStreamSynchronize(waits));
    }
    SHOW(cuCtxSynchronize());
}

static void *word_of_both;
static volatile int turn;

static void until_turn(int number) {
    while (turn < number) usleep(100);
}

static void *waits_in_its_own_stream(void *context) {
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < 50; i++) {
        MUST(cuLaunchKernel_ptsz(f, ONE, 0, 0, 0));
        MUST(cuStreamSynchronize_ptsz(0));
        turn = 3 * i + 1;
        until_turn(3 * i + 2);
        MUST(cuStreamWaitValue32_v2_ptsz(0, (Pointer)(uintptr_t)word_of_both, i + 1, 1));
        turn = 3 * i + 3;
        MUST(cuStreamSynchronize_ptsz(0));
    }
    return 0;
}

/* The same with the default streams of two threads: neither waits for work in wait on the other. */
static void legacy_per_thread(void) {
    Handle context = context_of_device_0(), idle;
    pthread_t thread;
    f = kernel("spin_20us");
    MUST(cuStreamCreate(&idle, 1));
    MUST(cuMemAllocHost_v2(&word_of_both, 4096));
    *(unsigned *)word_of_both = 0;
    pthread_create(&thread, 0, waits_in_its_own_stream, context);
    for (int i = 0; i < 50; i++) {
        until_turn(3 * i + 1);
        MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
        turn = 3 * i + 2;
        until_turn(3 * i + 3);
        MUST(cuStreamSynchronize(idle));
        MUST(cuStreamWriteValue32_v2_ptsz(0, (Pointer)(uintptr_t)word_of_both, i + 1, 0));
        MUST(cuStreamSynchronize_ptsz(0));
    }
    pthread_join(thread, 0);
    SHOW(cuCtxSynchronize());
}

static void *launch_for_ever(void *context) {
    MUST(cuCtxSetCurrent(context));
    Handle f = kernel("spin_1ms");
    for (;;) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
}

/* Stopped while its threads wait for their turn, for longer than their time-out for a sign of life, and then goes on. */
static void stopped(void) {
    pid_t pid = fork();
    if (!pid) {
        usleep(500000);
        kill(getppid(), SIGSTOP);
        sleep(6);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    Handle context = context_of_device_0();
    pthread_t all[8];
    for (int i = 0; i < 8; i++) pthread_create(&all[i], 0, launch_for_ever, context);
    waitpid(pid, 0, 0);
    usleep(300000);
    printf("goes on\n");
    fflush(stdout);
    _exit(0);
}

/* Physical memory before there is a context. */
static void physical_first(void) {
    MemoryProps props = {1, 0, {1, 0}, 0, {0}};
    unsigned long long handles[8];
    int made = 0;
    MUST(cuInit(0));
    while (made < 8 && !cuMemCreate(&handles[made], 64 << 20, &props, 0)) made++;
    printf("%d of 64 MiB\n", made);
    context_of_device_0();
    size_t free_bytes, total;
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    printf("free %zu of %zu MiB\n", free_bytes >> 20, total >> 20);
    while (made) MUST(cuMemRelease(handles[--made]));
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    printf("free %zu of %zu MiB\n", free_bytes >> 20, total >> 20);
}

/* A query about a missing device, before there is a context. */
static void no_such_device(void) {
    MemoryProps props = {1, 0, {1, 7}, 0, {0}};
    unsigned long long handle;
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) SHOW(cuMemCreate(&handle, 2 << 20, &props, 0) != 0);
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* A stream takes part in the capture of another, and is gone before its end. */
static void joined_stream_goes(void) {
    Handle origin, joined, there, back, graph = 0;
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    MUST(cuStreamCreate(&origin, 1));
    MUST(cuStreamCreate(&joined, 1));
    MUST(cuEventCreate(&there, 2));
    MUST(cuEventCreate(&back, 2));
    for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, origin, 0, 0));
    MUST(cuCtxSynchronize());
    MUST(cuStreamBeginCapture_v2(origin, 2));
    MUST(cuEventRecord(there, origin));
    MUST(cuStreamWaitEvent(joined, there, 0));
    MUST(cuLaunchKernel(f, ONE, joined, 0, 0));
    MUST(cuEventRecord(back, joined));
    MUST(cuStreamWaitEvent(origin, back, 0));
    SHOW(cuStreamDestroy_v2(joined));
    for (int i = 0; i < 20; i++) SHOW(cuLaunchKernel(f, ONE, origin, 0, 0));
    SHOW(cuStreamEndCapture(origin, &graph));
    printf("a graph: %d\n", graph != 0);
    for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, origin, 0, 0));
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* A context is gone while one of its streams captures; in the next context kernels become longer. */
static void capturing_context_goes(const char *how) {
    Handle context, stream;
    int primary = !strcmp(how, "reset");
    MUST(cuInit(0));
    if (primary) context = context_of_device_0();
    else MUST(cuCtxCreate_v2(&context, 0, 0));
    Handle f = kernel("spin_1ms");
    for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    MUST(cuCtxSynchronize());
    MUST(cuStreamCreate(&stream, 1));
    MUST(cuStreamBeginCapture_v2(stream, 2));
    MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
    if (primary) {
        SHOW(cuDevicePrimaryCtxReset_v2(0));
        context_of_device_0();
    } else {
        SHOW(cuCtxDestroy_v2(context));
        MUST(cuCtxCreate_v2(&context, 0, 0));
    }
    f = kernel("spin_ns");
    MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 300; i++) spin_on(f, stream, i < 50 ? 100000 : 4000000);
    SHOW(cuCtxSynchronize());
    usleep(60000);
}

/* ---- between: this runs with a driver which calls back ---- */

/* A graph is launched twice on device 1 and destroyed while device 0 is current; then another graph has its name. */
static void graph_names(void) {
    Handle contexts[2], graph, added, exec;
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) {
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
        MUST(cuCtxSetCurrent(contexts[i]));
    }
    KernelNode node = {kernel("spin_100ms"), {80, 1, 1}, {64, 1, 1}, 0, 0, 0, 0, 0};
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuGraphAddKernelNode_v2(&added, graph, 0, 0, &node));
    for (int i = 0; i < 2; i++) {
        MUST(cuCtxSetCurrent(contexts[1]));
        MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
        for (int n = 0; n < 2; n++) MUST(cuGraphLaunch(exec, 0));
        MUST(cuCtxSynchronize());
        usleep(60000); /* both are measured by now */
        MUST(cuCtxSetCurrent(contexts[0]));
        MUST(cuGraphExecDestroy(exec));
    }
}

static Handle context_of_both;
static pthread_t launcher, other_one;
static void *(*meanwhile)(void *);
static volatile int called_back, began, awaits;

static void *captures(void *unused) {
    (void)unused;
    Handle graph = 0;
    MUST(cuCtxSetCurrent(context_of_both));
    MUST(cuStreamBeginCapture_v2(stream_of_other, 0));
    began = 1;
    until_told(0);
    SHOW(cuLaunchKernel(f, ONE, stream_of_other, 0, 0));
    SHOW(cuStreamEndCapture(stream_of_other, &graph));
    printf("a graph: %d\n", graph != 0);
    return 0;
}

static void *destroys(void *unused) {
    (void)unused;
    MUST(cuCtxSetCurrent(context_of_both));
    SHOW(cuStreamDestroy_v2(stream_of_one));
    began = 1;
    return 0;
}

void between(const char *when) {
    if (strcmp(when, "looking") || !pthread_equal(pthread_self(), launcher) || called_back || !awaits) return;
    called_back = 1;
    pthread_create(&other_one, 0, meanwhile, 0);
    /* A destruction may have to wait for this call. */
    for (int i = 0; !began && (meanwhile == captures || i < 500); i++) usleep(100);
}

/* Another thread acts while a call of this thread, in wait for `awaited`, is about to query an event of a segment. */
static void until_called_back(void *(*something)(void *), Handle *awaited) {
    context_of_both = context_of_device_0();
    f = kernel("spin_100us");
    MUST(cuStreamCreate(&stream_of_one, 1));
    MUST(cuStreamCreate(&stream_of_other, 1));
    launcher = pthread_self();
    meanwhile = something;
    for (int i = 0; i < 100 && !called_back; i++) {
        for (int n = 0; n < 2; n++) MUST(cuLaunchKernel(f, ONE, stream_of_one, 0, 0));
        usleep(2000);
        awaits = 1;
        MUST(cuStreamSynchronize(*awaited));
        awaits = 0;
    }
    printf("called back: %d\n", called_back);
    go = 1;
    if (called_back) pthread_join(other_one, 0);
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    if (!strcmp(kind, "waits_for_word")) work_waits_for_work(0);
    else if (!strcmp(kind, "waits_on_host")) work_waits_for_work(1);
    else if (!strcmp(kind, "turns")) takes_turns(argv[2]);
    else if (!strcmp(kind, "left")) left();
    else if (!strcmp(kind, "side_by_side")) side_by_side(argv[2]);
    else if (!strcmp(kind, "behind_calls")) behind_calls(argv[2], atoi(argv[3]), atoi(argv[4]));
    else if (!strcmp(kind, "longer_after_a_stream_is_gone")) longer_after_a_stream_is_gone();
    else if (!strcmp(kind, "longer_in_a_loop")) longer_in_a_loop();
    else if (!strcmp(kind, "now_and_then")) now_and_then();
    else if (!strcmp(kind, "one_of_two")) one_of_two();
    else if (!strcmp(kind, "made_before")) made_before();
    else if (!strcmp(kind, "foreign_stream")) foreign_stream();
    else if (!strcmp(kind, "legacy")) legacy();
    else if (!strcmp(kind, "legacy_per_thread")) legacy_per_thread();
    else if (!strcmp(kind, "stopped")) stopped();
    else if (!strcmp(kind, "physical_first")) physical_first();
    else if (!strcmp(kind, "no_such_device")) no_such_device();
    else if (!strcmp(kind, "joined_stream_goes")) joined_stream_goes();
    else if (!strcmp(kind, "capturing_context_goes")) capturing_context_goes(argv[2]);
    else if (!strcmp(kind, "graph_names")) graph_names();
    else if (!strcmp(kind, "capture_meanwhile")) until_called_back(captures, &stream_of_one);
    else if (!strcmp(kind, "destroy_meanwhile")) until_called_back(destroys, &stream_of_other);
    else return 2;
    return 0;
}
