"""Cases without a framework: the driver's clients of NVIDIA, numba, warp, tinygrad, the runtime library, NVML."""

import ctypes
import pathlib
import sys

import report
from report import case

SOURCE = r"""
extern "C" __global__ void scale(float* x, float by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
"""


@case
def cuda_bindings():
    """Memory until there is none and back, a module from NVRTC's PTX, launches, events and copies."""
    import numpy
    from cuda.bindings import driver, nvrtc

    def ok(answer):
        assert int(answer[0]) == 0, answer
        return answer[1] if len(answer) == 2 else answer[1:]

    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    major = ok(driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    program = ok(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"scale.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"]))
    ptx = bytes(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(ptx)), b"scale"))
    host = numpy.arange(1024, dtype=numpy.float32)
    back = numpy.empty_like(host)
    memory = ok(driver.cuMemAlloc(host.nbytes))
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemcpyHtoDAsync(memory, host, host.nbytes, stream))
    ok(driver.cuMemcpyDtoHAsync(back, memory, host.nbytes, stream))
    ok(driver.cuStreamSynchronize(stream))
    copied = bool((host == back).all())
    for _ in range(10):
        arguments = ((int(memory), 2.0, 1024), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
        ok(driver.cuLaunchKernel(kernel, 4, 1, 1, 256, 1, 1, 0, stream, arguments, 0))
    ok(driver.cuMemcpyDtoHAsync(back, memory, host.nbytes, stream))
    ok(driver.cuStreamSynchronize(stream))
    wrong = [int(driver.cuMemFree(1)[0]), int(driver.cuModuleGetFunction(0, b"scale")[0])]
    ok(driver.cuMemFree(memory))
    return {"major": major, "copied": copied, "errors": wrong, "values": back.tobytes()}


@case
def cuda_core():
    """A program compiled to a cubin and to PTX, launched, and a stream and event of `cuda.core`."""
    import numpy
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(4096, stream=stream)
    sizes = []
    for kind in ("cubin", "ptx"):
        options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
        kernel = Program(SOURCE, "c++", options).compile(kind).get_kernel("scale")
        launch(stream, LaunchConfig(grid=4, block=256), kernel, buffer, numpy.float32(2), numpy.int32(1024))
        sizes.append(kernel.attributes.max_threads_per_block > 0)
    event = stream.record()
    event.sync()
    stream.sync()
    done = event.is_done
    buffer.close(stream)
    stream.sync()
    return {"kernels": sizes, "done": done, "compute_capability": list(device.compute_capability)}


@case
def numba():
    """A jitted kernel, shared memory, a pinned and a managed array, an event, and numba's out-of-memory error."""
    import numpy
    from numba import cuda, float32

    @cuda.jit
    def saxpy(a, x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = a * x[i] + y[i]

    @cuda.jit
    def reverse(x):
        tile = cuda.shared.array(256, float32)
        i = cuda.threadIdx.x
        tile[i] = x[i]
        cuda.syncthreads()
        x[i] = tile[255 - i]

    host = numpy.arange(1 << 16, dtype=numpy.float32)
    x = cuda.to_device(host)
    copied = bool((x.copy_to_host() == host).all())
    y = cuda.device_array_like(x)
    y[:] = 0
    stream, event = cuda.stream(), cuda.event()
    for _ in range(20):
        saxpy[256, 256, stream](numpy.float32(0.5), x, y)
    event.record(stream)
    event.synchronize()
    managed = cuda.managed_array(256, dtype=numpy.float32)
    managed[:] = 1
    reverse[1, 256](managed)
    pinned = cuda.pinned_array(1024, dtype=numpy.float32)
    pinned[:] = 3
    round_trip = bool((cuda.to_device(pinned).copy_to_host() == 3).all())
    cuda.synchronize()
    try:
        cuda.device_array(1 << 50, dtype=numpy.uint8)
        refused = "nothing"
    except Exception as error:
        refused = type(error).__name__
    return {"copied": copied, "pinned": round_trip, "refused": refused, "values": y.copy_to_host().tobytes()}


@case
def warp():
    """A kernel, a captured graph and copies of warp."""
    import numpy
    import warp

    warp.config.quiet = True
    warp.init()

    module = __import__("kernels_warp")
    host = numpy.arange(4096, dtype=numpy.float32)
    x = warp.array(host, dtype=float, device="cuda:0")
    copied = bool((x.numpy() == host).all())
    warp.launch(module.scale, dim=4096, inputs=[x, 2.0], device="cuda:0")
    with warp.ScopedCapture(device="cuda:0") as capture:
        warp.launch(module.scale, dim=4096, inputs=[x, 2.0], device="cuda:0")
    for _ in range(5):
        warp.capture_launch(capture.graph)
    warp.synchronize()
    return {"copied": copied, "devices": warp.get_cuda_device_count(), "values": x.numpy().tobytes()}


@case
def tinygrad():
    """A matrix product and a sum by tinygrad's own compiler path."""
    import os

    os.environ["DEV"] = os.environ["CUDA"] = "1"
    os.environ["DEV"] = "CUDA"
    from tinygrad import Device, Tensor

    assert Device.DEFAULT.startswith("CUDA"), Device.DEFAULT
    host = Tensor([[float(i + j) for i in range(64)] for j in range(64)])
    copied = host.realize().tolist()[3][4] == 7.0
    product = (host @ host).realize()
    total = (product.relu() + 1).sum().realize()
    return {"copied": copied, "shape": list(product.shape), "values": total.numpy().tobytes()}


def runtime_library(name):
    """The path of a runtime library from a wheel."""
    for place in map(pathlib.Path, sys.path):
        for path in place.glob(f"nvidia/**/{name}"):
            return str(path)
    raise FileNotFoundError(name)


def cudart(name):
    """The runtime API from the version to memory, streams, events, a callback, and the driver's entry points."""
    runtime = ctypes.CDLL(runtime_library(name))
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    seen = []

    def call(function, *arguments, expect="cudaSuccess"):
        found = runtime.cudaGetErrorName(getattr(runtime, function)(*arguments)).decode()
        assert found == expect, f"{function}: {found}"
        seen.append(f"{function} {found}")

    number, pointer, stream, event = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cudaRuntimeGetVersion", ctypes.byref(number))
    runtime_version = number.value
    call("cudaGetDeviceCount", ctypes.byref(number))
    call("cudaSetDevice", 0)
    call("cudaFree", None)
    size = 1 << 20
    host, back = ctypes.create_string_buffer(bytes(range(256)) * (size // 256), size), ctypes.create_string_buffer(size)
    call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    assert 0 < free.value < total.value, (free.value, total.value)
    call("cudaMemcpy", pointer, host, ctypes.c_size_t(size), 1)
    call("cudaStreamCreate", ctypes.byref(stream))
    call("cudaEventCreate", ctypes.byref(event))
    call("cudaMemcpyAsync", back, pointer, ctypes.c_size_t(size), 2, stream)
    call("cudaEventRecord", event, stream)
    call("cudaEventSynchronize", event)
    assert host.raw == back.raw, "the copy differs"
    call("cudaMemsetAsync", pointer, 0, ctypes.c_size_t(size), stream)
    call("cudaStreamSynchronize", stream)
    call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 50), expect="cudaErrorMemoryAllocation")
    call("cudaGetLastError", expect="cudaErrorMemoryAllocation")
    call("cudaGetLastError")
    call("cudaEventDestroy", event)
    call("cudaStreamDestroy", stream)
    call("cudaFree", pointer)
    call("cudaDeviceSynchronize")
    call("cudaDeviceReset")
    return {"version": runtime_version, "calls": seen}


@case
def cudart_12():
    return cudart("libcudart.so.12")


@case
def cudart_13():
    return cudart("libcudart.so.13")


@case
def nvml():
    """The queries of monitors through `nvidia-ml-py`."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "uuid": pynvml.nvmlDeviceGetUUID(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "count": pynvml.nvmlDeviceGetCount(),
        "bus": pci.bus,
        "processes": len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }


if __name__ == "__main__":
    report.main()
