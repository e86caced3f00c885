"""Keeps the device busy with one kind of work, never waiting for more than the batch before: `busy.py KIND [STEPS]`.

STEPS is the length of a batch; without it a batch takes about 4 ms. Answers `{"ready": true, "steps": ...}` when it is warm. Then
each line `COUNT SECONDS SETTLE` on standard input makes it work for SETTLE seconds and then for COUNT windows of SECONDS, one
after the other, and answer with one object for each window: steps that the device has finished, seconds, and on a simulated
device the seconds in which it worked for this process, by its own account. `hold` makes it work until it is killed.
"""

import os
import sys
import time

from report import answer, device_work

# A batch is the counted unit: short against a window, long against a call.
BATCH_SECONDS = 0.004
MOST_STEPS = 256


def torch_loop(step):
    import torch

    def batch(steps):
        for _ in range(steps):
            step()
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return batch


def torch_matmul():
    import torch

    a, b = (torch.randn(2048, 2048, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return torch_loop(lambda: torch.matmul(a, b, out=out))


def torch_conv():
    import torch

    torch.backends.cudnn.benchmark = False
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda").requires_grad_(False)
    image = torch.randn(32, 64, 56, 56, device="cuda")
    return torch_loop(lambda: layer(image))


def torch_training():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048)).to("cuda")
    optimizer, inputs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(2048, 2048, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(inputs).sum().backward()
        optimizer.step()

    return torch_loop(step)


def torch_graph():
    import torch

    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    out, side, graph = torch.empty_like(a), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        torch.matmul(a, b, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(4):
            torch.matmul(a, b, out=out)
    return torch_loop(graph.replay)


def triton():
    import torch
    from kernels_triton import add

    n = 1 << 24
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    return torch_loop(lambda: add[(n // 1024,)](x, y, out, n, BLOCK=1024))


def cupy():
    import cupy

    x = cupy.zeros(1 << 24, dtype=cupy.float32)
    out = cupy.empty_like(x)

    def batch(steps):
        for _ in range(steps):
            cupy.multiply(x, 2.0, out=out)
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        return event.synchronize

    return batch


def jax():
    # Several of these share the device: none may take three quarters of it at its start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax_gpu

    jax_gpu.gpu()
    # JAX takes some 50 us of the host for a step, so its kernels are far longer: the device limits the loop.
    matrix = jax.numpy.zeros((4096, 4096))
    step = jax.jit(lambda x: x @ matrix)

    def batch(steps):
        out = matrix
        for _ in range(steps):
            out = step(out)
        return out.block_until_ready

    return batch


def numba():
    import numpy
    from numba import cuda

    @cuda.jit
    def scale(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = x[i] * numpy.float32(1.0001)

    x = cuda.to_device(numpy.ones(1 << 24, dtype=numpy.float32))

    def batch(steps):
        for _ in range(steps):
            scale[(1 << 24) // 256, 256](x)
        event = cuda.event(timing=False)
        event.record()
        return event.synchronize

    return batch


def driver():
    import device

    launch, mark = device.Driver().spinner()

    def batch(steps):
        for _ in range(steps):
            launch()
        return mark()

    return batch


def calibrate(batch):
    """Number of steps for a batch of the right length. The first batches load modules and are not counted."""
    for _ in range(3):
        batch(2)()
    start = time.monotonic()
    batch(8)()
    return max(1, min(MOST_STEPS, round(BATCH_SECONDS / ((time.monotonic() - start) / 8))))


class Worker:
    """Counts batches finished by the device. One batch is always queued behind the awaited batch."""

    def __init__(self, batch, steps):
        self.batch, self.steps, self.pending = batch, steps, None

    def turn(self):
        following = self.batch(self.steps)
        if self.pending is not None:
            self.pending()
        self.pending = following

    def window(self, seconds):
        work, start, batches = device_work(), time.monotonic(), 0
        while (now := time.monotonic()) - start < seconds:
            self.turn()
            batches += 1
        after, now = device_work(), time.monotonic()
        busy = None if work is None else (after["busy_ns"] - work["busy_ns"]) / 1e9
        return {"steps": batches * self.steps, "seconds": now - start, "busy": busy}

    def rest(self):
        if self.pending is not None:
            self.pending()
            self.pending = None


KINDS = {f.__name__: f for f in (torch_matmul, torch_conv, torch_training, torch_graph, triton, cupy, jax, numba, driver)}


def main():
    batch = KINDS[sys.argv[1]]()
    measured = calibrate(batch)
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else measured
    worker = Worker(batch, steps)
    answer({"ready": True, "steps": steps})
    for line in sys.stdin:
        words = line.split()
        if words == ["hold"]:
            while True:
                worker.turn()
        count, seconds, settle = int(words[0]), float(words[1]), float(words[2])
        worker.window(settle)
        answer([worker.window(seconds) for _ in range(count)])
        worker.rest()


if __name__ == "__main__":
    main()
