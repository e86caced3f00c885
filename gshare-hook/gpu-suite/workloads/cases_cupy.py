"""Cases of CuPy."""

import cupy
import numpy
import report
from report import case


@case
def elementwise():
    """Copies, NVRTC's element-wise and reduction kernels, streams, a graph, both pools."""
    host = numpy.arange(1 << 16, dtype=numpy.float32)
    x = cupy.asarray(host)
    copied = bool((cupy.asnumpy(x) == host).all())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cupy.sin(x) * 2 + x
        total = y.sum()
        stream.begin_capture()
        y *= 2
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        z = cupy.ones(1 << 20, dtype=cupy.float32)
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        managed = cupy.zeros(1 << 10, dtype=cupy.float32)
    return {
        "copied": copied, "shapes": [list(a.shape) for a in (y, total, z, managed)],
        "pool": cupy.get_default_memory_pool().used_bytes(), "values": cupy.asnumpy(y).tobytes(),
    }


@case
def raw_kernel():
    """A kernel and a module with a global variable, compiled by NVRTC."""
    source = r"""
    extern "C" __device__ float factor;
    extern "C" __global__ void scale(float* x, int n)
    {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= factor;
    }
    """
    module = cupy.RawModule(code=source)
    variable = cupy.ndarray((1,), cupy.float32, module.get_global("factor"))
    variable.set(numpy.array([3], dtype=numpy.float32))
    x = cupy.arange(1024, dtype=cupy.float32)
    module.get_function("scale")((4,), (256,), (x, numpy.int32(1024)))
    try:
        module.get_function("nothing")
        missing = "nothing"
    except Exception as error:
        missing = type(error).__name__
    return {"factor": float(variable.get()[0]), "missing": missing, "values": cupy.asnumpy(x).tobytes()}


@case
def matmul():
    """cuBLAS: products in three types."""
    out = []
    for dtype in (numpy.float32, numpy.float64, numpy.float16):
        a = cupy.asarray(numpy.ones((128, 128), dtype=dtype))
        out += [a @ a, cupy.matmul(a[None], a[None])]
    return {"shapes": [list(a.shape) for a in out], "values": b"".join(cupy.asnumpy(a).tobytes() for a in out)}


@case
def fft():
    """cuFFT: a plan of two dimensions and a real one."""
    x = cupy.asarray(numpy.ones((64, 128), dtype=numpy.float32))
    out = [cupy.fft.fft2(x), cupy.fft.rfft(x)]
    return {"shapes": [list(a.shape) for a in out], "values": b"".join(cupy.asnumpy(a).tobytes() for a in out)}


if __name__ == "__main__":
    report.main()
