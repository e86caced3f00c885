"""NVIDIA's own client, the PyPI package cuda-bindings (12 or 13), on the simulated driver.

Run by hand, with the library linked as libcuda.so.1 into a directory of its own:
    LD_LIBRARY_PATH=DIR GSHARE_SIM_DEVICE=/tmp/device GSHARE_SIM_PROFILE=tiny python cuda_bindings.py
Prints one line per check; says so and leaves with 0 where the package is not installed.
"""

import ctypes
import json
import sys

try:
    import cuda.bindings
    from cuda.bindings import driver
except ImportError as missing:
    print(f"skipped: cuda-bindings is not installed ({missing})")
    sys.exit(0)


def ok(answer):
    """The result of a call that must succeed."""
    assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]


def code(answer):
    return int(answer[0])


def check(name, condition):
    assert condition, name
    print(f"ok: {name}")


print(f"cuda-bindings {cuda.bindings.__version__}")
check("not initialised before cuInit", code(driver.cuDeviceGetCount()) == 3)
ok(driver.cuInit(0))
version = ok(driver.cuDriverGetVersion())
print(f"driver {version}")
device = ok(driver.cuDeviceGet(0))
check("the name says that it is a simulation", b"(simulated)" in ok(driver.cuDeviceGetName(64, device)))
context = ok(driver.cuDevicePrimaryCtxRetain(device))
ok(driver.cuCtxSetCurrent(context))

PTX = b".version 7.0\n.visible .entry spin_2ms_full() { ret; }\n.visible .entry zero() { ret; }\n.visible .entry spin_ns(.param .u64 n) { ret; }\n\0"
module = ok(driver.cuModuleLoadData(PTX))
spin = ok(driver.cuModuleGetFunction(module, b"spin_2ms_full"))
check("an unknown kernel is not found", code(driver.cuModuleGetFunction(module, b"other")) == 500)

stream = ok(driver.cuStreamCreate(1))
begin, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
ok(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
ok(driver.cuEventRecord(begin, stream))
for _ in range(5):
    ok(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
ok(driver.cuEventRecord(end, stream))
check("the stream is busy", code(driver.cuStreamQuery(stream)) == 600)
ok(driver.cuStreamSynchronize(stream))
check("five kernels of 2 ms take 10 ms", abs(ok(driver.cuEventElapsedTime(begin, end)) - 10.0) < 1e-5)

timed = ok(driver.cuModuleGetFunction(module, b"spin_ns"))
ok(driver.cuEventRecord(begin, stream))
ok(driver.cuLaunchKernel(timed, 1, 1, 1, 1, 1, 1, 0, stream, ((1_000_000,), (ctypes.c_uint64,)), 0))
ok(driver.cuCtxSynchronize())

config = driver.CUlaunchConfig()
config.gridDimX = config.gridDimY = config.gridDimZ = 1
config.blockDimX = config.blockDimY = config.blockDimZ = 1
config.hStream = stream
ok(driver.cuLaunchKernelEx(config, spin, 0, 0))
ok(driver.cuStreamSynchronize(stream))
print("ok: launches by cuLaunchKernel and cuLaunchKernelEx")

free, total = ok(driver.cuMemGetInfo())
memory = ok(driver.cuMemAlloc(1 << 20))
check("cuMemGetInfo is exact", ok(driver.cuMemGetInfo())[0] == free - (1 << 20))
check("out of memory", code(driver.cuMemAlloc(total)) == 2)
data, back = bytes(range(256)), bytearray(256)
ok(driver.cuMemcpyHtoD(memory, data, 256))
ok(driver.cuMemsetD8(int(memory) + 16, 0xEE, 4))
ok(driver.cuMemcpyDtoH(back, memory, 256))
check("bytes are real", bytes(back) == data[:16] + b"\xee" * 4 + data[20:])
ok(driver.cuMemFree(memory))

pooled = ok(driver.cuMemAllocAsync(3 << 20, stream))
ok(driver.cuMemFreeAsync(pooled, stream))
ok(driver.cuStreamSynchronize(stream))
check("pools give back what they do not use", ok(driver.cuMemGetInfo())[0] == free)

prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
step = ok(driver.cuMemGetAllocationGranularity(prop, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
handle = ok(driver.cuMemCreate(step, prop, 0))
place = ok(driver.cuMemAddressReserve(step, 0, 0, 0))
ok(driver.cuMemMap(place, step, 0, handle, 0))
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(driver.cuMemSetAccess(place, step, [access], 1))
ok(driver.cuMemsetD32(place, 7, step // 4))
ok(driver.cuMemUnmap(place, step))
ok(driver.cuMemRelease(handle))
ok(driver.cuMemAddressFree(place, step))
print("ok: virtual memory")

ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
check("allocation is refused while capturing", code(driver.cuMemAlloc(64)) == 900)
check("and spoils the capture", code(driver.cuStreamEndCapture(stream)) == 901)
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
ok(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuStreamSynchronize(stream))
print("ok: capture and graph launch")

library = ctypes.CDLL("libcuda.so.1")
library.gshare_sim_truth.restype = ctypes.c_ssize_t
text = ctypes.create_string_buffer(1 << 20)
library.gshare_sim_truth(None, text, ctypes.c_size_t(len(text)))
truth = json.loads(text.value)
(mine,) = [p for p in truth["processes"] if p["live"]]
check("ground truth: 8 kernels of 2 ms and one of 1 ms", mine["gpus"][0]["kernel_ns"] == 17_000_000)
print("all well")
