/* Another preloaded library, which wraps a driver function and looks up the next. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int cuCtxSynchronize(void) {
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "cuCtxSynchronize");
    static int calls;
    if (!next || next == cuCtxSynchronize) {
        printf("second: no next\n");
        return 999;
    }
    printf("second: call %d\n", ++calls);
    return next();
}
