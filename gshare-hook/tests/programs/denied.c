/* Denies the hook the system's resources in DENIED, words with commas. The program itself gets them. `allow` ends the denial. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int allowed;

void allow(void) {
    allowed = 1;
}

static int denied(const char *what) {
    const char *all = getenv("DENIED"), *at = all && !allowed ? strstr(all, what) : 0;
    return at && (at == all || at[-1] == ',') && (at[strlen(what)] == 0 || at[strlen(what)] == ',');
}

static int is_hook(void *address) {
    Dl_info info;
    return dladdr(address, &info) && strstr(info.dli_fname, "libgshare_hook");
}

static void *next(const char *name) {
    return dlvsym(RTLD_NEXT, name, "GLIBC_2.2.5");
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = next("pthread_create");
    if (denied("thread") && is_hook(__builtin_return_address(0))) return EAGAIN;
    return real(thread, how, run, argument);
}

int pthread_key_create(pthread_key_t *key, void (*ends)(void *)) {
    int (*real)(pthread_key_t *, void (*)(void *)) = next("pthread_key_create");
    if (denied("key") && is_hook(__builtin_return_address(0))) return EAGAIN;
    return real(key, ends);
}

/* The hook's permanent allocations have the alignment of a page or of two cache lines. */
int posix_memalign(void **place, size_t alignment, size_t size) {
    int (*real)(void **, size_t, size_t) = next("posix_memalign");
    if (denied("memory") && is_hook(__builtin_return_address(0))) return ENOMEM;
    return real(place, alignment, size);
}
