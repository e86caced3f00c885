"""Several processes of one run hold memory, and each reports its view: `views.py BYTES [BYTES ...] [--torch]`.

This process holds the first size, through PyTorch with `--torch`, a child each other size. Answers `{"views": [...]}`, one
for each process, then waits for a line, so that the suite can ask the daemon in between.
"""

import argparse
import os
import subprocess
import sys

import device
from report import MARK, answer

parser = argparse.ArgumentParser()
parser.add_argument("bytes", type=int, nargs="+")
parser.add_argument("--torch", action="store_true")
parser.add_argument("--child", action="store_true")
arguments = parser.parse_args()

children = []
for size in arguments.bytes[1:]:
    argv = [sys.executable, __file__, str(size), "--child"]
    children.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
if arguments.torch:
    import torch

    held = torch.empty(arguments.bytes[0], dtype=torch.uint8, device="cuda")
driver = device.Driver()
if not arguments.torch:
    held = driver.allocate(arguments.bytes[0])
    assert held is not None, "out of memory"
nvml = device.Nvml()


def view():
    free, total = driver.memory()
    seen = {
        "pid": os.getpid(), "held": arguments.bytes[0],
        "driver": {"total": total, "free": free, "used": total - free},
        "nvml": nvml.memory(),
        "processes": nvml.processes(),
    }
    if arguments.torch:
        free, total = torch.cuda.mem_get_info()
        seen["torch"] = {"total": total, "free": free, "used": total - free}
    return seen


if arguments.child:
    answer({"ready": True})
    sys.stdin.readline()
    answer(view())
    sys.stdin.readline()
else:
    import json

    def hear(child):
        line = child.stdout.readline()
        assert line.startswith(MARK), f"a child said {line!r}"
        return json.loads(line[len(MARK):])

    for child in children:
        hear(child)
    views = [view()]
    for child in children:
        child.stdin.write("look\n")
        child.stdin.flush()
        views.append(hear(child))
    answer({"views": views})
    sys.stdin.readline()
