"""Answers of workloads to the suite: one marked line of JSON for each case."""

import ctypes
import hashlib
import json
import os
import sys
import time
import traceback

MARK = "suite: "
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
CASES = {}
# The device's work before the count of the current case.
COUNTED = {"from": None}


def case(function):
    """Registers a case by its function's name. It returns a dictionary of facts which must agree between bare and hooked runs.

    The key `values` is special: bytes computed by kernels. They are compared only on a GPU.
    """
    CASES[function.__name__] = function
    return function


def answer(value):
    """Writes one answer, in one piece: the children of a workload may write to the same pipe."""
    sys.stdout.flush()
    os.write(1, (MARK + json.dumps(value) + "\n").encode())


def device_work():
    """The work of a simulated device for this process so far, by the device's own account; None on a GPU."""
    try:
        # Neither is the driver loaded nor a device opened for this: both would change the compared facts.
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        truth = library.gshare_sim_truth
    except (OSError, AttributeError):
        return None
    if library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALIZED:
        return None
    truth.restype = ctypes.c_ssize_t
    size = 1 << 20
    buffer = ctypes.create_string_buffer(size)
    length = truth(None, buffer, ctypes.c_size_t(size))
    if not 0 < length <= size:
        return None
    own = [p for p in json.loads(buffer.raw[:length])["processes"] if p["pid"] == os.getpid() and p["live"]]
    work = {"kernels": 0, "copies": 0, "copied_bytes": 0, "busy_ns": 0}
    for process in own[-1:]:
        work["kernels"] += process["free_launches"]
        for gpu in process["gpus"]:
            work["kernels"] += gpu["kernels"]
            work["copies"] += gpu["copies"]
            work["copied_bytes"] += gpu["copy_bytes"]
            work["busy_ns"] += gpu["busy_ns"]
    return work


def count_from_here():
    """Leaves out the device's work for this case so far: an autotuner repeats its trials by their duration."""
    COUNTED["from"] = device_work()


def run(name):
    COUNTED["from"], start = device_work(), time.monotonic()
    try:
        facts = CASES[name]()
    except Exception as error:
        traceback.print_exc()
        answer({"case": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        return
    seconds, before, after = time.monotonic() - start, COUNTED["from"], device_work()
    values = facts.pop("values", None)
    work = None
    if after is not None:
        work = {key: after[key] - (before[key] if before else 0) for key in ("kernels", "copies", "copied_bytes")}
    answer({
        "case": name,
        "facts": facts,
        "values": values and hashlib.sha256(values).hexdigest(),
        "work": work,
        "seconds": round(seconds, 3),
    })


def main():
    """Runs the cases named on the command line, in order."""
    for name in sys.argv[1:]:
        answer({"begin": name})
        run(name)
