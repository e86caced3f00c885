#!/usr/bin/env python3
"""Measures this machine's GPU and prints its profile for `gshare run --sim=FILE`.

    python3 gshare-hook/gpu-suite/measure_profile.py > mine.toml

Sizes and the board's figures are the driver's and NVML's answers; the time of calls, kernels and copies is measured, for about ten
seconds, on an otherwise idle GPU. An empty kernel does not reveal the time of a kernel with work: `ns_per_wave` is the time for
placing a wave of blocks takes, so kernels of a program are better stated by name (`[[kernel]]`). Nothing is set on the card.
"""

import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "workloads"))

import device  # noqa: E402
from gpusuite.errors import RowEnd  # noqa: E402
from gpusuite.rows.own import call_costs  # noqa: E402
from report import MARK  # noqa: E402

# Numbers of CUdevice_attribute.
ATTRIBUTES = {
    "sms": 16, "threads_per_sm": 39, "blocks_per_sm": 106, "shared_memory_per_sm_bytes": 81, "l2_bytes": 38,
    "clock_khz": 13, "memory_clock_khz": 36, "memory_bus_bits": 37,
}
CAPABILITY = (75, 76)
# Numbers of nvmlTemperatureThresholds_t: shutdown, slowdown, and the highest of normal operation.
THRESHOLDS = {"max_celsius": 3, "slowdown_celsius": 1, "shutdown_celsius": 0}


class Pci(ctypes.Structure):
    _fields_ = [
        ("old_bus_id", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint), ("device", ctypes.c_uint),
        ("id", ctypes.c_uint), ("subsystem", ctypes.c_uint), ("bus_id", ctypes.c_char * 32),
    ]


def board(nvml):
    """NVML's description of the board; missing figures are left out."""
    found = {}

    def ask(name, function, *before, of=ctypes.c_uint, value=lambda answer: answer.value):
        answer = of()
        try:
            nvml.call(function, nvml.handle, *before, ctypes.byref(answer))
        except (device.DriverError, AttributeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            return
        found[name] = value(answer)

    ask("pci_id", "nvmlDeviceGetPciInfo_v3", of=Pci, value=lambda pci: f"{pci.id:#010x}")
    ask("pcie_generation", "nvmlDeviceGetMaxPcieLinkGeneration")
    ask("pcie_width", "nvmlDeviceGetMaxPcieLinkWidth")
    ask("bar1_bytes", "nvmlDeviceGetBAR1MemoryInfo", of=device.Memory, value=lambda memory: memory.total)
    ask("power_idle_mw", "nvmlDeviceGetPowerUsage")
    least, most = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetPowerManagementLimitConstraints", nvml.handle, ctypes.byref(least), ctypes.byref(most))
        found["power_min_mw"] = least.value
    except device.DriverError as error:
        print(f"power_min_mw is left out: {error}", file=sys.stderr)
    ask("power_limit_mw", "nvmlDeviceGetEnforcedPowerLimit")
    ask("idle_celsius", "nvmlDeviceGetTemperature", 0)
    for name, number in THRESHOLDS.items():
        ask(name, "nvmlDeviceGetTemperatureThreshold", number)
    return found


def mig_slices(nvml):
    """NVML's slices, as `nvidia-smi mig -lgip` lists them; none if MIG is off and the driver reports none."""
    class Profile(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_uint), ("id", ctypes.c_uint), ("slices", ctypes.c_uint), ("p2p", ctypes.c_uint),
            ("instances", ctypes.c_uint), ("sms", ctypes.c_uint), ("copies", ctypes.c_uint), ("decoders", ctypes.c_uint),
            ("encoders", ctypes.c_uint), ("jpegs", ctypes.c_uint), ("ofas", ctypes.c_uint), ("mib", ctypes.c_ulonglong),
            ("name", ctypes.c_char * 96),
        ]

    found = {}
    for number in range(16):
        answer = Profile(version=ctypes.sizeof(Profile) | 2 << 24)
        if nvml.code("nvmlDeviceGetGpuInstanceProfileInfoV", nvml.handle, number, ctypes.byref(answer)) == 0:
            name = answer.name.decode().removeprefix("MIG ")
            if "+" not in name:
                found[name] = {"sms": answer.sms, "memory_bytes": answer.mib << 20}
    return found


def measure():
    nvml = device.Nvml()
    before = nvml.memory()["used"]
    told = board(nvml)
    driver = device.Driver()
    context = nvml.memory()["used"] - before

    def attribute(number):
        value = ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, driver.device)
        return value.value

    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.call("cuDeviceGetName", name, 256, driver.device)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), driver.device)
    sizes = {name: attribute(number) for name, number in ATTRIBUTES.items()}
    with tempfile.TemporaryDirectory() as folder:
        program = call_costs(pathlib.Path(folder))
        done = subprocess.run([program, "device"], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise device.DriverError(done.stderr.strip())
    costs = json.loads(done.stdout.removeprefix(MARK))
    # A wave is the number of blocks of 1024 threads placed together.
    wave = sizes["sms"] * max(1, sizes["threads_per_sm"] // 1024)
    return {
        "device_name": f'"{name.value.decode().removesuffix(" (simulated)")}"', "gpus": 1, "memory_bytes": total.value,
        "reserved_bytes": max(0, nvml.memory()["total"] - total.value),
        "compute_capability": [attribute(number) for number in CAPABILITY], **sizes,
        "host_bandwidth": round((costs["down_bytes_per_s"] + costs["up_bytes_per_s"]) / 2),
        "device_bandwidth": costs["within_bytes_per_s"], "copy_fixed_ns": round(costs["device_copy_ns"]),
        "context_bytes": max(0, context),
    }, {
        "cost": {"fixed_ns": round(costs["kernel_ns"]), "ns_per_wave": round(costs["block_ns"] * wave)},
        "calls": {name: max(0, round(costs[name])) for name in ("launch_ns", "graph_ns", "graph_node_ns", "event_ns", "copy_ns")},
        "board": told,
    }, mig_slices(nvml)


def main():
    try:
        top, tables, slices = measure()
    except (device.DriverError, RowEnd, OSError, subprocess.TimeoutExpired) as error:
        print(f"measure_profile.py: {error}", file=sys.stderr)
        return 1
    for name, value in top.items():
        print(f"{name} = {value}")
    for table, values in tables.items():
        print(f"\n[{table}]")
        for name, value in values.items():
            print(f"{name} = {value}")
    for name, values in slices.items():
        print(f'\n[[mig]]\nname = "{name}"\nsms = {values["sms"]}\nmemory_bytes = {values["memory_bytes"]}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
