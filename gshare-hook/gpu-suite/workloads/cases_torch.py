"""Cases of PyTorch in one process.

Facts are shapes, copies that came back, errors, and memory as PyTorch counts it; values are what kernels made.
"""

import report
import torch
from report import case

DEVICE = "cuda"


def values(*tensors):
    """The bytes of tensors, in order."""
    torch.cuda.synchronize()
    return b"".join(t.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def facts(*tensors, **more):
    shapes, types = [list(t.shape) for t in tensors], [str(t.dtype) for t in tensors]
    return {"shapes": shapes, "types": types, **more, "values": values(*tensors)}


def seeded():
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)


@case
def eager():
    """Copies, pinned memory, element-wise kernels, reductions, sorting, indexing, streams and events."""
    seeded()
    host = torch.arange(1 << 16, dtype=torch.float32)
    x = host.to(DEVICE)
    pinned = host.pin_memory().to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    copied = torch.equal(x.cpu(), host) and torch.equal(pinned.cpu(), host)
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        y = torch.sin(x) * 2 + x.sqrt()
        event.record()
    event.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    ordered, total = torch.sort(y), y.sum()
    picked = torch.where(x > 5, x, y)[:100].clone()
    return facts(y, ordered.values, total, picked, copied=copied, name=torch.cuda.get_device_name(0))


@case
def matmul():
    """cuBLAS and cuBLASLt: products in three types, with a bias, in batches."""
    seeded()
    out = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a, b = torch.randn(256, 256, device=DEVICE, dtype=dtype), torch.randn(256, 256, device=DEVICE, dtype=dtype)
        out += [a @ b, torch.addmm(a[0], a, b), torch.bmm(a.expand(4, -1, -1), b.expand(4, -1, -1))]
    return facts(*out)


@case
def conv():
    """cuDNN: convolution forwards and backwards, batch normalisation, pooling."""
    seeded()
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    ).to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE, requires_grad=True)
    out = layers(x)
    out.sum().backward()
    return facts(out, x.grad, layers[0].weight.grad)


@case
def lstm():
    """cuDNN's recurrent layers."""
    seeded()
    layer = torch.nn.LSTM(32, 64, num_layers=2, batch_first=True).to(DEVICE)
    out, (hidden, cell) = layer(torch.randn(4, 10, 32, device=DEVICE))
    return facts(out, hidden, cell)


@case
def sdpa():
    """Attention through PyTorch's fused kernels and through plain products."""
    seeded()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 4, 128, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
    out = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return facts(*out)


@case
def fft():
    """cuFFT: complex, real and two-dimensional transforms."""
    seeded()
    x = torch.randn(64, 128, device=DEVICE)
    return facts(torch.fft.rfft(x).real, torch.fft.fft2(x).real, torch.fft.irfft(torch.fft.rfft(x)))


@case
def linalg():
    """cuSOLVER: solve, Cholesky, QR, without the checks that read a kernel's result."""
    seeded()
    a = torch.randn(64, 64, device=DEVICE)
    symmetric = a @ a.T + 64 * torch.eye(64, device=DEVICE)
    solved, _ = torch.linalg.solve_ex(symmetric, a, check_errors=False)
    lower, _ = torch.linalg.cholesky_ex(symmetric, check_errors=False)
    q, r = torch.linalg.qr(a)
    return facts(solved, lower, q, r)


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)
    ).to(DEVICE)


def train(model, step_model, steps=10):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = torch.randn(64, 256, generator=generator).to(DEVICE)
        labels = torch.randint(0, 10, (64,), generator=generator).to(DEVICE)
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(step_model(inputs), labels).backward()
        optimizer.step()
    return list(model.parameters())


@case
def training():
    """Ten steps of AdamW, and memory as PyTorch's allocator counts it at its peak."""
    seeded()
    torch.cuda.reset_peak_memory_stats()
    model = network()
    return facts(*train(model, model), peak=torch.cuda.max_memory_allocated())


@case
def graph():
    """A captured graph of a forward pass, replayed."""
    seeded()
    model, inputs = network().eval(), torch.randn(64, 256, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            model(inputs)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = model(inputs)
    for _ in range(20):
        captured.replay()
    return facts(out)


@case
def compiled():
    """`torch.compile` forwards and backwards: kernels that Triton makes."""
    seeded()
    torch._dynamo.reset()
    model = network()
    step_model = torch.compile(model)
    train(model, step_model, steps=1)
    report.count_from_here()
    return facts(*train(model, step_model, steps=3))


@case
def compiled_graphs():
    """`torch.compile(mode="reduce-overhead")`: compiled kernels in CUDA graphs."""
    seeded()
    torch._dynamo.reset()
    model = network().eval()
    fast = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        # Compiled, warmed up and captured by then.
        for turn in range(6):
            if turn == 3:
                torch.cuda.synchronize()
                report.count_from_here()
            out = fast(torch.ones(64, 256, device=DEVICE)).clone()
    return facts(out)


@case
def allocator():
    """Allocations that grow, are freed and grow again, under the allocator that the environment chooses; out of memory."""
    seeded()
    backend, blocks = torch.cuda.get_allocator_backend(), []
    for size in (1, 3, 20, 64, 200):
        blocks.append(torch.full((size << 20,), 1, dtype=torch.uint8, device=DEVICE))
    held = torch.cuda.memory_allocated()
    blocks.clear()
    torch.cuda.empty_cache()
    again = torch.zeros(300 << 20, dtype=torch.uint8, device=DEVICE)
    try:
        torch.empty(1 << 44, dtype=torch.uint8, device=DEVICE)
        refused = "nothing"
    except torch.cuda.OutOfMemoryError as error:
        refused = type(error).__name__
    return facts(again[:16], backend=backend, held=held, refused=refused)


@case
def triton_kernel():
    """A kernel that Triton compiles and its own launcher starts."""
    from kernels_triton import add

    seeded()
    n = 1 << 16
    x, y = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    out = torch.empty_like(x)
    for _ in range(10):
        add[(n // 1024,)](x, y, out, n, BLOCK=1024)
    return facts(out)


if __name__ == "__main__":
    report.main()
