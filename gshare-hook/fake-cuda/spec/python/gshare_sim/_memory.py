"""Tensors of the host over device memory, and back.

A simulated device's memory is this process's memory at the same address. One tensor of each type spans the whole address space, and the
*twin* of a device tensor is a strided view of it: same bytes, shape and strides, on the CPU. A twin owns nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

CPU = torch.device("cpu")
# Not 0, which a storage takes for no memory; a multiple of each element's size.
_BASE = 4096
_whole = torch._C._construct_storage_from_data_pointer(_BASE, CPU, 1 << 47)
_as_strided = torch._C._VariableFunctions.as_strided
_empty_strided = torch._C._VariableFunctions.empty_strided


class _Spaces(dict[torch.dtype, Tensor]):
    def __missing__(self, dtype: torch.dtype) -> Tensor:
        # Outlives each mode of the program.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            self[dtype] = space = torch.empty(0, dtype=dtype).set_(_whole, 0, (0,), (1,))
        return space


_spaces = _Spaces()


def twin(tensor: Tensor) -> Tensor:
    """The tensor of the host with the bytes of a device tensor."""
    dtype, at = tensor.dtype, tensor.data_ptr()
    if at:
        host = _as_strided(_spaces[dtype], tensor.size(), tensor.stride(), (at - _BASE) // tensor.itemsize)
    else:
        host = _empty_strided(tensor.size(), tensor.stride(), dtype=dtype)
    if dtype.is_complex and tensor.is_conj():
        host = torch._conj(host)
    if tensor.is_neg():
        host = torch._neg_view(host)
    return host


def on_device(result: Any, device: int) -> Any:
    """A result of a CPU kernel on the device: new tensors of the CUDA allocator, with the result's shape, strides and bytes."""
    if isinstance(result, Tensor):
        if result.layout is not torch.strided:
            return _sparse_on_device(result, device)
        stride = result.stride()
        if 0 in stride:
            result = result.contiguous()
            stride = result.stride()
        out = _empty_strided(result.size(), stride, dtype=result.dtype, device=device)
        if out.data_ptr():
            twin(out).copy_(result)
        return out
    if isinstance(result, (list, tuple)):
        return [on_device(each, device) for each in result]
    return result


def _sparse_on_device(result: Tensor, device: int) -> Tensor:
    parts: tuple[Tensor, ...]
    if result.layout is torch.sparse_coo:
        parts = on_device((result._indices(), result._values()), device)
        return torch.sparse_coo_tensor(*parts, result.size(), is_coalesced=result.is_coalesced(), check_invariants=False)
    rows = result.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed, plain = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
    parts = on_device((getattr(result, compressed)(), getattr(result, plain)(), result.values()), device)
    return torch.sparse_compressed_tensor(*parts, result.size(), layout=result.layout, check_invariants=False)


def copied(value: Any) -> Any:
    """Tensors with bytes of their own."""
    if isinstance(value, Tensor):
        return value.clone()
    return [copied(each) for each in value] if isinstance(value, list) else value


def fresh(out: Any) -> Any:
    """New tensors of the host like these."""
    if isinstance(out, Tensor):
        return _empty_strided(out.size(), out.stride(), dtype=out.dtype)
    return [fresh(each) for each in out]


def flat(value: Any) -> list[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in flat(each)] if isinstance(value, (list, tuple)) else []
