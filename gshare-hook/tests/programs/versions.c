/* A loader that has no function in any version, and says which one it was asked for. */
#include <stdio.h>

void *dlvsym(void *handle, const char *name, const char *version) {
    (void)handle;
    fprintf(stderr, "%s %s\n", name, version);
    return 0;
}
