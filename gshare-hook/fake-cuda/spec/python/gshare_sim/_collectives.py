"""Collectives of torch.distributed on simulated devices: Gloo's, over the bytes of device memory, under NCCL's name.

A group with the backend `nccl` gets Gloo's backend. A collective launches a kernel, such as `nccl_allreduce`, for its time, and Gloo's threads
then write to the twins of its tensors. The result's `wait` waits for Gloo and raises its error; `torch.cuda.synchronize()` knows nothing of
Gloo's threads. In a capture the collective becomes a host function of the graph, and the peers' replays meet.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, Callable

import torch
from torch._C import _distributed_c10d as c10d
from torch._ops import OpOverload

from . import NotComputed, _device, _memory
from ._kernels import Arguments
from ._memory import CPU

GPU = torch.device("cuda")
# Other names of NCCL's backend.
NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
NOT_IN_NCCL = ("recv_any_source_", "monitored_barrier_")
# NCCL counts the elements of these, and Gloo compares shapes.
BY_ELEMENTS = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "gather_into_tensor_"
)  # fmt: skip
# A group of the host for each group, with the same backend.
_hosts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _host_of(group: Any) -> Any:
    host = _hosts.get(group)
    if host is None:
        backend = group._get_backend(GPU)
        inner = backend.wrapped_pg if isinstance(backend, c10d._ProcessGroupWrapper) else backend
        if not isinstance(inner, c10d.ProcessGroupGloo):
            raise NotComputed(f"the backend {inner.name()} of torch.distributed has no values on a simulated GPU: use nccl or gloo")
        _hosts[group] = host = c10d.ProcessGroup(group.get_group_store(), group.rank(), group.size())
        host._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        host._register_backend(CPU, c10d.ProcessGroup.BackendType.GLOO, backend)
    return host


def _work_of(result: Any) -> Any:
    return c10d.Work.unbox(result[-1] if isinstance(result, (list, tuple)) else result)


# PyTorch's C++ does not keep an object of Python alive, and would wait for ever without these methods.
_waited_for: set[Any] = set()


class _Work(c10d.Work):
    """A work of Gloo whose results are the tensors of the device, which live as long as it."""

    def __init__(self, of: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.of = of
        self.outputs = outputs
        _waited_for.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _waited_for.discard(self)
        # An error of Gloo's future would be lost; its work raises.
        return bool(self.of.wait(timeout))

    def get_future(self) -> Any:
        _waited_for.discard(self)
        try:
            future = self.of.get_future()
        except RuntimeError:
            # Gloo has none for `reduce_scatter` and between two ranks.
            self.wait()
            return _done(self.outputs)
        return future.then(lambda done: (done.value(), self.outputs)[1])

    def is_completed(self) -> bool:
        return bool(self.of.is_completed())

    def result(self) -> list[torch.Tensor]:
        return self.outputs


def _flat(value: Any) -> Any:
    if isinstance(value, list):
        return [_flat(each) for each in value]
    return value.view(-1) if isinstance(value, torch.Tensor) and value.is_contiguous() else value


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def kernel_of(op: OpOverload) -> Callable[..., Any]:
    """The CUDA kernel of a collective."""
    name = op._schema.name.removeprefix("c10d::")
    position = {argument.name: i for i, argument in enumerate(op._schema.arguments)}
    at, reduced = position["process_group"], position.get("reduce_op")
    returns = len(op._schema.returns)
    timed = 0

    def kernel(*args: Any) -> Any:
        nonlocal timed
        found = Arguments(mixed=False)
        host_args = [value if i == at else found.host(value) for i, value in enumerate(args)]
        if name in BY_ELEMENTS:
            host_args = [_flat(value) for value in host_args]
        host_args[at] = _host_of(c10d.ProcessGroup.unbox(args[at])).boxed()
        # Gloo would leave the tensors as they are.
        if reduced is not None and c10d.ReduceOp.unbox(args[reduced]) == c10d.ReduceOp.PREMUL_SUM:
            raise NotComputed(f"c10d::{name} with PREMUL_SUM has no values on a simulated GPU: multiply, and use SUM")
        if not timed:
            timed = _device.kernel(f"nccl_{name.strip('_')}")
        stream = _device.begin(timed, found.device, found.elements)

        def start() -> Any:
            try:
                return _work_of(op(*host_args))
            except RuntimeError as error:
                raise NotComputed(f"c10d::{name} has no values on a simulated GPU, where Gloo stands for NCCL: {error}") from error

        outputs = _memory.flat(args[0])
        if stream is not None:
            _device.record(stream, lambda: start().wait())
            work = c10d._create_work_from_future(_done(outputs))
        else:
            work = _Work(start(), outputs)
        return (args[0], work.boxed()) if returns == 2 else work.boxed()

    kernel.__name__ = name
    return kernel


def _refused(name: str) -> Callable[..., Any]:
    def kernel(*_: Any) -> Any:
        raise NotComputed(f"c10d::{name} is not in NCCL, so it has no values on a simulated GPU")

    return kernel


def install() -> tuple[torch.library.Library, ...]:
    """Registers all kernels, where PyTorch has collectives. They stay while the library object lives."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed import distributed_c10d

    library = torch.library.Library("c10d", "IMPL")
    for registered in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = registered.rpartition("::")
        # A check of one tensor, whose kernel the driver refuses.
        if space == "c10d" and name != "check_for_nan":
            op = getattr(torch.ops.c10d, name).default
            library.m.impl(name, "CUDA", _refused(name) if name in NOT_IN_NCCL else kernel_of(op), False)  # type: ignore[union-attr]

    def create(options: Any, _: Any) -> Any:
        return distributed_c10d._create_gloo_process_group(options, None)

    # Of a group that Gloo makes anew, since it has no communicator to split.
    c10d.ProcessGroupGloo.perform_nocolor_split = lambda *_: None  # type: ignore[attr-defined]
    plugin = distributed_c10d.Backend._BackendPlugin(create, True)
    distributed_c10d.Backend._plugins.update({name.upper(): plugin for name in NAMES})
    return (library,)
