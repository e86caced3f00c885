#!/usr/bin/env python3
"""Asks the CUDA driver and NVML the questions of programs, odd questions too, and prints the answers as JSON, one a line.

    python3 gshare-hook/gpu-suite/answers.py > answers.json                       # of the driver found
    python3 gshare-hook/gpu-suite/answers.py --against answers.json               # how these differ from a recording
    python3 gshare-hook/gpu-suite/answers.py --against answers.json --known known.json

CI compares the simulated driver with a recording of a GPU. Every question is harmless: none leaves an error in the
context, and nothing is set on the card. Addresses, times and temperatures are not recorded. A file of known differences maps reasons
to lists of questions; then another difference is an error (exit code 1), and so is a listed question without a difference.
"""

import argparse
import ctypes
import json
import pathlib
import subprocess
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "workloads"))

import device  # noqa: E402

ATTRIBUTES, FUNCTION_ATTRIBUTES, LIMITS, P2P, POOL_ATTRIBUTES = range(1, 150), range(17), range(8), range(1, 6), range(1, 13)
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.global .align 4 .u32 counter;
.visible .entry nothing(.param .u64 a, .param .u32 b) .maxntid 256, 1, 1
{
    .shared .align 4 .b8 tile[512];
    ret;
}
\0"""
TABLES = [
    "6BD5FB6C5BF4E74A8987D93912FD9DF9", "A094798C2E742E7493F20800200C0A66", "42D85A8123F6CB478298F6E78A3AECDC",
    "C693336E1121DF11A8C368F355D89593", "263E88607CD2614392F6BBD5006DFA7E", "D4082055BDE6704B8D34BA123C66E1F2",
    "21318C60971432488CA641FF7324C8F2", "6E163FBEB958444D835CE182AFF1991E", "00000000000000000000000000000001",
]
WORD, SIZE, INT, UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class Location(ctypes.Structure):
    _fields_ = [("type", INT), ("id", INT)]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", INT), ("handles", INT), ("location", Location), ("win32", WORD), ("compress", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    ]


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", UINT), ("padding", UINT), ("value", UINT * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [*((name, UINT) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")), ("stream", WORD),
                ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", UINT)]


CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class Answers:
    """Questions to the driver, with their answers by the question's name."""

    def __init__(self):
        self.driver, self.found = ctypes.CDLL("libcuda.so.1"), {}

    def code(self, name, *arguments):
        function = getattr(self.driver, name, None)
        return "no such function" if function is None else function(*arguments)

    def ask(self, question, name, *arguments, out=None, keep=True):
        """Records the code, and with `out` the value where the code is 0; `keep` off where the value is of no interest."""
        value = out() if out else None
        given = [ctypes.byref(value) if argument is OUT else argument for argument in arguments]
        code = self.code(name, *given)
        told = getattr(value, "value", None)
        self.found[question] = code if code != 0 or out is None or not keep else [code, told]
        return value if code == 0 else None


OUT = object()


def of_devices(a):
    a.ask("a count before cuInit", "cuDeviceGetCount", OUT, out=INT)
    a.ask("a context before cuInit", "cuCtxGetCurrent", OUT, out=WORD)
    a.ask("cuInit with flags", "cuInit", 1)
    a.ask("cuInit", "cuInit", 0)
    a.ask("the driver's version", "cuDriverGetVersion", OUT, out=INT)
    a.ask("count of devices", "cuDeviceGetCount", OUT, out=INT)
    a.ask("device 0", "cuDeviceGet", OUT, 0, out=INT)
    for number in (-1, 99):
        a.ask(f"device {number}", "cuDeviceGet", OUT, number, out=INT)
        a.ask(f"attribute 16 of device {number}", "cuDeviceGetAttribute", OUT, 16, number, out=INT)
    a.ask("a count into NULL", "cuDeviceGetCount", None)
    a.ask("memory of the device", "cuDeviceTotalMem_v2", OUT, 0, out=SIZE)
    # Numbers of the bus and of the host belong to this machine.
    for number in ATTRIBUTES:
        a.ask(f"attribute {number}", "cuDeviceGetAttribute", OUT, number, 0, out=INT, keep=number not in (33, 34, 50))
    for number in (0, 1000):
        a.ask(f"attribute {number}", "cuDeviceGetAttribute", OUT, number, 0, out=INT)
    for number in P2P:
        a.ask(f"P2P attribute {number} of a device and itself", "cuDeviceGetP2PAttribute", OUT, number, 0, 0, out=INT)
    a.ask("can a device access itself", "cuDeviceCanAccessPeer", OUT, 0, 0, out=INT)
    for kind in (0, 1):
        a.ask(f"execution affinity {kind}", "cuDeviceGetExecAffinitySupport", OUT, kind, 0, out=INT)
    text = ctypes.create_string_buffer(4)
    a.ask("a name in 4 bytes", "cuDeviceGetName", text, 4, 0)
    a.found["the name in 4 bytes"] = text.value.decode(errors="replace")
    a.ask("a bus id in 4 bytes", "cuDeviceGetPCIBusId", text, 4, 0)
    a.ask("a device by a wrong bus id", "cuDeviceGetByPCIBusId", OUT, b"nothing", out=INT)
    for table in TABLES:
        pointer = a.ask(f"table {table}", "cuGetExportTable", OUT, bytes.fromhex(table), out=WORD, keep=False)
        if pointer is not None:
            first = ctypes.cast(pointer, ctypes.POINTER(SIZE))[0]
            a.found[f"size of table {table}"] = first if first < 1 << 16 else "no size"
    for name, version, flags in [
        (b"cuMemAlloc", 2000, 0), (b"cuMemAlloc", 3020, 0), (b"cuMemAlloc_v2", 12000, 0), (b"cuNothing", 12000, 0),
        (b"cuLaunchKernel", 1000, 0), (b"cuLaunchKernel", 12000, 2), (b"cuLaunchKernel", 12000, 9),
        (b"cuCtxCreate", 13000, 0), (b"cuMemPrefetchAsync", 13000, 0), (b"cuMemPrefetchAsync", 12000, 0),
    ]:
        status = INT(-1)
        a.ask(f"look up {name.decode()} of {version}, flags {flags}", "cuGetProcAddress_v2", name, OUT, version,
              ctypes.c_uint64(flags), ctypes.byref(status), out=WORD, keep=False)
        a.found[f"status of {name.decode()} of {version}, flags {flags}"] = status.value


def of_contexts(a):
    for name, arguments in [
        ("cuMemAlloc_v2", (OUT, SIZE(16))), ("cuStreamCreate", (OUT, 0)), ("cuEventCreate", (OUT, 0)), ("cuCtxGetDevice", (OUT,)),
        ("cuModuleLoadData", (OUT, PTX)),
    ]:
        a.ask(f"{name} without a context", name, *arguments, out=WORD, keep=False)
    a.ask("synchronize without a context", "cuCtxSynchronize")
    a.ask("free of NULL without a context", "cuMemFree_v2", ctypes.c_uint64(0))
    a.ask("the current context where there is none", "cuCtxGetCurrent", OUT, out=WORD)
    a.ask("pop where there is none", "cuCtxPopCurrent_v2", OUT, out=WORD)
    flags, active = UINT(), INT()
    a.ask("state of the primary context", "cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(active))
    a.found["the primary context's flags and state"] = [flags.value, active.value]
    a.ask("release of a primary context that nobody has", "cuDevicePrimaryCtxRelease_v2", 0)
    context = a.ask("retain the primary context", "cuDevicePrimaryCtxRetain", OUT, 0, out=WORD, keep=False)
    a.ask("make it current", "cuCtxSetCurrent", context)
    for limit in LIMITS:
        a.ask(f"limit {limit}", "cuCtxGetLimit", OUT, limit, out=SIZE)
    a.ask("an unknown limit", "cuCtxGetLimit", OUT, 99, out=SIZE)
    a.ask("the context's version", "cuCtxGetApiVersion", context, OUT, out=UINT)
    a.ask("the context's flags", "cuCtxGetFlags", OUT, out=UINT)
    a.ask("the cache's configuration", "cuCtxGetCacheConfig", OUT, out=INT)
    least, greatest = INT(), INT()
    a.ask("range of priorities", "cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    a.found["least and greatest priority"] = [least.value, greatest.value]
    a.ask("peer access to itself", "cuCtxEnablePeerAccess", context, 0)
    a.ask("destroy the primary context", "cuCtxDestroy_v2", None)


def of_memory(a):
    total = SIZE()
    a.ask("free and total memory", "cuMemGetInfo_v2", OUT, ctypes.byref(total), out=SIZE, keep=False)
    a.found["total memory"] = total.value
    a.ask("no bytes", "cuMemAlloc_v2", OUT, SIZE(0), out=ctypes.c_uint64, keep=False)
    a.ask("more than there is", "cuMemAlloc_v2", OUT, SIZE(1 << 50), out=ctypes.c_uint64)
    a.ask("memory into NULL", "cuMemAlloc_v2", None, SIZE(16))
    block = a.ask("a block of 1000 bytes", "cuMemAlloc_v2", OUT, SIZE(1000), out=ctypes.c_uint64, keep=False)
    size = SIZE()
    inside = ctypes.c_uint64(block.value + 100)
    a.found["a block's address in 512"] = block.value % 512
    a.ask("range of an address inside", "cuMemGetAddressRange_v2", OUT, ctypes.byref(size), inside, out=ctypes.c_uint64, keep=False)
    a.found["size of the range"] = size.value
    a.ask("free of an address inside", "cuMemFree_v2", inside)
    a.ask("free of an unknown address", "cuMemFree_v2", ctypes.c_uint64(1))
    a.ask("range of an unknown address", "cuMemGetAddressRange_v2", OUT, None, ctypes.c_uint64(1 << 20), out=ctypes.c_uint64)
    # Numbers of CUpointer_attribute with answers other than addresses.
    for number in (2, 4, 8, 9, 10, 13, 15, 17):
        value = ctypes.c_uint64(0)
        a.found[f"pointer attribute {number} of a block"] = [
            a.code("cuPointerGetAttribute", ctypes.byref(value), number, block), value.value & 0xFFFFFFFF]
        a.found[f"pointer attribute {number} of an unknown address"] = a.code(
            "cuPointerGetAttribute", ctypes.byref(value), number, ctypes.c_uint64(1 << 20))
    a.ask("an unknown pointer attribute", "cuPointerGetAttribute", OUT, 99, block, out=ctypes.c_uint64)
    a.ask("fill of nothing", "cuMemsetD8_v2", block, 0, SIZE(0))
    a.ask("copy of nothing", "cuMemcpyDtoD_v2", block, block, SIZE(0))
    host = ctypes.create_string_buffer(4096)
    a.ask("register the same memory", "cuMemHostRegister_v2", host, SIZE(4096), 0)
    a.ask("register it twice", "cuMemHostRegister_v2", host, SIZE(4096), 0)
    a.ask("unregister it", "cuMemHostUnregister", host)
    a.ask("unregister it twice", "cuMemHostUnregister", host)
    a.ask("free of host memory that is not the driver's", "cuMemFreeHost", host)
    a.ask("free the block", "cuMemFree_v2", block)
    a.ask("free the block twice", "cuMemFree_v2", block)
    a.ask("free of NULL", "cuMemFree_v2", ctypes.c_uint64(0))
    managed = a.ask("managed memory", "cuMemAllocManaged", OUT, SIZE(4096), 1, out=ctypes.c_uint64, keep=False)
    a.ask("managed memory with no flags", "cuMemAllocManaged", OUT, SIZE(4096), 0, out=ctypes.c_uint64, keep=False)
    a.ask("free managed memory", "cuMemFree_v2", managed)
    for kind, handles, place in [(1, 0, 1), (1, 1, 1), (0, 0, 1), (1, 0, 0), (1, 8, 1)]:
        prop = AllocationProp(type=kind, handles=handles, location=Location(place, 0))
        for option in (0, 1, 2):
            a.ask(f"granularity {option} of type {kind}, handles {handles}, place {place}", "cuMemGetAllocationGranularity", OUT,
                  ctypes.byref(prop), option, out=SIZE)
    prop = AllocationProp(type=1, location=Location(1, 0))
    physical = a.ask("physical memory of no granule", "cuMemCreate", OUT, SIZE(1000), ctypes.byref(prop), ctypes.c_uint64(0),
                     out=ctypes.c_uint64, keep=False)
    physical = a.ask("physical memory", "cuMemCreate", OUT, SIZE(2 << 20), ctypes.byref(prop), ctypes.c_uint64(0),
                     out=ctypes.c_uint64, keep=False)
    space = a.ask("addresses", "cuMemAddressReserve", OUT, SIZE(4 << 20), SIZE(0), ctypes.c_uint64(0), ctypes.c_uint64(0),
                  out=ctypes.c_uint64, keep=False)
    a.ask("addresses of no granule", "cuMemAddressReserve", OUT, SIZE(1000), SIZE(0), ctypes.c_uint64(0), ctypes.c_uint64(0),
          out=ctypes.c_uint64, keep=False)
    a.ask("map", "cuMemMap", space, SIZE(2 << 20), SIZE(0), physical, ctypes.c_uint64(0))
    a.ask("map it again", "cuMemMap", space, SIZE(2 << 20), SIZE(0), physical, ctypes.c_uint64(0))
    a.ask("map with an offset", "cuMemMap", ctypes.c_uint64(space.value + (2 << 20)), SIZE(1 << 20), SIZE(1 << 20), physical,
          ctypes.c_uint64(0))
    a.ask("free of mapped memory", "cuMemFree_v2", space)
    a.ask("give addresses back while mapped", "cuMemAddressFree", space, SIZE(4 << 20))
    a.ask("unmap a part", "cuMemUnmap", space, SIZE(1 << 20))
    a.ask("unmap", "cuMemUnmap", space, SIZE(2 << 20))
    a.ask("unmap twice", "cuMemUnmap", space, SIZE(2 << 20))
    a.ask("release physical memory", "cuMemRelease", physical)
    a.ask("release it twice", "cuMemRelease", physical)
    a.ask("give addresses back", "cuMemAddressFree", space, SIZE(4 << 20))
    pool = a.ask("the default pool", "cuDeviceGetDefaultMemPool", OUT, 0, out=WORD, keep=False)
    for number in POOL_ATTRIBUTES:
        a.ask(f"pool attribute {number}", "cuMemPoolGetAttribute", pool, number, OUT, out=ctypes.c_uint64)
    a.ask("destroy the default pool", "cuMemPoolDestroy", pool)
    stored = a.ask("memory from a pool", "cuMemAllocAsync", OUT, SIZE(1 << 20), None, out=ctypes.c_uint64, keep=False)
    a.ask("memory of no bytes from a pool", "cuMemAllocAsync", OUT, SIZE(0), None, out=ctypes.c_uint64, keep=False)
    a.ask("more than there is from a pool", "cuMemAllocAsync", OUT, SIZE(1 << 50), None, out=ctypes.c_uint64)
    a.ask("what a pool holds reserved", "cuMemPoolGetAttribute", pool, 5, OUT, out=ctypes.c_uint64)
    a.ask("free into a pool", "cuMemFreeAsync", stored, None)
    a.ask("free into a pool of NULL", "cuMemFreeAsync", ctypes.c_uint64(0), None)
    a.ask("synchronize", "cuCtxSynchronize")
    a.ask("what it holds after a synchronization", "cuMemPoolGetAttribute", pool, 5, OUT, out=ctypes.c_uint64)


def of_work(a):
    a.ask("code that is none", "cuModuleLoadData", OUT, b"nothing\0", out=WORD)
    a.ask("code from NULL", "cuModuleLoadData", OUT, None, out=WORD)
    a.ask("a file that is not there", "cuModuleLoad", OUT, b"/nothing", out=WORD)
    module = a.ask("a module", "cuModuleLoadData", OUT, PTX, out=WORD, keep=False)
    kernel = a.ask("its function", "cuModuleGetFunction", OUT, module, b"nothing", out=WORD, keep=False)
    a.ask("a function that is not there", "cuModuleGetFunction", OUT, module, b"something", out=WORD)
    a.ask("a function of NULL", "cuModuleGetFunction", OUT, None, b"nothing", out=WORD)
    size = SIZE()
    a.ask("a global", "cuModuleGetGlobal_v2", OUT, ctypes.byref(size), module, b"counter", out=ctypes.c_uint64, keep=False)
    a.found["size of the global"] = size.value
    a.ask("a global that is not there", "cuModuleGetGlobal_v2", OUT, ctypes.byref(size), module, b"x", out=ctypes.c_uint64)
    a.ask("count of functions", "cuModuleGetFunctionCount", OUT, module, out=UINT)
    # Registers, versions and binary size depend on the compiler.
    for number in FUNCTION_ATTRIBUTES:
        a.ask(f"function attribute {number}", "cuFuncGetAttribute", OUT, number, kernel, out=INT, keep=number not in (4, 5, 6))
    offset = SIZE()
    for number in (0, 1, 2):
        a.ask(f"offset of parameter {number}", "cuFuncGetParamInfo", kernel, SIZE(number), OUT, ctypes.byref(offset), out=SIZE)
    a.ask("blocks that fit an SM", "cuOccupancyMaxActiveBlocksPerMultiprocessor", OUT, kernel, 256, SIZE(0), out=INT)
    a.ask("blocks of too many threads that fit", "cuOccupancyMaxActiveBlocksPerMultiprocessor", OUT, kernel, 1024, SIZE(0), out=INT)
    for blocks, threads in ((1, 1), (1, 256), (4, 32), (32, 32)):
        a.ask(f"shared memory that {blocks} blocks of {threads} leave each", "cuOccupancyAvailableDynamicSMemPerBlock", OUT, kernel,
              blocks, threads, out=SIZE)
    for size in (0, 1, 2, 3, 4, 8, 16, 32):
        attribute = LaunchAttribute(CLUSTER, 0, (UINT * 16)(size, 1, 1))
        for grid, shared in ((1056, 0), (96, 40 << 10)):
            config = LaunchConfig(grid, 1, 1, 128, 1, 1, shared, None, ctypes.pointer(attribute), 1 if size else 0)
            words = f"clusters of {size} blocks of 128 threads, {shared} bytes, {grid} blocks"
            a.ask(f"{words}: most at once", "cuOccupancyMaxActiveClusters", OUT, kernel, ctypes.byref(config), out=INT)
            a.ask(f"{words}: a launch", "cuLaunchKernelEx", ctypes.byref(config), kernel,
                  (WORD * 2)(*(ctypes.cast(ctypes.pointer(ctypes.c_uint64(0)), WORD).value,) * 2), None)
            a.ask(f"{words}: largest cluster", "cuOccupancyMaxPotentialClusterSize", OUT, kernel, ctypes.byref(config), out=INT)
    a.ask("let clusters be larger than portable", "cuFuncSetAttribute", kernel, 14, 1)
    attribute = LaunchAttribute(CLUSTER, 0, (UINT * 16)(16, 1, 1))
    config = LaunchConfig(1056, 1, 1, 128, 1, 1, 0, None, ctypes.pointer(attribute), 1)
    a.ask("then clusters of 16: most at once", "cuOccupancyMaxActiveClusters", OUT, kernel, ctypes.byref(config), out=INT)
    a.ask("then the largest cluster", "cuOccupancyMaxPotentialClusterSize", OUT, kernel, ctypes.byref(config), out=INT)
    a.ask("more shared memory", "cuFuncSetAttribute", kernel, 8, 200 << 10)
    a.ask("more shared memory than there is", "cuFuncSetAttribute", kernel, 8, 300 << 10)
    a.ask("a negative carveout", "cuFuncSetAttribute", kernel, 9, -5)
    a.ask("an attribute that cannot be set", "cuFuncSetAttribute", kernel, 0, 5)
    arguments = (WORD * 2)(*(ctypes.cast(ctypes.pointer(ctypes.c_uint64(0)), WORD).value,) * 2)
    for words, sizes in [
        ("a launch", (1, 1, 1, 32, 1, 1, 0)), ("a launch of no blocks", (0, 1, 1, 32, 1, 1, 0)),
        ("a launch of no threads", (1, 1, 1, 0, 1, 1, 0)), ("a launch of too many threads", (1, 1, 1, 2048, 1, 1, 0)),
        ("a launch of more threads than declared", (1, 1, 1, 512, 1, 1, 0)),
        ("a launch of too much shared memory", (1, 1, 1, 32, 1, 1, 1 << 20)),
        ("a launch of too many blocks in y", (1, 70000, 1, 32, 1, 1, 0)),
    ]:
        a.ask(words, "cuLaunchKernel", kernel, *map(UINT, sizes), None, arguments, None)
    a.ask("a launch of NULL", "cuLaunchKernel", None, *map(UINT, (1, 1, 1, 32, 1, 1, 0)), None, arguments, None)
    a.ask("synchronize after them", "cuCtxSynchronize")
    for flags in (0, 1, 2):
        a.ask(f"a stream with flags {flags}", "cuStreamCreate", OUT, flags, out=WORD, keep=False)
    stream = a.ask("a stream of high priority", "cuStreamCreateWithPriority", OUT, 1, -100, out=WORD, keep=False)
    a.ask("its priority", "cuStreamGetPriority", stream, OUT, out=INT)
    a.ask("its flags", "cuStreamGetFlags", stream, OUT, out=UINT)
    a.ask("an idle stream", "cuStreamQuery", stream)
    event = a.ask("an event", "cuEventCreate", OUT, 0, out=WORD, keep=False)
    other = a.ask("another event", "cuEventCreate", OUT, 2, out=WORD, keep=False)
    a.ask("an event of unknown flags", "cuEventCreate", OUT, 64, out=WORD, keep=False)
    a.ask("an event that was not recorded", "cuEventQuery", event)
    a.ask("a wait for it", "cuEventSynchronize", event)
    a.ask("time between events that were not recorded", "cuEventElapsedTime", OUT, event, event, out=ctypes.c_float, keep=False)
    a.ask("record", "cuEventRecord", event, stream)
    a.ask("record the other", "cuEventRecord", other, stream)
    a.ask("time to an event without times", "cuEventElapsedTime", OUT, event, other, out=ctypes.c_float, keep=False)
    a.ask("a wait for a NULL event", "cuStreamWaitEvent", stream, None, 0)
    a.ask("end of a capture that was not begun", "cuStreamEndCapture", stream, OUT, out=WORD)
    a.ask("capture of the default stream", "cuStreamBeginCapture_v2", None, 2)
    a.ask("a capture", "cuStreamBeginCapture_v2", stream, 2)
    a.ask("a capture twice", "cuStreamBeginCapture_v2", stream, 2)
    a.ask("a query of a capturing stream", "cuStreamQuery", stream)
    a.ask("end of the broken capture", "cuStreamEndCapture", stream, OUT, out=WORD, keep=False)
    a.ask("a capture after it", "cuStreamBeginCapture_v2", stream, 2)
    a.ask("a launch in it", "cuLaunchKernel", kernel, *map(UINT, (1, 1, 1, 32, 1, 1, 0)), stream, arguments, None)
    a.ask("an event's time in it", "cuEventRecord", event, stream)
    a.ask("a query of that event", "cuEventQuery", event)
    graph = a.ask("end of the capture", "cuStreamEndCapture", stream, OUT, out=WORD, keep=False)
    a.ask("nodes of the graph", "cuGraphGetNodes", graph, None, OUT, out=SIZE)
    run = a.ask("instantiate", "cuGraphInstantiateWithFlags", OUT, graph, ctypes.c_uint64(0), out=WORD, keep=False)
    if run is not None:
        a.ask("launch the graph", "cuGraphLaunch", run, stream)
    a.ask("destroy a NULL stream", "cuStreamDestroy_v2", None)
    a.ask("destroy a NULL event", "cuEventDestroy_v2", None)
    a.ask("unload the module", "cuModuleUnload", module)
    a.ask("synchronize at the end", "cuCtxSynchronize")


def of_errors(a):
    for code in (0, 1, 2, 100, 101, 201, 209, 500, 700, 719, 800, 801, 900, 999, 12345):
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            answer = a.code(name, code, ctypes.byref(text))
            a.found[f"{name} of {code}"] = [answer, text.value and text.value.decode()]


def of_nvml(a):
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def ask(question, name, *arguments, out=UINT, keep=True):
        function = getattr(nvml, name, None)
        value = out()
        given = [ctypes.byref(value) if argument is OUT else argument for argument in arguments]
        code = "no such function" if function is None else function(*given)
        told = getattr(value, "value", None)
        if isinstance(told, bytes):
            told = told.decode(errors="replace")
        a.found[question] = code if code != 0 or not keep else [code, told]
        return value

    ask("NVML: a count before its start", "nvmlDeviceGetCount_v2", OUT)
    ask("NVML: start", "nvmlInit_v2")
    handle = ask("NVML: device 0", "nvmlDeviceGetHandleByIndex_v2", 0, OUT, out=WORD, keep=False)
    ask("NVML: device 99", "nvmlDeviceGetHandleByIndex_v2", 99, OUT, out=WORD, keep=False)
    ask("NVML: device by a wrong UUID", "nvmlDeviceGetHandleByUUID", b"GPU-0", OUT, out=WORD, keep=False)
    ask("NVML: CUDA version", "nvmlSystemGetCudaDriverVersion_v2", OUT, out=INT)
    for name in (
        "Architecture", "Brand", "NumGpuCores", "MemoryBusWidth", "ComputeMode", "PersistenceMode", "DisplayMode", "DisplayActive",
        "EccMode", "MaxPcieLinkGeneration", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "BoardId",
        "MultiGpuBoard", "InforomConfigurationChecksum", "NumFans", "FanSpeed", "PowerManagementMode", "PowerState",
        "PerformanceState", "EnforcedPowerLimit", "PowerManagementLimit", "PowerManagementDefaultLimit", "MinorNumber", "Index",
        "VirtualizationMode", "AccountingMode", "GpcClkVfOffset", "MaxMigDeviceCount", "IrqNum", "PcieSpeed",
        "DefaultEccMode", "TotalEnergyConsumption", "BAR1MemoryInfo", "ConfComputeGpuAttestationReport", "IsMigDeviceHandle",
    ):
        keep = name in (
            "Architecture", "Brand", "NumGpuCores", "MemoryBusWidth", "ComputeMode", "DisplayMode", "DisplayActive",
            "MaxPcieLinkGeneration", "MaxPcieLinkWidth", "MultiGpuBoard", "NumFans", "PowerManagementMode", "EnforcedPowerLimit",
            "PowerManagementLimit", "PowerManagementDefaultLimit", "MaxMigDeviceCount", "IsMigDeviceHandle",
        )
        function = "nvmlDeviceIsMigDeviceHandle" if name == "IsMigDeviceHandle" else f"nvmlDeviceGet{name}"
        if name not in ("EccMode", "ConfComputeGpuAttestationReport", "VirtualizationMode", "BAR1MemoryInfo"):
            ask(f"NVML: {name}", function, handle, OUT, out=ctypes.c_uint64, keep=keep)
    current, pending = UINT(), UINT()
    for name in ("EccMode", "MigMode", "GpuOperationMode"):
        function = getattr(nvml, f"nvmlDeviceGet{name}")
        code = function(handle, ctypes.byref(current), ctypes.byref(pending))
        a.found[f"NVML: {name}"] = [code, current.value, pending.value] if code == 0 else code
    major, minor = INT(), INT()
    a.found["NVML: compute capability"] = [
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)), major.value, minor.value]
    for kind in range(4):
        ask(f"NVML: highest clock {kind}", "nvmlDeviceGetMaxClockInfo", handle, kind, OUT)
        ask(f"NVML: default clock {kind}", "nvmlDeviceGetDefaultApplicationsClock", handle, kind, OUT)
    for kind in range(6):
        ask(f"NVML: threshold {kind}", "nvmlDeviceGetTemperatureThreshold", handle, kind, OUT)
    for link in (0, 17, 18):
        ask(f"NVML: state of link {link}", "nvmlDeviceGetNvLinkState", handle, link, OUT)
    memory = device.Memory()
    a.found["NVML: memory"] = [nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), memory.total]

    class Memory2(ctypes.Structure):
        _fields_ = [("version", UINT), *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used"))]

    memory = Memory2(version=ctypes.sizeof(Memory2) | 2 << 24)
    a.found["NVML: memory, version 2"] = [nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)), memory.total, memory.reserved]
    memory = Memory2(version=7)
    a.found["NVML: memory of a wrong version"] = nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory))
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion"):
        text = ctypes.create_string_buffer(80)
        a.found[f"NVML: {name}"] = [getattr(nvml, name)(text, 80), text.value.decode()]
    for name in ("Name", "UUID", "Serial", "VbiosVersion", "BoardPartNumber"):
        text = ctypes.create_string_buffer(96)
        code = getattr(nvml, f"nvmlDeviceGet{name}")(handle, text, 96)
        a.found[f"NVML: {name}"] = [code, text.value.decode()] if name == "Name" else code
        a.found[f"NVML: {name} in 2 bytes"] = getattr(nvml, f"nvmlDeviceGet{name}")(handle, text, 2)
    for code in (0, 1, 2, 3, 6, 7, 15, 999, 1234):
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        a.found[f"NVML: words for {code}"] = nvml.nvmlErrorString(code).decode()
    ask("NVML: stop", "nvmlShutdown")
    ask("NVML: stop twice", "nvmlShutdown")


# Each part runs in a process of its own: a driver which ends one process leaves the others.
PARTS = {part.__name__: part for part in (of_devices, of_contexts, of_memory, of_work, of_errors, of_nvml)}


def answers_of(name):
    """Asks the questions of one part, in this process."""
    a = Answers()
    if name in ("of_memory", "of_work"):
        a.code("cuInit", 0)
        context = WORD()
        a.code("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        a.code("cuCtxSetCurrent", context)
    elif name == "of_contexts":
        a.code("cuInit", 0)
    try:
        PARTS[name](a)
    except (AttributeError, TypeError, OSError) as error:
        traceback.print_exc()
        a.found[name + EARLY] = f"{type(error).__name__}: {error}"
    return a.found


# Suffix of the name of a part without answers.
EARLY = " ended early"


def answers():
    found = {}
    for name in PARTS:
        argv = [sys.executable, "-X", "faulthandler", __file__, "--part", name]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
        try:
            found |= json.loads(done.stdout)
        except ValueError:
            found[name + EARLY] = f"exit code {done.returncode}"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FILE", type=pathlib.Path, help="print the answers that differ from a recording's")
    parser.add_argument("--known", metavar="FILE", type=pathlib.Path, help="differences that are known, with their reasons")
    parser.add_argument("--part", choices=PARTS, help="ask one part's questions alone")
    arguments = parser.parse_args()
    found = answers_of(arguments.part) if arguments.part else answers()
    if arguments.against is None:
        print("{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()) + "\n}")
        return 1 if any(key.endswith(EARLY) for key in found) else 0
    recorded = json.loads(arguments.against.read_text())
    known = json.loads(arguments.known.read_text()) if arguments.known else {}
    listed = {question for questions in known.values() for question in questions}
    differ = [key for key in {**recorded, **found} if recorded.get(key, "not asked") != found.get(key, "not asked")]
    wrong = [key for key in differ if key not in listed]
    for key in wrong:
        print(f"{key}: {json.dumps(recorded.get(key, 'not asked'))} recorded, {json.dumps(found.get(key, 'not asked'))} here")
    stale = sorted(listed.difference(differ))
    for key in stale:
        print(f"{key}: listed as a known difference, and the same in both")
    print(f"{len(found)} answers: {len(differ)} differ, {len(differ) - len(wrong)} of these are known")
    return 1 if wrong or stale else 0


if __name__ == "__main__":
    sys.exit(main())
