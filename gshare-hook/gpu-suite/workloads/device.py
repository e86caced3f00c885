"""The driver and NVML by `ctypes`, for workloads without a framework, and a device's self-description."""

import ctypes
import json

PTX_SPIN = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_1000us_full()
{
    .reg .u64 %begin, %now;
    .reg .pred %more;
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %more, %now, 1000000;
    @%more bra again;
    ret;
}
\0"""
"""Spins for a millisecond by the device's own clock; the simulated driver takes the length from the name."""
SPIN = b"spin_1000us_full"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
EVENT_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class DriverError(Exception):
    """A driver or NVML call that did not succeed."""


class Driver:
    """The CUDA driver, its first device and that device's primary context."""

    def __init__(self, context=True):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.device = device.value
        if context:
            handle = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self.device)
            self.call("cuCtxSetCurrent", handle)

    def code(self, name, *arguments):
        """Calls a function of the driver and gives its code."""
        return getattr(self.driver, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise DriverError(f"{name}: error {code}")

    def memory(self):
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size):
        """Device memory of this size; None if the device lacks room."""
        pointer = ctypes.c_uint64()
        code = self.code("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == OUT_OF_MEMORY:
            return None
        if code != 0:
            raise DriverError(f"cuMemAlloc_v2: error {code}")
        return pointer

    def free(self, pointer):
        self.call("cuMemFree_v2", pointer)

    def spinner(self):
        """A function which launches a kernel of 1 ms, and a function which marks the end of the launches and returns its wait."""
        module, kernel, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), PTX_SPIN)
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, SPIN)
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        sizes = [ctypes.c_uint(n) for n in (1024, 1, 1, 32, 1, 1, 0)]

        def launch():
            self.call("cuLaunchKernel", kernel, *sizes, stream, None, None)

        def mark():
            event = ctypes.c_void_p()
            self.call("cuEventCreate", ctypes.byref(event), EVENT_DISABLE_TIMING)
            self.call("cuEventRecord", event, stream)

            def wait():
                self.call("cuEventSynchronize", event)
                self.call("cuEventDestroy_v2", event)

            return wait

        return launch, mark


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """NVIDIA's monitoring library and its first device."""

    def __init__(self):
        self.driver = ctypes.CDLL("libnvidia-ml.so.1")
        self.call("nvmlInit_v2")
        self.handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))

    def code(self, name, *arguments):
        """Calls a function of NVML and gives its code."""
        return getattr(self.driver, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise DriverError(f"{name}: error {code}")

    def memory(self):
        """Total, free and used bytes."""
        memory = Memory()
        self.call("nvmlDeviceGetMemoryInfo", self.handle, ctypes.byref(memory))
        return {"total": memory.total, "free": memory.free, "used": memory.used}

    def processes(self):
        """Used bytes of each process of the list, by pid."""
        count, found = ctypes.c_uint(64), (Process * 64)()
        self.call("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, ctypes.byref(count), found)
        return {str(process.pid): process.used for process in found[: count.value]}


def describe():
    """Name, number, memory and driver of the devices here, and whether they are simulated."""
    driver = Driver(context=False)
    name, count, version, total = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    driver.call("cuDeviceGetName", name, 256, driver.device)
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), driver.device)
    text = name.value.decode()
    return {
        "name": text,
        "count": count.value,
        "driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "total_bytes": total.value,
        # Either sign is enough: the name is the driver's word, the symbol is only in the simulator.
        "simulated": "(simulated)" in text or hasattr(driver.driver, "gshare_sim_truth"),
    }


if __name__ == "__main__":
    print("suite: " + json.dumps(describe()))
