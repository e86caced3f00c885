"""Zero-copy tensors from the gshare model store.

    import gshare_store, numpy
    with gshare_store.connect("/run/gshare/store.sock") as store:
        model = store.get("resnet50")
        weights = {name: numpy.from_dlpack(tensor) for name, tensor in model.items()}

A tensor speaks DLPack 1.0 with its read-only flag and NumPy's array interface; one in memory of a GPU
(``store.get("resnet50", tier=gshare_store.GPU)``) DLPack and ``__cuda_array_interface__``, for CuPy, Numba and PyTorch, in the primary
context of the device, which frameworks use. ``model.state_dict()`` gives PyTorch tensors by name. All of them read memory that
every client of the store shares: an in-place operation of a framework that ignores the read-only flag (PyTorch does) ends in
a fault of this process. In host memory the kernel lets no process write; on a GPU only this map is read-only, which protects
against mistakes, and not against a process that calls the driver itself. A program that wants to write makes a copy.

The memory stays mapped for as long as any tensor lives, also when the store is gone.

A program that is not to be changed gets its weights from the store by ``gshare run --shim -- python app.py``: ``torch.load(path)`` and
``safetensors.torch.load_file(path)`` then give tensors in maps that are private to the process (``model.private()``), which may be
written: ``gshare_store/shim.py`` says what is served and what is loaded as ever. The directory of
``sitecustomize.py`` first on PYTHONPATH does the same without ``gshare run``, with the store's socket in GSHARE_STORE.

Needs libgshare_store.so: named by GSHARE_STORE_LIBRARY, beside this file, in lib/gshare of the same prefix, or where the
loader finds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping

from . import _dlpack

__all__ = ["GPU", "HOST", "Access", "Model", "Store", "StoreError", "Tensor", "connect"]

# Name, code and bits of DLPack, type string of NumPy (None where it has no such type); by the store's number.
_DTYPES = [
    ("BOOL", 6, 8, "|b1"),
    ("U8", 1, 8, "|u1"),
    ("I8", 0, 8, "|i1"),
    ("F8_E5M2", 12, 8, None),
    ("F8_E4M3", 10, 8, None),
    ("F8_E8M0", 14, 8, None),
    ("I16", 0, 16, "<i2"),
    ("U16", 1, 16, "<u2"),
    ("F16", 2, 16, "<f2"),
    ("BF16", 4, 16, None),
    ("I32", 0, 32, "<i4"),
    ("U32", 1, 32, "<u4"),
    ("F32", 2, 32, "<f4"),
    ("C64", 5, 64, "<c8"),
    ("F64", 2, 64, "<f8"),
    ("I64", 0, 64, "<i8"),
    ("U64", 1, 64, "<u8"),
    ("F4", 17, 4, None),
    ("F6_E2M3", 15, 6, None),
    ("F6_E3M2", 16, 6, None),
    # A type that this version does not know: bytes without a meaning here.
    ("OTHER", 3, 8, None),
]
_BY_TYPESTR = {typestr: number for number, (_, _, _, typestr) in enumerate(_DTYPES) if typestr}
_TEXT = 512
GPU, HOST = 0, 1
# A code of `StoreError`: the model is in use.
IN_USE = 12


class Access:
    """Who may read a model."""

    PRIVATE, GROUP, PUBLIC = 0, 1, 2


class StoreError(RuntimeError):
    """The store refuses, or is gone; ``code`` is a number of ``gshare_store.h``, or None."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class _CTensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint64),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("rank", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("hash", ctypes.c_uint8 * 32),
        ("dtype", ctypes.c_uint8),
    ]


def _load() -> ctypes.CDLL:
    named = os.environ.get("GSHARE_STORE_LIBRARY")
    here, file = pathlib.Path(__file__).resolve(), "libgshare_store.so"
    # lib/python3.N/site-packages/gshare_store/__init__.py: lib/gshare is where wheel and packages have the libraries.
    places = [here.parent / file, *(lib / "gshare" / file for lib in list(here.parents)[3:4])]
    library = ctypes.CDLL(named or next((str(place) for place in places if place.exists()), file))
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32
    for name, result, arguments in [
        ("gshare_store_connect", pointer, [text, text, size]),
        ("gshare_store_close", None, [pointer]),
        ("gshare_store_get", pointer, [pointer, text, u32, u32, text, size]),
        ("gshare_model_release", None, [pointer]),
        ("gshare_store_put_file", i32, [pointer, text, i32, u32, text, size]),
        ("gshare_store_put", i32, [pointer, text, u32, ctypes.POINTER(_CTensor), size, text, size]),
        ("gshare_store_evict", i32, [pointer, text, i32, text, size]),
        ("gshare_model_open", i32, [pointer, text, size]),
        ("gshare_model_tensors", u64, [pointer]),
        ("gshare_model_tensor", i32, [pointer, u64, ctypes.POINTER(_CTensor)]),
        ("gshare_model_bytes", u64, [pointer]),
        ("gshare_model_content", None, [pointer, ctypes.POINTER(ctypes.c_uint8)]),
        ("gshare_model_descriptor", i32, [pointer]),
        ("gshare_model_map", u64, [pointer, u32, text, size]),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_library: ctypes.CDLL | None = None


def _lib() -> ctypes.CDLL:
    global _library
    if _library is None:
        _library = _load()
    return _library


def connect(path: str | os.PathLike[str] | None = None) -> "Store":
    """Connects to the store at ``path`` (else GSHARE_STORE, else GSHARE_STORE_SOCKET, else /run/gshare/store.sock)."""
    named = path or os.environ.get("GSHARE_STORE") or os.environ.get("GSHARE_STORE_SOCKET")
    return Store(os.fspath(named or "/run/gshare/store.sock"))


class Store:
    """A connection. Models that came over it outlive it."""

    def __init__(self, path: str) -> None:
        self._handle: int | None = None
        error = ctypes.create_string_buffer(_TEXT)
        handle = _lib().gshare_store_connect(path.encode(), error, _TEXT)
        if not handle:
            raise StoreError(error.value.decode(errors="replace"))
        self._handle = handle

    def close(self) -> None:
        """Ends the connection."""
        if self._handle:
            _lib().gshare_store_close(self._handle)
        self._handle = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        if not self._handle:
            raise StoreError("the connection is closed")
        return self._handle

    def _call(self, function: str, *arguments: object) -> None:
        error = ctypes.create_string_buffer(_TEXT)
        code = getattr(_lib(), function)(self._open(), *arguments, error, _TEXT)
        if code:
            raise StoreError(error.value.decode(errors="replace"), code)

    def get(self, name: str, *, tier: int = HOST, device: int = 0, timeout: float = 60.0) -> "Model":
        """Takes a reference to a model, which the last of its tensors gives back. Waits ``timeout`` seconds for a load.

        The first look at its tensors maps it: with tier ``GPU`` on ``device``, the store's GPU as this process numbers it.
        """
        error = ctypes.create_string_buffer(_TEXT)
        wait = min(int(timeout * 1000), 2**32 - 1)
        handle = _lib().gshare_store_get(self._open(), name.encode(), tier, wait, error, _TEXT)
        if not handle:
            raise StoreError(error.value.decode(errors="replace"))
        return Model(handle, device if tier == GPU else None)

    def put_file(self, name: str, path: str | os.PathLike[str], *, access: int = Access.PRIVATE) -> None:
        """Loads a safetensors file into the store, which keeps it as the model's source."""
        with open(path, "rb") as file:
            self._call("gshare_store_put_file", name.encode(), file.fileno(), access)

    def put(self, name: str, arrays: Mapping[str, object], *, access: int = Access.PRIVATE) -> None:
        """Stores arrays (NumPy's, or anything with ``__array_interface__``, C-contiguous) under one name."""
        tensors = (_CTensor * len(arrays))()
        keep: list[object] = []
        for tensor, (key, array) in zip(tensors, arrays.items()):
            about = array.__array_interface__
            number = _BY_TYPESTR.get(about["typestr"])
            if number is None:
                raise TypeError(f"{key}: no tensor of the store is of type {about['typestr']}")
            size = _DTYPES[number][2] // 8
            shape = tuple(about["shape"])
            if about.get("strides") not in (None, _contiguous(shape, size)):
                raise ValueError(f"{key}: not C-contiguous")
            text = key.encode()
            name_buffer, dims = ctypes.create_string_buffer(text), (ctypes.c_uint64 * len(shape))(*shape)
            keep += [name_buffer, dims, array]
            count = 1
            for dimension in shape:
                count *= dimension
            tensor.name, tensor.name_bytes = ctypes.addressof(name_buffer), len(text)
            tensor.shape, tensor.rank = dims, len(shape)
            tensor.data, tensor.bytes, tensor.dtype = about["data"][0], count * size, number
        self._call("gshare_store_put", name.encode(), access, tensors, len(arrays))

    def evict(self, name: str, *, forget: bool = False) -> None:
        """Takes a model out of memory; with ``forget`` its name is free after that."""
        self._call("gshare_store_evict", name.encode(), int(forget))


def _contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    strides: list[int] = []
    for dimension in reversed(shape):
        strides.insert(0, size)
        size *= max(dimension, 1)
    return tuple(strides)


class _Reference:
    """A model's reference; its tensors hold it, and so do arrays made of them."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._release = _lib().gshare_model_release
        self._process, self._this_process = os.getpid(), os.getpid

    def __del__(self) -> None:
        # A child that was forked has the tensors, too, but the reference is its parent's.
        if self._this_process() == self._process:
            self._release(self.handle)


class _PrivateMap(mmap.mmap):
    """Memory that holds the model whose pages it shows."""

    reference: _Reference


class Tensor:
    """A read-only tensor in shared memory; ``device`` is the number of its GPU, None in host memory."""

    def __init__(self, reference: _Reference, about: _CTensor, device: int | None, arena: int) -> None:
        self._reference = reference
        self.name = ctypes.string_at(about.name, about.name_bytes).decode()
        self.shape = tuple(about.shape[: about.rank])
        self.dtype, self._code, self._bits, self._typestr = _DTYPES[about.dtype]
        self.nbytes, self.offset = about.bytes, about.offset
        self.hash = bytes(about.hash).hex()
        self.device = device
        self._data = (about.data or 0) if device is None else arena + about.offset

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {self.shape}, read-only)"

    @property
    def __array_interface__(self) -> dict[str, object]:
        if self.device is not None:
            raise AttributeError("the tensor is in memory of a GPU")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if self.device is None:
            raise AttributeError("the tensor is in host memory")
        # Nothing is under way on any stream: the model was complete before it was handed out. Empty arrays are at 0.
        return self._interface() | {"stream": None}

    def _interface(self) -> dict[str, object]:
        if self._typestr is None:
            raise AttributeError(f"array interfaces have no type for {self.dtype}; use DLPack")
        data = self._data if self.nbytes or self.device is None else 0
        return {"version": 3, "shape": self.shape, "typestr": self._typestr, "data": (data, True), "strides": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_dlpack.CPU, 0) if self.device is None else (_dlpack.CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule that says "read-only". Before DLPack 1.0 it could not say so: such a consumer is refused."""
        if stream is not None and self.device is None:
            raise BufferError("memory of the host has no stream")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("the store does not copy to other devices")
        if copy:
            raise BufferError("the store does not copy; copy what you get")
        if max_version is None or max_version[0] < 1:
            raise BufferError("the memory is read-only, which DLPack before 1.0 cannot say")
        return _dlpack.capsule(self, self._data, self.shape, self._code, self._bits, self.__dlpack_device__())


class Model(Mapping[str, Tensor]):
    """The tensors of a model by name. It is mapped at the first look at them."""

    def __init__(self, handle: int, device: int | None = None) -> None:
        self._reference, self._device = _Reference(handle), device
        self._opened: dict[str, Tensor] | None = None
        content = (ctypes.c_uint8 * 32)()
        _lib().gshare_model_content(handle, content)
        self.content = bytes(content).hex()
        self.arena_bytes = _lib().gshare_model_bytes(handle)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> dict[str, Tensor]:
        handle, arena = self._reference.handle, 0
        error = ctypes.create_string_buffer(_TEXT)
        code = _lib().gshare_model_open(handle, error, _TEXT)
        if code:
            raise StoreError(error.value.decode(errors="replace"), code)
        if self._device is not None:
            arena = _lib().gshare_model_map(handle, self._device, error, _TEXT)
            if not arena:
                raise StoreError(error.value.decode(errors="replace"))
        about = _CTensor()
        tensors: dict[str, Tensor] = {}
        for at in range(_lib().gshare_model_tensors(handle)):
            if _lib().gshare_model_tensor(handle, at, ctypes.byref(about)):
                raise StoreError("the model cannot be read")
            tensor = Tensor(self._reference, about, self._device, arena)
            tensors[tensor.name] = tensor
        return tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def private(self) -> mmap.mmap:
        """Memory of the host that may be written: the same pages until this process writes to one, which copies it.

        A tensor begins at its ``offset``. The model stays for as long as something refers to the map.
        """
        len(self)  # Mapped, and so compared with what the store said.
        descriptor = _lib().gshare_model_descriptor(self._reference.handle)
        if self._device is not None or descriptor < 0:
            raise StoreError("the model is not in host memory")
        memory = _PrivateMap(descriptor, self.arena_bytes, access=mmap.ACCESS_COPY)
        memory.reference = self._reference
        return memory

    def state_dict(self) -> dict[str, object]:
        """PyTorch tensors by name, without a copy: for ``module.load_state_dict(model.state_dict(), assign=True)``."""
        return {name: _dlpack.to_torch(tensor) for name, tensor in self.items()}
