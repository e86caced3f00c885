"""The simulated driver: order and time of an operator."""

from __future__ import annotations

import ctypes
import traceback
from typing import Any, Callable

import torch

from . import NotComputed

# _REFUSED_HERE: this thread's last error tells whether the program knows.
_IDLE, _PENDING, _CAPTURES, _REFUSED, _REFUSED_HERE = range(5)
# Elements of a block: 256 threads of 4, as PyTorch's own kernels have.
_BLOCK = 1024
_MOST_BLOCKS = 0x7FFFFFFF
_NO_CONTEXT = 201

_pointer, _word = ctypes.c_void_p, ctypes.c_uint
_cuda = ctypes.CDLL("libcuda.so.1")


class NotSimulated(RuntimeError):
    """The driver is not the simulated one."""


_NOT_SIMULATED = "gshare_sim computes on the simulated driver only: start the program with gshare run --sim --compute"


def _function(name: str, *types: Any) -> Any:
    try:
        function = getattr(_cuda, name)
    except AttributeError:
        raise NotSimulated(_NOT_SIMULATED) from None
    function.argtypes = types
    return function


_state = _function("gshare_sim_compute_state", _pointer)
_compute = _function("gshare_sim_compute", _pointer)
_kernel = _function("gshare_sim_kernel", _pointer, ctypes.c_char_p)
_fault = _function("gshare_sim_compute_failed")
_refused = _function("gshare_sim_compute_refused", _pointer, ctypes.c_size_t)
_launch = _function("cuLaunchKernel", _pointer, *[_word] * 7, _pointer, _pointer, _pointer)
_synchronize = _function("cuStreamSynchronize", _pointer)
_host_function = _function("cuLaunchHostFunc", _pointer, _pointer, _pointer)
_error_name = _function("cuGetErrorName", ctypes.c_int, _pointer)
# Loaded by torch; the last error of a thread's calls is kept here until somebody takes it.
_last_error = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError
_raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
_device: Callable[[], int] = torch._C._cuda_getDevice

# Operators in graphs, by number: a graph may run them until the process ends.
_recorded: list[Callable[[], None]] = []
_failed: list[str] = []


def _check(code: int, call: str) -> None:
    if _failed:
        raise RuntimeError(f"host work failed in the replay of a graph:\n{_failed[0]}")
    if code:
        name = ctypes.c_char_p()
        _error_name(code, ctypes.byref(name))
        raise RuntimeError(f"CUDA error: {(name.value or b'').decode() or code} from {call} on the simulated device")


def begin_process() -> None:
    """From here on a kernel without values fails. The program knows of those that have."""
    if _compute(_last_error):
        raise NotSimulated(_NOT_SIMULATED)


def kernel(name: str) -> Any:
    """The kernel that stands for an operator's time; a profile finds it by its name, such as `aten_mm` or `nccl_allreduce`."""
    found = _pointer()
    _check(_kernel(ctypes.byref(found), name.replace(".", "_").encode()), "gshare_sim_kernel")
    return found.value


def begin(kernel: int, device: int, elements: int) -> int | None:
    """Launches an operator's kernel, for its time, and waits until the bytes of earlier work are there. The stream, if it captures."""
    stream = _raw_stream(device)
    # The default stream is that of the thread's device.
    if not stream and device != _device():
        with torch.cuda.device(device):
            return begin(kernel, device, elements)
    blocks = min((elements + _BLOCK - 1) // _BLOCK, _MOST_BLOCKS) or 1
    code = _launch(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, None, None)
    if code == _NO_CONTEXT:
        # A thread of autograd before its first call of the runtime library.
        torch._C._cuda_setDevice(device)
        code = _launch(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, None, None)
    if code or _failed:
        _check(code, "cuLaunchKernel")
    state = _state(stream)
    if state >= _REFUSED:
        begin_process()
        if _last_error() or state == _REFUSED:
            name = ctypes.create_string_buffer(1024)
            length = _refused(name, len(name))
            raise NotComputed(f"kernel `{name[:length].decode()}` has no values on a simulated GPU and was refused; maybe nobody saw its error")
        # The program has had its error.
        return begin(kernel, device, elements)
    if state == _PENDING:
        _check(_synchronize(stream), "cuStreamSynchronize")
    return stream if state == _CAPTURES else None


def wait(device: int) -> None:
    """Waits for the work of the current stream, without the interpreter's lock: an operator in a graph may need it."""
    _check(_synchronize(_raw_stream(device)), "cuStreamSynchronize")


def give_way(device: int) -> None:
    """Waits as `wait` does where host functions are pending, before a call that holds the interpreter's lock."""
    stream = _raw_stream(device)
    _check(_synchronize(stream) if _state(stream) == _PENDING else 0, "cuStreamSynchronize")


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int | None) -> None:
    try:
        _recorded[(number or 0) - 1]()
    except BaseException:
        _failed.append(traceback.format_exc())
        _fault()
        traceback.print_exc()


def record(stream: int, again: Callable[[], None]) -> None:
    """Adds host work to a capture: a replay of the graph calls it in the stream's order."""
    _recorded.append(again)
    _check(_host_function(stream, _run, len(_recorded)), "cuLaunchHostFunc")
