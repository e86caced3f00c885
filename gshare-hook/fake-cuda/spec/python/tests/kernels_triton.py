"""Triton reads its kernels from a file."""

import triton
import triton.language as tl


@triton.jit
def double(x, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < count)
    tl.store(out + places, value + value, mask=places < count)
