/* Loads deepbind.so with RTLD_DEEPBIND. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND) : 0;
    if (!library) {
        puts(dlerror());
        return 1;
    }
    int (*count)(void) = (int (*)(void))dlsym(library, "deep_count");
    printf("%d\n", count());
    return 0;
}
