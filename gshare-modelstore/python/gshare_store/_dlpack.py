"""DLPack 1.0 capsules over memory that something else owns."""

from __future__ import annotations

import ctypes

CPU, CUDA = 1, 2
READ_ONLY = 1
_NAME = b"dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
    ("flags", ctypes.c_uint64),
    ("dl_tensor", _Tensor),
]

# What is exported, by address; its owner stays alive with it.
_exported: dict[int, tuple[object, ...]] = {}

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# By address: a capsule that is being destroyed must not be referred to.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


@_Deleter
def _delete(address: int) -> None:
    _exported.pop(address, None)


@_Deleter
def _destroy(capsule: int) -> None:
    # A consumer renames what it took; then the consumer deletes it.
    if _is_valid(capsule, _NAME):
        _exported.pop(_pointer(capsule, _NAME), None)


def capsule(
    owner: object, data: int, shape: tuple[int, ...], code: int, bits: int, device: tuple[int, int]
) -> object:
    """A read-only tensor of C order; ``owner`` lives as long as it does."""
    rank = len(shape)
    dims, strides = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)()
    step = 1
    for at in reversed(range(rank)):
        strides[at] = step
        step *= max(shape[at], 1)
    managed = _Managed(major=1, minor=0, deleter=_delete, flags=READ_ONLY)
    tensor = managed.dl_tensor
    tensor.data, tensor.device, tensor.ndim = data, _Device(*device), rank
    tensor.dtype = _DataType(code, bits, 1)
    tensor.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    address = ctypes.addressof(managed)
    _exported[address] = (managed, dims, strides, owner)
    return _api.PyCapsule_New(address, _NAME, ctypes.cast(_destroy, ctypes.c_void_p))


def to_torch(tensor: object) -> object:
    """A PyTorch tensor of the same memory."""
    import torch

    # PyTorch asks for what it understands; from 2.9 on that is DLPack 1.0. Given the capsule, older ones take it, too,
    # or say that they do not.
    return torch.from_dlpack(tensor)
