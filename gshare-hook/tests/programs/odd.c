/* Programs that are within their rights and that a meter easily hangs, loses or stops to measure. */
#include "driver.h"
#include <signal.h>

#define ONE 80, 1, 1, 64, 1, 1, 0

Result cuStreamWaitValue32_v2(Handle, Pointer, unsigned, unsigned);
Result cuStreamWriteValue32_v2(Handle, Pointer, unsigned, unsigned);
Result cuLaunchHostFunc(Handle, void (*)(void *), void *);
Result cuCtxPushCurrent_v2(Handle);
Result cuCtxPopCurrent_v2(Handle *);

static volatile int go;

static void until_told(void *unused) {
    (void)unused;
    while (!go) usleep(100);
}

/* Work on one stream waits for what is launched on another one after it: for a word that its end writes, or on the host. */
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

/* The default streams of two contexts in turns: 1,500 short kernels of one function each, then 200 long ones of the first, never
   waiting. How the contexts take turns is `how`. */
static void takes_turns(const char *how) {
    Handle contexts[2], functions[2], before;
    int two_devices = !strcmp(how, "devices");
    MUST(cuInit(0));
    for (int i = 0; i < 2; i++) {
        if (two_devices) {
            MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
            MUST(cuCtxSetCurrent(contexts[i]));
        } else {
            MUST(cuCtxCreate_v2(&contexts[i], 0, 0));
        }
        functions[i] = kernel("spin_ns");
    }
    for (int n = 0; n < 1500; n++) {
        for (int i = 0; i < 2; i++) {
            if (!strcmp(how, "push")) {
                MUST(cuCtxSetCurrent(contexts[0]));
                if (i) MUST(cuCtxPushCurrent_v2(contexts[1]));
                spin(functions[i], 200000);
                if (i) MUST(cuCtxPopCurrent_v2(&before));
            } else {
                MUST(cuCtxSetCurrent(contexts[i]));
                spin(functions[i], 200000);
            }
        }
    }
    MUST(cuCtxSetCurrent(contexts[1]));
    MUST(cuCtxSynchronize());
    MUST(cuCtxSetCurrent(contexts[0]));
    MUST(cuCtxSynchronize());
    for (int n = 0; n < 200; n++) spin(functions[0], 4000000);
    SHOW(cuCtxSynchronize());
    usleep(60000); /* idle long enough for the meter to close its account */
}

static void *launch_for_ever(void *context) {
    MUST(cuCtxSetCurrent(context));
    Handle f = kernel("spin_1ms");
    for (;;) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
}

/* Stopped while its threads wait for their turn, for longer than any of them waits for a sign of life, and then goes on. */
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

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    if (!strcmp(kind, "waits_for_word")) work_waits_for_work(0);
    else if (!strcmp(kind, "waits_on_host")) work_waits_for_work(1);
    else if (!strcmp(kind, "turns")) takes_turns(argv[2]);
    else if (!strcmp(kind, "stopped")) stopped();
    else if (!strcmp(kind, "physical_first")) physical_first();
    else return 2;
    return 0;
}
