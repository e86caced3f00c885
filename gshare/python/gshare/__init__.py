"""Shares of a GPU for programs that Python starts, and a client of the host of functions (`gshare up`).

    import gshare, subprocess

    gshare.run(["python3", "train.py"], quota="30%:80%", mem="4GiB", check=True)

    with gshare.share(quota="30%", mem="4GiB"):
        subprocess.run(["python3", "train.py"], check=True)   # under the share, as are all programs started in the block

    gshare.limit(quota="30%", mem="4GiB")                     # this program; before it imports torch
    import torch

    host = gshare.Host("http://127.0.0.1:8080")
    host.deploy("resnet", "python3 serve.py", slo="69ms")
    host.wait("resnet")
    answer = host.invoke("resnet", b"...")

The loader puts the hook into a process at its start, so a share holds for programs that start under it:

| function | holds for |
|---|---|
| `run` | the program and its children |
| `share` | programs started in the block: by `subprocess`, and by `multiprocessing` with `spawn` or `forkserver` |
| `limit` | this process: the function starts the program again under the share |

All shares come from the command `gshare`, which the wheel brings: its rules, its daemon and its refusals hold here too.
"""

from ._host import Function, Host, HostError
from ._share import CannotLimit, NotInstalled, Refused, ShareError, is_limited, limit, run, share

__all__ = [
    "CannotLimit",
    "Function",
    "Host",
    "HostError",
    "NotInstalled",
    "Refused",
    "ShareError",
    "is_limited",
    "limit",
    "run",
    "share",
]
