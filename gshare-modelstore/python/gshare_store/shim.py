"""Weights of programs that know no model store, out of the store: what `gshare run --shim` puts into a Python program.

`torch.load(path)` and `safetensors.torch.load_file(path)` give what they always give, and raise what they always raise; their
tensors lie in the store's memory, of which all processes of the node have one copy. The map is private to the process: the first
write to a page copies it, so that no other process ever sees what one writes.

- A safetensors file is in the store under its path and version (size, time, inode).
- The file that is the function's own model (GSHARE_MODEL, which `gshare up` sets), loaded to a CUDA device by `load_file`, is not copied:
  its tensors are the device's one copy, for all processes of the model. They are read-only: a kernel that writes to one faults.
- A file of `torch.save` with dense tensors in dicts by name is written once as a safetensors file into
  $XDG_CACHE_HOME/gshare/weights (mode 0700), so it is on disk twice. The tensors of that file are the storages, so that tensors which
  share one still do, and its metadata say what is made of them. The first load reads, writes and hashes; later ones map.
- Everything else goes to the real function: other pickles, file objects, `mmap=True`, `pickle_module`, a `map_location` that names
  neither the CPU nor a CUDA device, tensors of a subclass, sparse or quantized, a file below 1 MiB (the store's unit is 2 MiB), a
  store that is gone, full, or refuses. GSHARE_SHIM_LOG=1 says of each call on standard error what became of it.

`load_state_dict` copies out of the tensors unless it is told `assign=True`; programs that call `safetensors.safe_open` are left alone.
One difference remains: the storage of such a tensor cannot grow (`Tensor.resize_` beyond it), as with `mmap=True`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import stat
import struct
import sys
import tempfile

import gshare_store
from gshare_store import _dlpack

_LEAST = 1 << 20
_METADATA = "gshare"
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}
# Files that could not be converted for a reason that may pass, such as a full disk: not tried again by this process.
_given_up: set[str] = set()


class _Bare(Exception):
    """The real function is to answer, for this reason."""


def install(module) -> None:
    """Replaces the function that loads weights, in torch or safetensors.torch."""
    if module.__name__ == "torch":
        real = module.load
        load = _before(real, functools.partial(_load, module, real), "torch.load")
        for place in (module, module.serialization):
            if place.load is real:
                place.load = load
    else:
        module.load_file = _before(module.load_file, functools.partial(_load_file, module), "load_file")


def _before(real, ours, name):
    if hasattr(real, "gshare_shim"):
        return real

    @functools.wraps(real)
    def load(*args, **kwargs):
        try:
            result = ours(*args, **kwargs)
        except Exception as why:
            _say(f"{name} goes without the store: {type(why).__name__}: {why}")
        else:
            _say(f"{name} was served from the store")
            return result
        # Outside of the handler: an error of the real function has no other as its context.
        return real(*args, **kwargs)

    load.gshare_shim = True
    return load


def _say(text: str) -> None:
    if os.environ.get("GSHARE_SHIM_LOG"):
        print(f"gshare: {text}", file=sys.stderr)


def _load(torch, real, f, map_location=None, pickle_module=None, *, weights_only=None, mmap=None, **others):
    if pickle_module is not None or mmap or others or weights_only not in (None, True, False):
        raise _Bare("an argument that only the real function knows")
    if getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False):
        raise _Bare("the data are not to be read")
    where = None if map_location is None else _device(torch, map_location)
    _plain(torch)
    source = _Source(f)
    cached = source.cached(".safetensors")
    with _store() as store:
        if not os.path.exists(cached):
            _convert(torch, real, source, cached)
        about = _read_metadata(cached)
        if where is None and about["places"] != ["cpu"]:
            raise _Bare(f"the tensors belong on {about['places']}")
        model = source.model(store, cached, cached)
    memory, storages = model.private(), {}
    for name, tensor in model.items():
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        storages[name] = (flat if where is None else flat.to(where)).untyped_storage()

    def tensor_of(storage, dtype, offset, size, stride):
        empty = torch.empty(0, dtype=getattr(torch, dtype), device=where)
        return empty.set_(storages[storage], offset, size, stride) if storage else empty.as_strided(size, stride)

    return _decode(about["value"], tensor_of)


def _load_file(module, filename, device="cpu"):
    torch = sys.modules["torch"]
    where = _device(torch, f"cuda:{device}" if type(device) is int else device)
    _plain(torch)
    source = _Source(filename)
    # The library looks at the header as it always does, and says the order.
    with module.safe_open(filename, framework="pt", device="cpu") as file:
        names = list(getattr(file, "offset_keys", file.keys)())
    with _store() as store:
        shared = _on_device(store, source, where)
        if shared is not None and set(names) == set(shared):
            return {name: _dlpack.to_torch(shared[name]) for name in names}
        model = source.model(store, source.path + "@" + source.version, source.path)
    if set(names) != set(model):
        raise _Bare("the store reads other tensors in it")
    memory, result = model.private(), {}
    for name in names:
        about = model[name]
        known = _TORCH.get(about.dtype)
        if known is None:
            raise _Bare(f"tensor {name}: {about.dtype} has no type of torch here")
        dtype = getattr(torch, known)
        if about.nbytes:
            count = about.nbytes // dtype.itemsize
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=about.offset)
            tensor = flat.reshape(about.shape)
        else:
            tensor = torch.empty(about.shape, dtype=dtype)
        result[name] = tensor if where.type == "cpu" else tensor.to(where)
    return result


def _on_device(store, source, where):
    """The function's own model where a store has it in memory of this device."""
    named = os.environ.get("GSHARE_MODEL")
    if where.type != "cuda" or not named or os.path.realpath(named) != source.path:
        return None
    try:
        return store.get(named, tier=gshare_store.GPU, device=where.index or 0)
    except gshare_store.StoreError as error:
        _say(f"{source.path} is copied: {error}")
        return None


def _store():
    return gshare_store.connect(os.environ.get("GSHARE_STORE"))


def _device(torch, named):
    if type(named) not in (str, torch.device):
        raise _Bare("a place that is no device")
    device = torch.device(named)
    cuda = device.type == "cuda" and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    if device != torch.device("cpu") and not cuda:
        raise _Bare(f"{device} is neither the CPU nor a CUDA device that is there")
    return device


def _plain(torch) -> None:
    """Tensors become what they say: no mode and no default device makes something else of them."""
    probe = torch.empty(0)
    if type(probe) is not torch.Tensor or probe.device.type != "cpu":
        raise _Bare("a mode or a default device is set")


class _Source:
    """A file of weights as it is now, and its place in the cache and the store."""

    def __init__(self, file) -> None:
        path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else None
        if type(path) is not str:
            raise _Bare("no path")
        self.path = os.path.realpath(path)
        self.version, size = self._look()
        if size < _LEAST:
            raise _Bare(f"{size} bytes are too few to share")
        self.cache = _cache()
        self.key = _hash(self.path)

    def _look(self) -> tuple[str, int]:
        about = os.stat(self.path)
        if not stat.S_ISREG(about.st_mode):
            raise _Bare("no regular file")
        return _hash(f"{about.st_size} {about.st_mtime_ns} {about.st_dev} {about.st_ino}"), about.st_size

    def check(self) -> None:
        if self._look()[0] != self.version:
            raise _Bare("the file changed meanwhile")

    def cached(self, ending: str) -> str:
        return os.path.join(self.cache, f"{self.key}-{self.version}{ending}")

    def model(self, store, name: str, file: str):
        """The model under a name of this user in the store, which takes the file if need be."""
        # Another user's model of this name is never taken.
        own = f"{os.geteuid()}:{name}"
        try:
            model = store.get(own)
        except gshare_store.StoreError:
            store.put_file(name, file)
            try:
                self.check()
            except (_Bare, OSError):
                store.evict(name, forget=True)
                raise
            model = store.get(own)
            self._forget_others(store, name)
        self.check()
        return model

    def _forget_others(self, store, name: str) -> None:
        """Older versions of the file leave the cache, and the store once no process uses them."""
        note, left = os.path.join(self.cache, self.key + ".names"), []
        with contextlib.suppress(FileNotFoundError), open(note) as file:
            for other in set(json.load(file)) - {name}:
                try:
                    store.evict(other, forget=True)
                except gshare_store.StoreError as error:
                    left += [other] if error.code == gshare_store.IN_USE else []
        _write(note, json.dumps([name, *left]).encode())
        for other in os.listdir(self.cache):
            if other.startswith(self.key + "-") and not other.startswith(f"{self.key}-{self.version}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.cache, other))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "gshare", "weights")
    os.makedirs(path, mode=0o700, exist_ok=True)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise _Bare(f"{path} is not a directory of this user alone (mode 0700)")
    return path


def _write(path: str, *parts) -> None:
    """A file that is there as a whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _convert(torch, real, source: _Source, cached: str) -> None:
    """Writes what torch.save saved as a safetensors file. One that cannot be is marked, so that it is read in vain only once."""
    mark = source.cached(".bare")
    if cached in _given_up or os.path.exists(mark):
        raise _Bare("no dense tensors by name, as was found before")
    _given_up.add(cached)
    places: set[str] = set()

    def stay(storage, place):
        places.add(place)
        return storage

    storages: dict[int, tuple[str, object]] = {}
    try:
        value = real(source.path, map_location=stay, weights_only=True)
        encoded = _encode(torch, value, storages, set())
        if not storages:
            raise _Bare("no tensors")
    except Exception:
        source.check()
        _write(mark)
        raise
    about = {"places": sorted(places), "value": encoded}
    header: dict[str, object] = {"__metadata__": {_METADATA: json.dumps(about)}}
    at = 0
    for name, storage in storages.values():
        size = storage.nbytes()
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = ((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()) for _, storage in storages.values())
    source.check()
    _write(cached, struct.pack("<Q", len(text)), text, *data)
    _given_up.discard(cached)


def _read_metadata(path: str):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return json.loads(header["__metadata__"][_METADATA])


def _encode(torch, value, storages, seen):
    """A value as JSON: ["t", storage, dtype, offset, size, stride], ["d" or "o", items, attributes], or ["v", value]."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return ["v", value]
    if id(value) in seen:
        raise _Bare("an object that is there twice")
    seen.add(id(value))
    encode = functools.partial(_encode, torch, storages=storages, seen=seen)
    if kind in (dict, collections.OrderedDict):
        if any(type(key) is not str for key in value):
            raise _Bare("a key that is no text")
        attributes = vars(value) if kind is collections.OrderedDict else {}
        return ["d" if kind is dict else "o", *([[key, encode(item)] for key, item in d.items()] for d in (value, attributes))]
    if kind is not torch.Tensor:
        raise _Bare(f"an object of {kind}")
    odd = value.is_quantized or value.requires_grad or value.is_conj() or value.is_neg() or vars(value)
    if odd or value.layout is not torch.strided or value.device.type != "cpu":
        raise _Bare("a tensor that is not dense, or more than its numbers")
    storage, name = value.untyped_storage(), ""
    if storage.nbytes():
        name = storages.setdefault(storage.data_ptr(), (str(len(storages)), storage))[0]
    dtype = str(value.dtype).removeprefix("torch.")
    return ["t", name, dtype, value.storage_offset(), list(value.size()), list(value.stride())]


def _decode(encoded, tensor_of):
    kind, *rest = encoded
    if kind == "v":
        return rest[0]
    if kind == "t":
        return tensor_of(*rest)
    items, attributes = ([(key, _decode(item, tensor_of)) for key, item in pairs] for pairs in rest)
    value = dict(items) if kind == "d" else collections.OrderedDict(items)
    if attributes:
        vars(value).update(attributes)
    return value
