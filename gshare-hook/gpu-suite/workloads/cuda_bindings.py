"""NVIDIA's own client: asks for memory until there is none, then launches 1 ms kernels without waiting for them."""

import json
import sys
import time

from cuda.bindings import driver

# Spins for a millisecond by the device's own clock. The simulated driver goes by the name.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_1000us_full()
{
    .reg .u64 %begin, %now;
    .reg .pred %more;
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %more, %now, 1000000;
    @%more bra again;
    ret;
}
\0"""
BLOCK = 16 << 20


def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]


seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
ok(driver.cuInit(0))
device = ok(driver.cuDeviceGet(0))
context = ok(driver.cuDevicePrimaryCtxRetain(device))
ok(driver.cuCtxSetCurrent(context))
free, total = ok(driver.cuMemGetInfo())
blocks = []
while True:
    code, pointer = driver.cuMemAlloc(BLOCK)
    if int(code) != 0:
        break
    blocks.append(pointer)
for pointer in blocks:
    ok(driver.cuMemFree(pointer))
module = ok(driver.cuModuleLoadData(PTX))
kernel = ok(driver.cuModuleGetFunction(module, b"spin_1000us_full"))
stream = ok(driver.cuStreamCreate(1))
launches, start = 0, time.monotonic()
while time.monotonic() - start < seconds:
    ok(driver.cuLaunchKernel(kernel, 1024, 1, 1, 32, 1, 1, 0, stream, 0, 0))
    launches += 1
elapsed = time.monotonic() - start
print(json.dumps({
    "total_bytes": total,
    "free_bytes": free,
    "allocated_bytes": len(blocks) * BLOCK,
    "out_of_memory": int(code) == 2,
    "launches_per_s": launches / elapsed,
}))
