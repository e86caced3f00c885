/* A library linked directly to the driver and loaded with RTLD_DEEPBIND: plain interposition does not reach it. */
int cuInit(unsigned);
int cuDeviceGetCount(int *);
int deep_count(void) {
    int count = -1;
    int r = cuInit(0);
    return r ? -r : (cuDeviceGetCount(&count), count);
}
