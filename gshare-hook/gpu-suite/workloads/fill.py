"""Allocates until memory is full, and reports every view of it: `fill.py KIND [BLOCK_BYTES]`.

Answers one object: allocated bytes, the final error, the driver's and NVML's views at that moment, the
framework's own, if any, and whether an allocation works after the memory was returned.
"""

import sys

import device
from report import answer

MOST_BLOCKS = 1 << 12


def fill(allocate, free, errors, block):
    """Allocates blocks until one of `errors`; gives the answer of the file's head."""
    blocks, refused = [], "nothing"
    try:
        while len(blocks) < MOST_BLOCKS:
            blocks.append(allocate(block))
    except errors as error:
        refused = f"{type(error).__name__}: {error}"[:300]
    held = {"allocated": len(blocks) * block, "refused": refused, "block": block, **views()}
    blocks.clear()
    free()
    held["again"] = allocate(block) is not None
    return held


def views():
    driver = device.Driver()
    free, total = driver.memory()
    return {"driver": {"total": total, "free": free, "used": total - free}, "nvml": device.Nvml().memory()}


def driver(block):
    mine, blocks = device.Driver(), []

    def allocate(size):
        pointer = mine.allocate(size)
        if pointer is None:
            raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY")
        blocks.append(pointer)
        return pointer

    def free():
        while blocks:
            mine.free(blocks.pop())

    return fill(allocate, free, MemoryError, block)


def torch(block):
    import torch

    def allocate(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def free():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    seen = fill(allocate, free, torch.cuda.OutOfMemoryError, block)
    seen["backend"] = torch.cuda.get_allocator_backend()
    seen["framework_total"] = torch.cuda.mem_get_info()[1]
    return seen


def cupy(block):
    import cupy

    pool = cupy.get_default_memory_pool()
    seen = fill(
        lambda size: cupy.empty(size, dtype=cupy.uint8), pool.free_all_blocks, cupy.cuda.memory.OutOfMemoryError, block
    )
    seen["framework_total"] = cupy.cuda.runtime.memGetInfo()[1]
    return seen


def jax(block):
    """JAX takes 75 % of the visible memory at its start, and allocates everything from it."""
    import jax
    import jax_gpu

    place = jax_gpu.gpu()
    jax.device_put(1.0, place).block_until_ready()
    pool = place.memory_stats()["bytes_limit"]

    def allocate(size):
        return jax.numpy.zeros(size, dtype=jax.numpy.uint8, device=place).block_until_ready()

    seen = fill(allocate, lambda: None, Exception, block)
    seen["pool"] = pool
    return seen


KINDS = {f.__name__: f for f in (driver, torch, cupy, jax)}

if __name__ == "__main__":
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 64 << 20
    answer(KINDS[sys.argv[1]](size))
