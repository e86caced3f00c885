"""Programs whose device memory goes to host memory and comes back while they live.

`parked.py CASE`: a framework's memory and steps, as a case of `report.py`. Before each step the program says `{"step": N}` and
waits for a line. A step is a row of launches with pauses, so that an order can come within it.
`parked.py blocks BYTES [whole]`: a program of the driver API that does what each line says; see `serve`.
"""

import ctypes
import sys
import time

import device
import report
from report import answer, case

STEPS, PARTS, PAUSE_SECONDS = 3, 15, 0.02
PATTERN_BYTES = 64 << 20
BLOCK = 64 << 20
LIBC = ctypes.CDLL(None)


def stepped(part, addresses, figures, copied, values=lambda: None):
    """Takes the steps of a program. Facts: copied bytes came back, addresses stayed, and the framework's figures of memory."""
    at, kept, right, seen = addresses(), True, copied(), []
    for step in range(STEPS):
        answer({"step": step})
        sys.stdin.readline()
        for _ in range(PARTS):
            part()
            time.sleep(PAUSE_SECONDS)
        kept, right = kept and addresses() == at, right and copied()
        seen.append(figures())
    return {"copied": right, "addresses kept": kept, "figures": seen, "values": values()}


def torch_steps(part_of):
    import torch

    host = torch.arange(PATTERN_BYTES // 4, dtype=torch.int32)
    held, zeros = host.to("cuda"), torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device="cuda")
    # Memory below 2 MiB stays on the device.
    small = host[:1000].to("cuda")
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(2048, 2048, generator=generator).to("cuda") for _ in range(2))
    part = part_of(x, y)

    def copied():
        same = torch.equal(held.cpu(), host) and torch.equal(small.cpu(), host[:1000])
        return same and not zeros.cpu().any().item()

    def figures():
        return [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]

    with torch.no_grad():
        return stepped(
            part, lambda: [t.data_ptr() for t in (held, zeros, small, x, y)], figures, copied, lambda: y.cpu().numpy().tobytes()
        )


@case
def torch():
    """Steps of a descent through PyTorch's allocator, with a temporary of 16 MiB in each."""
    return torch_steps(lambda x, y: lambda: y.sub_(1e-7 * (x @ y)))


@case
def triton():
    from kernels_triton import add

    return torch_steps(lambda x, y: lambda: add[(x.numel() // 1024,)](x, y, y, x.numel(), BLOCK=1024))


@case
def cupy():
    import cupy
    import numpy

    host = numpy.arange(PATTERN_BYTES // 4, dtype=numpy.int32)
    held, zeros, small = cupy.asarray(host), cupy.zeros(PATTERN_BYTES, dtype=cupy.uint8), cupy.asarray(host[:1000])
    x = cupy.asarray(host.astype(numpy.float32))
    pool = cupy.get_default_memory_pool()

    def copied():
        same = (cupy.asnumpy(held) == host).all() and (cupy.asnumpy(small) == host[:1000]).all()
        return bool(same) and not cupy.asnumpy(zeros).any()

    return stepped(
        lambda: cupy.subtract(x, x * cupy.float32(0.01), out=x),
        lambda: [a.data.ptr for a in (held, zeros, small, x)],
        lambda: [pool.used_bytes(), pool.total_bytes()],
        copied,
        lambda: cupy.asnumpy(x).tobytes(),
    )


@case
def jax():
    import jax
    import numpy
    from jax_gpu import gpu

    place = gpu()
    host = numpy.arange(PATTERN_BYTES // 4, dtype=numpy.int32)
    held = jax.device_put(host, place)
    state = [jax.device_put(host.astype(numpy.float32), place)]
    step = jax.jit(lambda x: x - x * 0.01)

    def part():
        state[0] = step(state[0])

    def figures():
        state[0].block_until_ready()
        return [place.memory_stats()[name] for name in ("bytes_in_use", "peak_bytes_in_use")]

    def copied():
        # An array keeps its copy on the host, and would answer with that.
        fresh = jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])
        return bool((numpy.asarray(fresh) == host).all())

    return stepped(
        part,
        lambda: [held.unsafe_buffer_pointer()],
        figures,
        copied,
        lambda: numpy.asarray(state[0]).tobytes(),
    )


@case
def vllm():
    """Requests to an engine in this process, whose weights and cache move."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import cases_vllm
    import torch

    engine = cases_vllm.engine(eager=True, utilisation=0.02)
    weights = engine.apply_model(lambda model: [weight.data for weight in model.parameters()])[0]
    host = [weight.cpu() for weight in weights]
    lengths = []

    def part():
        lengths.append(cases_vllm.answered(engine))

    def copied():
        return all(torch.equal(weight.cpu(), before) for weight, before in zip(weights, host, strict=True))

    def figures():
        return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), lengths[-1]]

    return stepped(part, lambda: [weight.data_ptr() for weight in weights], figures, copied)


@case
def driver():
    mine = Blocks(2 * BLOCK)
    launch, mark = mine.driver.spinner()

    def part():
        for _ in range(5):
            launch()
        mark()

    return stepped(part, lambda: [block.value for block in mine.blocks], lambda: [], mine.are_right)


class Blocks:
    """Device memory in blocks of 64 MiB, each full of a byte of its own, and page-locked host memory for one block.

    The memory is `whole`, or each block is an allocation.
    """

    def __init__(self, size, whole=False):
        self.driver, count = device.Driver(), -(-size // BLOCK)
        made = [self.driver.allocate(BLOCK * count)] if whole else [self.driver.allocate(BLOCK) for _ in range(count)]
        assert None not in made, f"out of memory: {made.count(None)} of {len(made)} allocations of {size} bytes"
        self.blocks = [ctypes.c_uint64(made[0].value + i * BLOCK) for i in range(count)] if whole else made
        for number, block in enumerate(self.blocks):
            self.driver.call("cuMemsetD8_v2", block, ctypes.c_ubyte(number % 251 + 1), ctypes.c_size_t(BLOCK))
        self.host = ctypes.c_void_p()
        self.driver.call("cuMemAllocHost_v2", ctypes.byref(self.host), ctypes.c_size_t(BLOCK))

    def out(self, block, size=BLOCK):
        self.driver.call("cuMemcpyDtoHAsync_v2", self.host, block, ctypes.c_size_t(size), None)

    def into(self, block):
        self.driver.call("cuMemcpyHtoDAsync_v2", block, self.host, ctypes.c_size_t(BLOCK), None)

    def wait(self):
        self.driver.call("cuCtxSynchronize")

    def are_right(self):
        expected = ctypes.create_string_buffer(BLOCK)
        for number, block in enumerate(self.blocks):
            self.out(block)
            self.wait()
            ctypes.memset(expected, number % 251 + 1, BLOCK)
            if LIBC.memcmp(self.host, expected, ctypes.c_size_t(BLOCK)) != 0:
                return False
        return True

    def copy(self):
        """Seconds for all blocks by plain copies: to the page-locked memory, and back."""
        seconds = {"out": 0.0, "in": 0.0}
        for block in self.blocks:
            for way, copy in (("out", self.out), ("in", self.into)):
                start = time.monotonic()
                copy(block)
                self.wait()
                seconds[way] += time.monotonic() - start
        return seconds


def serve(mine):
    """Answers lines: `copy` with `Blocks.copy`, `look` with the seconds for a copy of some bytes, `work` with those for 20 ms of
    kernels, `check` with whether all bytes are right."""
    launch, mark = mine.driver.spinner()

    def look():
        mine.out(mine.blocks[-1], 4)
        mine.wait()

    def work():
        for _ in range(20):
            launch()
        mark()()

    def seconds(call):
        start = time.monotonic()
        call()
        return {"seconds": time.monotonic() - start}

    answers = {
        "copy": mine.copy, "look": lambda: seconds(look), "work": lambda: seconds(work),
        "check": lambda: {"right": mine.are_right()},
    }
    answer({"ready": True})
    for line in sys.stdin:
        answer(answers[line.strip()]())


if __name__ == "__main__":
    if sys.argv[1] == "blocks":
        serve(Blocks(int(sys.argv[2]), whole="whole" in sys.argv))
    else:
        report.main()
