/* Processes and threads: one way of making, ending or replacing them. */
#include "driver.h"
#include <signal.h>

#define ONE 80, 1, 1, 64, 1, 1, 0
static Handle context, f;

static void *launch_and_end(void *how) {
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    if (how) pthread_exit(0);
    return 0;
}

static void *exit_here(void *unused) {
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    exit(7);
}

static int child_status(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "fork_before";
    setvbuf(stdout, 0, _IONBF, 0);
    if (!strcmp(kind, "fork_before")) {
        /* The parent has not touched CUDA: the child uses it freely. */
        pid_t pid = fork();
        if (!pid) {
            context = context_of_device_0();
            f = kernel("spin_1ms");
            for (int i = 0; i < 20; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
            printf("child: %d\n", cuCtxSynchronize());
            _exit(0);
        }
        printf("status %d\n", child_status(pid));
        return 0;
    }
    if (!strcmp(kind, "exec_target")) {
        context = context_of_device_0();
        f = kernel("spin_1ms");
        printf("after exec: %d %d\n", cuLaunchKernel(f, ONE, 0, 0, 0), cuCtxSynchronize());
        return 0;
    }
    context = context_of_device_0();
    f = kernel("spin_100us");
    for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
    if (!strcmp(kind, "fork_after")) {
        /* CUDA does not survive a fork; the child must get an answer, not a hang, and the parent goes on. */
        pid_t pid = fork();
        if (!pid) {
            alarm(20);
            _exit(cuLaunchKernel(f, ONE, 0, 0, 0) || cuCtxSynchronize() ? 3 : 4);
        }
        int status = child_status(pid);
        printf("child answered: %d\n", status == 3 || status == 4);
        for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
        SHOW(cuCtxSynchronize());
    } else if (!strcmp(kind, "double_fork")) {
        pid_t pid = fork();
        if (!pid) {
            pid_t second = fork();
            if (!second) _exit(5);
            _exit(child_status(second));
        }
        printf("status %d\n", child_status(pid));
        SHOW(cuCtxSynchronize());
    } else if (!strcmp(kind, "vfork")) {
        pid_t pid = vfork();
        if (!pid) {
            execl("/bin/true", "true", (char *)0);
            _exit(9);
        }
        printf("status %d\n", child_status(pid));
        for (int i = 0; i < 50; i++) MUST(cuLaunchKernel(f, ONE, 0, 0, 0));
        SHOW(cuCtxSynchronize());
    } else if (!strcmp(kind, "exec")) {
        execl(argv[0], argv[0], "exec_target", (char *)0);
    } else if (!strcmp(kind, "threads")) {
        for (int round = 0; round < 3; round++) {
            pthread_t all[32];
            for (long i = 0; i < 32; i++) pthread_create(&all[i], 0, launch_and_end, (void *)(i % 2));
            for (int i = 0; i < 32; i++) pthread_join(all[i], 0);
        }
        SHOW(cuCtxSynchronize());
    } else if (!strcmp(kind, "exit_in_thread")) {
        pthread_t thread;
        pthread_create(&thread, 0, exit_here, 0);
        pthread_join(thread, 0);
    } else if (!strcmp(kind, "signals")) {
        /* Every signal must reach the program's own threads: the hook's thread blocks them all. */
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, 0);
        kill(getpid(), SIGUSR1);
        usleep(50000);
        sigpending(&all);
        printf("still pending: %d\n", sigismember(&all, SIGUSR1));
    } else {
        return 2;
    }
    return 0;
}
