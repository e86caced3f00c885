"""A CUDA kernel of numba."""

import time

import numpy
from numba import cuda
from report import report


@cuda.jit
def saxpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i] + y[i]


n = 1 << 20
generator = numpy.random.default_rng(7)
x = cuda.to_device(generator.standard_normal(n).astype(numpy.float32))
y = cuda.to_device(numpy.zeros(n, dtype=numpy.float32))
saxpy[(n + 255) // 256, 256](numpy.float32(0.5), x, y)
cuda.synchronize()
start = time.perf_counter()
for _ in range(2000):
    saxpy[(n + 255) // 256, 256](numpy.float32(0.5), x, y)
cuda.synchronize()
report(y.copy_to_host().tobytes(), time.perf_counter() - start)
