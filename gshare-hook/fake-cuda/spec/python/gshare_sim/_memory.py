"""Tensors of the host over device memory, and back.

A simulated device's memory is this process's memory at the same address. One tensor of each type spans the whole address space, and the
*twin* of a device tensor is a strided view of it: same bytes, shape and strides, on the CPU. A twin owns nothing.
"""

from __future__ import annotations

from typing import Any, cast

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
    if tensor.layout is not torch.strided:
        return _sparse(tensor, *(twin(part) for part in _parts(tensor)))
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
            return _sparse(result, *(on_device(part, device) for part in _parts(result)))
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


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _sparse(like: Tensor, *parts: Tensor) -> Tensor:
    make: Any = torch.sparse_compressed_tensor
    if like.layout is torch.sparse_coo:
        make = torch.sparse_coo_tensor
        return cast(Tensor, make(*parts, like.size(), is_coalesced=like.is_coalesced(), check_invariants=False))
    return cast(Tensor, make(*parts, like.size(), layout=like.layout, check_invariants=False))


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
