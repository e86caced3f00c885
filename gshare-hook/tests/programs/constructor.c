/* A library with work on the device during its load: the loader's lock is held. */
#include "driver.h"

__attribute__((constructor)) static void works(void) {
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (int i = 0; i < 100; i++) MUST(cuLaunchKernel(f, 80, 1, 1, 64, 1, 1, 0, 0, 0, 0));
    SHOW(cuCtxSynchronize());
}
