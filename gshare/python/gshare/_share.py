"""Programs under a share, all by the command `gshare run`."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A program under the block's share: it prints the environment made by `gshare run`, and ends at the end of its input.
_HOLDER = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"
# Names of the variables set by `gshare run` begin so.
_OURS = ("GSHARE_", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_MPS_")
_FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy", "numba.cuda", "pycuda")
_AGAIN = "GSHARE_STARTED_AGAIN"
_block = threading.Lock()


class ShareError(RuntimeError):
    """A share cannot be given."""


class NotInstalled(ShareError):
    """The command `gshare` is missing."""


class Refused(ShareError):
    """`gshare run` refuses the share, for the reason in the text."""


class CannotLimit(ShareError):
    """It is too late to limit this process."""


class Share(TypedDict, total=False):
    """A share of a GPU: the options of `gshare run`."""

    quota: str | float
    """Share of GPU time: "30%:80%" (guaranteed and at most), or one share for both."""
    mem: str | int
    """GPU memory: "4GiB", or a number of bytes."""
    sm: str | float
    """Share of the SMs, such as "50%": kept under MPS, else counted."""
    name: str
    """Name of the instance, unique on the node."""
    service_class: str
    """"slo-sensitive" or "slo-sensitive:PERCENT": other programs yield to this program; "best-effort": it takes the time they leave."""
    observe: bool
    """Whether the program is measured without a limit."""
    wait: bool
    """Whether to wait for room on a device instead of a refusal."""
    sim: bool | str
    """Whether devices are simulated; as text, which: "h100,devices=2"."""
    compute: bool
    """Whether PyTorch's operators have values on a simulated device."""
    socket: str | os.PathLike[str]
    """The daemon's socket."""


class Run(Share, total=False):
    """A share, and the usual options of `subprocess.run`."""

    capture_output: bool
    check: bool
    cwd: str | os.PathLike[str]
    env: Mapping[str, str]
    input: str | bytes
    stderr: int | IO[Any]
    stdin: int | IO[Any]
    stdout: int | IO[Any]
    text: bool
    timeout: float


def run(args: Sequence[str | os.PathLike[str]], **options: Unpack[Run]) -> subprocess.CompletedProcess[Any]:
    """Runs a program under a share to its end, as `subprocess.run` does.

    A refusal ends with exit code 1 and the reason on standard error, 126 and 127 mean that the program cannot be started.
    """
    others: dict[str, Any] = {key: value for key, value in options.items() if key not in Share.__annotations__}
    share: Any = {key: value for key, value in options.items() if key not in others}
    return subprocess.run(_argv(share, args), **others)


@contextmanager
def share(**options: Unpack[Share]) -> Iterator[None]:
    """Programs started in the block share one name and one share. They must end before the block.

    The block changes this process's environment, so a process has one block at a time. A child by fork alone is no new program, and
    would run without the limit: it sees no GPU, and standard error says so. Let `multiprocessing` use `spawn` or `forkserver`.

    Raises `Refused`, `NotInstalled`, or `ShareError` inside another block.
    """
    argv = _argv(options, [sys.executable, "-c", _HOLDER])
    if not _block.acquire(blocking=False):
        raise ShareError("share(): this process is in another block, and has one environment for both; leave that block first")
    try:
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as holder:
            assert holder.stdout is not None and holder.stderr is not None
            said = holder.stdout.readline()
            if not said:
                raise Refused(_reason(holder.stderr.read()))
            threading.Thread(target=_pass_on, args=(holder.stderr,), daemon=True).start()
            before = _ours(os.environ)
            _put(_ours(json.loads(said)))
            _forks.inside = not is_limited()
            try:
                yield
            finally:
                _forks.inside = False
                _put(before)
                holder.terminate()
    finally:
        _block.release()


def limit(**options: Unpack[Share]) -> None:
    """Limits this program: starts it again under the share, with the same arguments.

    Returns at once in the new process, and in any process with a share from `gshare run`. Call it first, since the program repeats
    everything before the call.

    Raises `CannotLimit` if a framework is imported, CUDA is loaded, or the program cannot be started again (a notebook, a prompt, a
    script from standard input).
    """
    if is_limited():
        return
    if _AGAIN in os.environ:
        raise CannotLimit("limit(): the program was started again, but the loader put no hook into it: this Python may be static")
    loaded = next((module for module in _FRAMEWORKS if module in sys.modules), None) or ("CUDA" if _has("libcuda.so") else None)
    if loaded:
        raise CannotLimit(f"limit(): {loaded} is loaded already: call limit() before, or start the program with `gshare run`")
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or sys.argv[0] in ("", "-"):
        raise CannotLimit("limit(): a prompt, a notebook or standard input cannot be started again: use share(), or `gshare run`")
    own = pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
    argv = _argv(options, [sys.executable, *map(os.fsdecode, own)])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, {**os.environ, _AGAIN: "1"})


def is_limited() -> bool:
    """Whether this process is under the hook."""
    return _has("libgshare_hook")


def _has(library: str) -> bool:
    return library in pathlib.Path("/proc/self/maps").read_text()


def _argv(share: Share, program: Sequence[str | os.PathLike[str]]) -> list[str]:
    # The wheel puts the command beside this Python's other scripts.
    beside = pathlib.Path(sysconfig.get_path("scripts"), "gshare")
    command = str(beside) if beside.is_file() else shutil.which("gshare")
    if command is None:
        raise NotInstalled(f"gshare is neither in {beside.parent} nor on PATH: install the wheel or a package of gshare")
    argv = [command, "run"]
    for key, value in share.items():
        if key not in Share.__annotations__:
            raise TypeError(f"{key}: unknown; need {', '.join(Share.__annotations__)}")
        option = "--" + key.removeprefix("service_")
        if value is True:
            argv.append(option)
        elif value is not None and value is not False:
            argv.append(f"{option}={value}")
    return [*argv, "--", *(os.fspath(word) for word in program)]


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(_OURS)}


def _put(ours: Mapping[str, str]) -> None:
    """Gives this process these variables of `gshare run`, and no others."""
    for key in _ours(os.environ).keys() - ours.keys():
        del os.environ[key]
    os.environ.update(ours)


def _reason(errors: str) -> str:
    """The command's error, without notices before it and advice after it."""
    _, _, error = errors.rpartition("error: ")
    return error.strip().split("\n\n")[0] or "gshare run has ended without a reason"


def _pass_on(errors: IO[str]) -> None:
    for line in errors:
        sys.stderr.write(line)


class _Forks:
    """Children by fork alone: they are this process without the hook, so they get no GPU."""

    def __init__(self) -> None:
        self.inside = self.said = False
        os.register_at_fork(after_in_child=self.in_child, after_in_parent=self.in_parent)

    def in_child(self) -> None:
        # With `preexec_fn`, subprocess forks like os.fork(), and starts a program then.
        if self.inside and sys._getframe(1).f_globals.get("__name__") != "subprocess":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            if not self.said:
                why = "forked inside share(), so it has no share and sees no GPU: use spawn or forkserver"
                os.write(2, f"gshare: process {os.getpid()} was {why}\n".encode())

    def in_parent(self) -> None:
        self.said = self.inside


_forks = _Forks()
