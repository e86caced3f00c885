/* Much thread-local storage, a copy for every thread. */
#include "driver.h"

static __thread volatile char much[2 << 20];

int main(void) {
    context_of_device_0();
    Handle f = kernel("spin_1ms");
    for (int i = 0; i < 400; i++) much[i] = cuLaunchKernel(f, 80, 1, 1, 64, 1, 1, 0, 0, 0, 0);
    SHOW(cuCtxSynchronize());
    return much[399];
}
