/* Makes every call under a limit, after an obstacle to keeping limits, and prints the results. */
#include "driver.h"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define ONE 80, 1, 1, 64, 1, 1, 0
#define MIB (1 << 20)

static Handle context, f, stream, pool, exec_kernel, exec_memory;
static Pointer space;

static void graphs(void) {
    Handle graph, node, freed;
    KernelNode work = {f, {80, 1, 1}, {64, 1, 1}, 0, 0, 0, 0, 0};
    AllocNode memory = {{1, 0, {1, 0}, 0, {0}}, 0, 0, 32 * MIB, 0};
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuGraphAddKernelNode_v2(&node, graph, 0, 0, &work));
    MUST(cuGraphInstantiateWithFlags(&exec_kernel, graph, 0));
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuGraphAddMemAllocNode(&node, graph, 0, 0, &memory));
    MUST(cuGraphAddMemFreeNode(&freed, graph, &node, 1, memory.address));
    MUST(cuGraphInstantiateWithFlags(&exec_memory, graph, 0));
}

/* One call of each kind which takes time or memory. */
static void everything(void) {
    Pointer p = 0;
    unsigned long long physical = 0;
    size_t pitch = 0;
    Handle array = 0;
    ArrayDesc desc = {1000, 500, 0x20, 4};
    MemoryProps props = {1, 0, {1, 0}, 0, {0}};
    PoolProps of_pool = {1, 0, {1, 0}, 0, {0}};
    MUST(cuMemPoolCreate(&pool, &of_pool));
    SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
    SHOW(cuGraphLaunch(exec_kernel, stream));
    SHOW(cuMemsetD32Async(space, 0, 16, stream));
    SHOW(cuMemAlloc_v2(&p, 32 * MIB));
    SHOW(cuMemAllocPitch_v2(&p, &pitch, 1000, 300, 4));
    SHOW(cuMemAllocManaged(&p, 32 * MIB, 1));
    SHOW(cuMemAllocAsync(&p, 32 * MIB, stream));
    SHOW(cuMemAllocFromPoolAsync(&p, 32 * MIB, pool, stream));
    SHOW(cuMemCreate(&physical, 32 * MIB, &props, 0));
    SHOW(cuArrayCreate_v2(&array, &desc));
    SHOW(cuGraphLaunch(exec_memory, stream));
    SHOW(cuCtxSynchronize());
}

static void begin(void) {
    context = context_of_device_0();
    f = kernel("spin_10ms");
    MUST(cuStreamCreate(&stream, 1));
    graphs();
}

static void *wait_for_ever(void *unused) {
    pause();
    return unused;
}

static long launched;

static void launch_in_handler(int unused) {
    (void)unused;
    launched += cuLaunchKernel(f, ONE, stream, 0, 0) == 0;
}

/* Whether the process sleeps: a driver need not support a call from a handler which interrupts its own call. */
static int sleeps(pid_t process) {
    char path[32], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
    if (file) fclose(file);
    return state == 'S';
}

static void *work_a_while(void *unused) {
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < 5; i++) MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
    MUST(cuCtxSynchronize());
    puts("worked");
    return 0;
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "plain";
    setvbuf(stdout, 0, _IONBF, 0);
    if (!strcmp(kind, "devices")) {
        /* Number of devices for a program which looks the driver up by handle. */
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        Result (*init)(unsigned) = (Result (*)(unsigned))dlsym(driver, "cuInit");
        Result (*count)(int *) = (Result (*)(int *))dlsym(driver, "cuDeviceGetCount");
        Result (*retain)(Handle *, int) = (Result (*)(Handle *, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
        Result (*set)(Handle) = (Result (*)(Handle))dlsym(driver, "cuCtxSetCurrent");
        Result (*take)(Pointer *, size_t) = (Result (*)(Pointer *, size_t))dlsym(driver, "cuMemAlloc_v2");
        int devices = 0, taken = 0;
        Pointer p;
        Result started = init(0);
        count(&devices);
        if (!started && !retain(&context, 0) && !set(context))
            while (taken < 64 && !take(&p, 64 * MIB)) taken++;
        printf("cuInit %d, %d devices, %d MiB\n", started, devices, 64 * taken);
        return 0;
    }
    begin();
    if (!strcmp(kind, "plain")) {
        everything();
    } else if (!strcmp(kind, "again")) {
        void (*allow)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "allow");
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        allow();
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuMemAlloc_v2(&space, 512 * MIB));
    } else if (!strcmp(kind, "keys")) {
        pthread_key_t key;
        int keys = 0;
        while (!pthread_key_create(&key, 0)) keys++;
        printf("no key left: %d\n", keys > 500);
        SHOW(cuMemAlloc_v2(&space, 512 * MIB));
    } else if (!strcmp(kind, "address_space")) {
        /* The mapped size, and no more; stacks of ended threads are used up first. */
        struct rlimit limit, all;
        unsigned long pages;
        FILE *file = fopen("/proc/self/statm", "r");
        pthread_t thread;
        if (!file || fscanf(file, "%lu", &pages) != 1) return 2;
        fclose(file);
        getrlimit(RLIMIT_AS, &all);
        limit = all;
        limit.rlim_cur = pages * 4096 + 65536;
        setrlimit(RLIMIT_AS, &limit);
        pthread_attr_t how;
        pthread_attr_init(&how);
        int threads = 0, failed = 0;
        for (size_t stack = 8 << 20; stack >= 256 << 10; stack /= 2) {
            pthread_attr_setstacksize(&how, stack);
            while (threads < 1000 && !(failed = pthread_create(&thread, &how, wait_for_ever, 0))) threads++;
        }
        printf("a thread: %d\n", !failed);
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuMemAlloc_v2(&space, 512 * MIB));
        setrlimit(RLIMIT_AS, &all);
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuMemAlloc_v2(&space, 512 * MIB));
    } else if (!strcmp(kind, "another_root")) {
        /* Without root's rights, become root in a user namespace. */
        if (chroot(argv[2]) && (unshare(CLONE_NEWUSER) || chroot(argv[2]))) return 2;
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuMemAlloc_v2(&space, 512 * MIB));
    } else if (!strcmp(kind, "eventfds")) {
        /* All descriptors are closed, and the program's own take their numbers. Each is reported once. */
        int lost = 0, files[600];
        for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
        /* The simulated device needs one of its own. */
        for (int fd = 500; fd < 2000; fd++) close(fd);
        for (int i = 0; i < 600; i++) files[i] = eventfd(1, EFD_NONBLOCK);
        for (int i = 0; i < 60; i++) {
            MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
            MUST(cuMemAlloc_v2(&space, 1024));
            MUST(cuMemFree_v2(space));
        }
        MUST(cuCtxSynchronize());
        for (int i = 0; i < 600; i++) {
            uint64_t told = 0;
            lost += read(files[i], &told, 8) != 8 || told != 1;
        }
        printf("%d of 600 wake-ups lost or doubled\n", lost);
    } else if (!strcmp(kind, "helper_gone")) {
        /* From here on a polling thread is killed: no thread of the program polls. */
        struct sock_filter rules[] = {
            {BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},
            {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, SYS_poll},
            {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_ppoll},
            {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_THREAD},
            {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
        };
        struct sock_fprog filter = {5, rules};
        Result r = 0;
        for (int i = 0; i < 5; i++) MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter)) return 2;
        for (int i = 0; i < 3000 && !(r = cuLaunchKernel(f, ONE, stream, 0, 0)); i++) MUST(cuStreamSynchronize(stream));
        printf("launches end with %d\n", r);
        SHOW(cuLaunchKernel(f, ONE, stream, 0, 0));
        SHOW(cuMemAlloc_v2(&space, MIB));
    } else if (!strcmp(kind, "last_thread")) {
        MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
        pthread_exit(0);
    } else if (!strcmp(kind, "last_worker")) {
        pthread_t thread;
        pthread_create(&thread, 0, work_a_while, 0);
        pthread_exit(0);
    } else if (!strcmp(kind, "handler")) {
        /* Kernels of 10 ms from a loop and, 50 times a second, from a handler which interrupts its waits. */
        struct sigaction action = {.sa_handler = launch_in_handler, .sa_flags = SA_RESTART};
        f = kernel("spin_1ms");
        for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, stream, 0, 0));
        MUST(cuCtxSynchronize());
        sigaction(SIGUSR1, &action, 0);
        pid_t rings = fork();
        if (!rings) {
            for (int i = 0; i < 100; i++) {
                usleep(20000);
                while (!sleeps(getppid())) usleep(500);
                kill(getppid(), SIGUSR1);
            }
            _exit(0);
        }
        int failed = 0;
        for (int i = 0; i < 300; i++) failed += cuLaunchKernel(f, ONE, stream, 0, 0) != 0;
        while (waitpid(rings, 0, 0) < 0) {}
        printf("%d failed; from the handler: %d\n", failed, launched > 50);
    } else {
        return 2;
    }
    return 0;
}
