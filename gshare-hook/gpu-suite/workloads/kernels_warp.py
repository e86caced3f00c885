"""Kernels of warp, which reads their source from a file of their own."""

import warp


@warp.kernel
def scale(x: warp.array(dtype=float), by: float):
    i = warp.tid()
    x[i] = x[i] * by
