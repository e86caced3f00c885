"""`pytest --gpu-sim=a100`: the tests run on a simulated GPU, where PyTorch's operators compute.

The loader must find the simulated driver before a test imports torch, so pytest starts again under `gshare run --sim=a100 --compute`.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from ._share import _argv

OPTION = "--gpu-sim"


def pytest_addoption(parser: pytest.Parser) -> None:
    words = f"run on a simulated GPU that computes for PyTorch, such as {OPTION}=a100 or {OPTION}=h100,devices=2 (gshare run --sim)"
    parser.getgroup("gshare").addoption(OPTION, metavar="SPEC", help=words)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    spec = early_config.known_args_namespace.gpu_sim
    # Set by `gshare run --compute`: this is the second start, or a worker's.
    if spec is None or os.environ.get("GSHARE_SIM_COMPUTE") == "1":
        return
    # Standard output is the captured one by now.
    capture = early_config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    own = pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
    argv = _argv({"sim": spec or True, "compute": True}, [sys.executable, *map(os.fsdecode, own)])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(argv[0], argv)
