#!/usr/bin/env python3
"""Runs the test programs with the hook under valgrind's memcheck: no invalid access, no use of unwritten memory.

    cargo build -p gshare-hook -p gshare-fake-cuda
    python3 gshare-hook/package/memcheck.py [--bin target/debug] [PROGRAM:KIND ...]

Needs gcc and valgrind, and names a missing one. Only errors with the hook in their stack count: errors of the program,
the C library or the simulated driver alone do not.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parents[1]
RUNS = [
    "launch:kernel", "launch:graph", "launch:captured", "launch:streams", "launch:memcpy", "launch:refused",
    "alloc:plain", "alloc:pitch", "alloc:pool", "alloc:physical", "alloc:array3d", "alloc:graph", "alloc:many",
    "alloc:context_takes_it_along", "limit:8", "devices:two", "devices:green", "devices:ipc", "devices:views",
    "process:fork_after", "process:vfork", "process:exec", "process:threads", "process:exit_in_thread", "process:signals",
]

# Programs with another exit code than 0.
CODES = {"process:exit_in_thread": 7}


def compile_programs(folder, driver):
    for name in sorted({run.split(":")[0] for run in RUNS}):
        source = HERE / "tests" / "programs" / f"{name}.c"
        argv = ["gcc", "-O1", "-g", "-w", "-o", str(folder / name), str(source), f"-L{driver}"]
        subprocess.run([*argv, "-Wl,--no-as-needed", "-lcuda", "-ldl", "-lpthread"], check=True)


def errors(log):
    """The error reports of a log with the hook in their stack."""
    lines = [line.split("== ", 1)[-1] if line.startswith("==") else line for line in log.splitlines()]
    blocks = "\n".join("" if line.startswith("==") and line.endswith("==") else line for line in lines).split("\n\n")
    return [block for block in blocks if "   at 0x" in block and "gshare_hook" in block]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=HERE.parent / "target" / "debug", type=pathlib.Path, help="folder of both libraries")
    parser.add_argument("runs", nargs="*", help="such as launch:kernel [default: all]")
    arguments = parser.parse_args()
    for tool in ("gcc", "valgrind"):
        if not shutil.which(tool):
            print(f"skipped: no {tool}")
            return 0
    binaries = arguments.bin.resolve()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        driver = folder / "driver"
        driver.mkdir()
        for link in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"):
            (driver / link).symlink_to(binaries / "libfake_cuda.so")
        compile_programs(folder, driver)
        for run in arguments.runs or RUNS:
            program, kind = run.split(":")
            logs = folder / run.replace(":", "-")
            logs.mkdir()
            variables = [
                f"LD_LIBRARY_PATH={driver}", f"GSHARE_SIM_DEVICE={logs}/device", "GSHARE_SIM_PROFILE=tiny",
                f"GSHARE_SOCKET={logs}/nobody", "GSHARE_QUOTA=0.9", "GSHARE_MEM=512MiB",
                f"LD_PRELOAD={binaries / 'libgshare_hook.so'}",
            ]
            valgrind = ["valgrind", "--trace-children=yes", f"--log-file={logs}/%p.log", "--num-callers=30"]
            done = subprocess.run([*valgrind, "env", *variables, str(folder / program), kind], capture_output=True,
                                  text=True, timeout=600)
            found = [block for log in sorted(logs.glob("*.log")) for block in errors(log.read_text())]
            print(f"{run:30} exit {done.returncode}, {len(found)} errors", flush=True)
            for block in found[:3]:
                print(block)
            if found or done.returncode != CODES.get(run, 0):
                failed.append(run)
    print(f"memcheck: {len(failed)} of {len(arguments.runs or RUNS)} runs with errors")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
