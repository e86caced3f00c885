/* Programs with a faulty daemon, or a faulty connection with it. */
#include "driver.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#define ONE 80, 1, 1, 64, 1, 1, 0
#define FILES 700

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One kernel after the other for `ms`; prints a failed launch and its duration. */
static void works(long ms) {
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (long end = now_ms() + ms; now_ms() < end;) {
        long before = now_ms();
        Result result = cuLaunchKernel(f, ONE, 0, 0, 0);
        if (result) {
            printf("%d after %ld ms\n", result, now_ms() - before);
            return;
        }
        MUST(cuCtxSynchronize());
    }
    printf("done\n");
}

/* One unknown kernel, and the program's end right after it. */
static void once(const char *name) {
    context_of_device_0();
    Handle f = kernel(name);
    MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    MUST(cuCtxSynchronize());
}

/* A number of MiB, held for `ms`; then, `later` ms later, the free memory. */
static void holds(int count, long ms, long later) {
    Pointer all[64];
    size_t free_bytes, total;
    context_of_device_0();
    for (int i = 0; i < count; i++) MUST(cuMemAlloc_v2(&all[i], 1 << 20));
    usleep(ms * 1000);
    while (count) MUST(cuMemFree_v2(all[--count]));
    usleep(later * 1000);
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
    printf("free %zu of %zu MiB\n", free_bytes >> 20, total >> 20);
}

/* Closes all but the standard descriptors, and its own files get the numbers. */
static void closes(void) {
    static int files[FILES];
    char name[] = "/tmp/gshare-link-XXXXXX", text[16];
    int changed = 0, made = mkstemp(name);
    Handle context = context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    MUST(write(made, "0123456789abcdef", 16) != 16);
    MUST(syscall(SYS_close_range, 3, ~0U, 0));
    for (int i = 0; i < FILES; i++) files[i] = open(name, O_RDWR);
    for (int i = 0; i < 400; i++) {
        MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
        if (i % 50 == 0) usleep(20000);
    }
    SHOW(cuCtxSynchronize());
    for (int i = 0; i < FILES; i++) changed += files[i] < 3 || lseek(files[i], 0, SEEK_CUR) != 0;
    MUST(pread(files[0], text, 16, 0) != 16);
    printf("%d files used, %d\n", changed, memcmp(text, "0123456789abcdef", 16) != 0 || lseek(files[0], 0, SEEK_END) != 16);
    unlink(name);
    (void)context;
}

/* Closes all but the standard descriptors after its first kernel, and works. */
static void closes_and_works(long ms) {
    context_of_device_0();
    MUST(cuLaunchKernel(kernel("spin_1ms"), ONE, 0, 0, 0));
    MUST(cuCtxSynchronize());
    MUST(syscall(SYS_close_range, 3, ~0U, 0));
    works(ms);
}

/* Stopped while it waits for memory. */
static void stopped(void) {
    Pointer memory;
    context_of_device_0();
    SHOW(cuCtxSynchronize());
    pid_t pid = fork();
    if (!pid) {
        usleep(300000);
        kill(getppid(), SIGSTOP);
        usleep(2000000);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    SHOW(cuMemAlloc_v2(&memory, 1 << 20));
    waitpid(pid, 0, 0);
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
    if (!strcmp(kind, "works")) works(atol(argv[2]));
    else if (!strcmp(kind, "holds")) holds(atoi(argv[2]), atol(argv[3]), atol(argv[4]));
    else if (!strcmp(kind, "closes_and_works")) closes_and_works(atol(argv[2]));
    else if (!strcmp(kind, "once")) once(argv[2]);
    else if (!strcmp(kind, "closes")) closes();
    else if (!strcmp(kind, "stopped")) stopped();
    else if (!strcmp(kind, "loads")) {
        if (argc > 3) works(50);
        printf("%s\n", dlopen(argv[2], RTLD_NOW) ? "loaded" : dlerror());
    } else return 2;
    return 0;
}
