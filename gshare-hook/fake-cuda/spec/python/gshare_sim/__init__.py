"""PyTorch's operators compute on a simulated GPU: `gshare run --sim --compute` loads this package behind `import torch`.

The simulated driver's kernels take time and write nothing. Its device memory is memory of the process, so PyTorch's own CPU kernels can
work on it. `install` gives each operator with a CUDA kernel another one, for the dispatcher's key CUDA. Autograd, functorch, autocast and
the graphs of `torch.compile` stand above that key and stay as they are.

A call of an operator:

1. launches a kernel named `aten_OPERATOR`, with one block for 1024 elements of the largest argument. It passes the hook and takes its time
   on the current stream; a profile may say how long.
2. runs the CPU kernel on *twins* of its arguments: tensors of the host over the same bytes (`_memory`).
3. takes memory for new tensors from the CUDA allocator, so accounts, limits and errors are those of a GPU, and copies the result there.
   In-place forms have written already. An `out` tensor gets a copy, since the CPU kernel may resize its own.

Order: bytes change at the call, as the driver's copies do, and time passes on the stream. Where host functions are pending (a graph's
replay, a wait for a value), the call waits for its stream first. In a capture the operator becomes a kernel and a host function of the
graph, and a run on copies tells its shapes.

Some operators keep their CUDA implementation, since it launches no kernel: allocation, views, copies between host and device. Convolution,
recurrent layers and attention take PyTorch's native forms, not cuDNN's (`torch.backends.cudnn.enabled` is off). `_forms` has operators that
exist for CUDA only, `_random` CUDA's random numbers. An operator that a library adds, such as torchvision's `nms`, computes by its own CPU
kernel. Where a CPU kernel lacks float16 or bfloat16, the call computes in float32. Groups of torch.distributed with NCCL's name have Gloo
(`_collectives`).

Nothing is zero in silence. An operator without a CPU kernel raises `NotComputed` with its name. From the import of torch on, the driver
refuses every other kernel of the process (a CUDA extension, compiled Triton, CuPy) and says its name. Unless PyTorch's runtime library has
given that error to the program, the next operator raises `NotComputed` with the kernel's name, and the next copy to the host fails. Where
an operator of a graph fails in a replay, every later call fails. An untested release of PyTorch is refused.

Limits: values are the CPU's, so sums differ from a GPU's in order, and a missing synchronisation stays hidden. Operators whose sizes depend
on values cannot be captured, as on a GPU. `torch.compile` traces and differentiates as ever, and then runs the graph's operators
(backend `aot_eager`) where its default backend would make Triton kernels. Quantized layouts have no values.
"""

from __future__ import annotations

import re
from typing import Any

# Releases with the results of tests/op_db.py in docs/simulated-gpu.md.
KNOWN = ("2.15",)

_libraries: tuple[object, ...] = ()


class UnknownRelease(ImportError):
    """PyTorch's release was never tested with this package."""


class NotComputed(NotImplementedError):
    """An operator without values on a simulated GPU."""


def loaded(module: Any) -> None:
    """A module was imported that this package changes."""
    if module.__name__ == "torch":
        install()
    else:
        _guard(module)


def _guard(interpreter: Any) -> None:
    """Triton's interpreter computes with the bits of a bfloat16 as if they were an integer: it is to say so instead."""
    for name in ("unary_op", "binary_op", "ternary_op"):

        def guarded(builder: Any, first: Any, *rest: Any, real: Any = getattr(interpreter.InterpreterBuilder, name)) -> Any:
            if first.dtype.scalar.is_bf16():
                raise NotComputed("Triton's interpreter has no arithmetic of bfloat16: convert to tl.float32 in the kernel, or use a GPU")
            return real(builder, first, *rest)

        setattr(interpreter.InterpreterBuilder, name, guarded)


def install() -> None:
    """Gives PyTorch's operators their kernels in this process.

    Raises `UnknownRelease`, or `NotSimulated` on another driver.
    """
    global _libraries
    if _libraries:
        return
    import torch

    release = ".".join(re.findall(r"\d+", torch.__version__)[:2])
    if release not in KNOWN:
        raise UnknownRelease(
            f"--compute: PyTorch {torch.__version__} is not known to compute on a simulated GPU; known: {', '.join(KNOWN)}. Install one of "
            "these, or run without --compute"
        )
    if torch.version.cuda is None:
        # Built for the CPU alone: it computes anyway.
        return
    from . import _collectives, _kernels

    _libraries = (_kernels.install(), *_collectives.install())
