#!/usr/bin/env python3
"""Writes src/symbols.txt, the table of CUDA driver symbols.

    generate.py [--check] HEADER_DIR...

Each HEADER_DIR holds the `cuda.h` and `cudaTypedefs.h` of one CUDA release (and, where the release ships them, the
GL, EGL, VDPAU and profiler companions). They come with NVIDIA's PyPI wheels:

    pip download --no-deps nvidia-cuda-runtime==13.5.37 nvidia-cuda-runtime-cu12==12.9.79
    unzip '*.whl'                  # -> nvidia/cu13/include, nvidia/cuda_runtime/include

Facts are taken, no text is copied:

* `cudaTypedefs.h` names one type per variant, `PFN_<base>_v<introduced>[_ptsz|_ptds]`;
* `cuda.h`, preprocessed with `__CUDA_API_VERSION_INTERNAL`, declares one function per variant,
  `<base>[_v<n>][_ptsz|_ptds]`, with its C signature.

Within one base name and one stream flavour, both lists have the same length, and the n-th oldest of one is the n-th
oldest of the other. The releases given must agree wherever they overlap, or nothing is written.

`--check` writes nothing and fails if the file on disk differs from the new table.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / "src" / "symbols.txt"
COMPANIONS = ["cudaGL", "cudaEGL", "cudaVDPAU", "cudaProfiler"]

# The first rule that matches a base name gives its class.
CLASSES = [
    ("Launch", r"cuLaunch\w*|cuGraphLaunch|cuStreamAddCallback"),
    ("Copy", r"cuMemcpy\w*|cuMemset\w*|cuMemPrefetch\w*|cuMemDiscard\w*|cuMemBatchDecompress\w*|cuFabricCpy\w*"),
    ("Capture", r"cuStream\w*[Cc]aptur\w*|cuStreamUpdateCaptureDependencies|cuThreadExchangeStreamCaptureMode"),
    ("Graph", r"cuGraph(?!ics)\w*|cuDevice\w*Graph\w*|cuUserObject\w*"),
    ("Pool", r"cuMem\w*Pool\w*(?<!FromPoolAsync)|cuDevice\w*MemPool"),
    ("Alloc", r"cuMemAlloc\w*|cuMemHostAlloc|cuMemHostRegister"),
    ("Free", r"cuMemFree\w*|cuMemHostUnregister"),
    ("Ipc", r"cuIpc\w*|cuImportExternal\w*|cuDestroyExternal\w*|cuExternalMemory\w*|cuGraphics\w*|cuGL\w*|cuEGL\w*|cuVDPAU\w*"),
    ("Array", r"cu(Mipmapped)?Array\w*"),
    ("Info", r"cuMemGetInfo|cuDeviceTotalMem|cuDeviceGet\w*|cuDeviceComputeCapability|cuDriverGetVersion|cuPointerGet\w*"),
    ("Vmm", r"cuMem(Create|Release|Map|MapArrayAsync|Unmap|Address\w*|SetAccess|GetAccess|GetAllocation\w*|RetainAllocation\w*"
            r"|ExportToShareable\w*|ImportFromShareable\w*)|cuMulticast\w*|cuLogicalEndpoint\w*"),
    ("Sync", r"cu\w*Synchronize\w*|cuStream(Query|Wait\w*|Write\w*|BatchMemOp)|cuEvent(Query|Record\w*)"
             r"|cuWait\w*|cuSignal\w*|cuCtx(Record|Wait)Event|cuGreenCtx(Record|Wait)Event"),
    ("Context", r"cuCtx\w*|cuDevicePrimaryCtx\w*|cuGreenCtx\w*|cuStream(Create\w*|Destroy|GetCtx|GetGreenCtx|GetDevice)|cuDev\w*Resource\w*"),
    ("Other", r"cu\w+"),
]

SCALARS = {
    "void": "c_void", "char": "c_char", "float": "f32", "int": "c_int", "unsigned int": "c_uint", "unsigned": "c_uint",
    "unsigned char": "c_uchar", "unsigned short": "c_ushort", "unsigned long long": "c_ulonglong", "size_t": "usize",
    "cuuint32_t": "u32", "cuuint64_t": "u64", "CUdevice": "CUdevice", "CUdevice_v1": "CUdevice",
    "CUdeviceptr": "CUdeviceptr", "CUdeviceptr_v2": "CUdeviceptr", "CUdeviceptr_v1": "c_uint", "CUresult": "CUresult",
    # Passed by value: spelled out in `types`, without the Rust enums of the bindings.
    "CUmemLocation": "CUmemLocation",
    # The window-system interfaces, for which no binding is wanted.
    "GLuint": "c_uint", "GLenum": "c_uint", "VdpDevice": "u32", "VdpVideoSurface": "u32", "VdpOutputSurface": "u32",
    "EGLint": "i32", "EGLImageKHR": "*mut c_void", "EGLStreamKHR": "*mut c_void", "EGLSyncKHR": "*mut c_void",
    "CUeglStreamConnection": "*mut c_void", "CUeglFrame": "c_void", "CUeglFrame_v1": "c_void",
    "HGPUNV": "*mut c_void", "VdpGetProcAddress": "c_void", "CUGLDeviceList": "c_uint", "CUoutput_mode": "c_uint",
}
# Types the bindings lack; pointers to them are passed on unread.
RESERVED = {"type", "in", "ref", "mod", "move", "fn", "use", "match", "self", "loop", "impl"}


def fail(message):
    sys.exit(f"generate.py: {message}")


def preprocess(directory, header):
    """The header after the preprocessor, with the declarations of every variant."""
    stubs = tempfile.mkdtemp()
    for name in ["GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h", "cudaProfiler.h"]:
        path = pathlib.Path(stubs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    flags = ["-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", stubs, "-I", str(directory)]
    done = subprocess.run(["gcc", *flags, str(directory / header)], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else fail(done.stderr)


def c_functions(text):
    """{exported name: C parameter list}"""
    found = re.findall(r"\bCUresult\s+(?:CUDAAPI\s+)?(cu\w+)\s*\(([^;]*?)\)\s*;", text)
    return {name: re.sub(r"\s+", " ", params).strip() for name, params in found}


def c_typedefs(text):
    """[(base name, introducing version, flavour, C parameter list)]"""
    pattern = r"\(\s*(?:CUDAAPI\s*)?\*\s*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)\s*\(([^;]*?)\)\s*;"
    return [(b, int(v), s, re.sub(r"\s+", " ", p).strip()) for b, v, s, p in re.findall(pattern, text)]


class Bindings:
    """The types that cudarc's bindings of the driver offer."""

    def __init__(self):
        roots = pathlib.Path.home() / ".cargo" / "registry" / "src"
        found = sorted(roots.glob("*/cudarc-*/src/driver/sys/mod.rs"))
        if not found:
            fail("no cudarc in the cargo registry: run `cargo fetch` first")
        text = found[-1].read_text()
        enums = set(re.findall(r"pub enum (\w+)", text))
        self.aliases = {alias: target for target, alias in re.findall(r"pub use self::(\w+) as (\w+);", text)}
        self.aliases.update({a: t for a, t in re.findall(r"pub type (\w+) = (\w+);", text)})
        self.known = set(re.findall(r"pub (?:struct|union|type) (\w+)", text)) | set(self.aliases)
        self.enums = {name for name in self.known | enums if self.target(name) in enums}

    def target(self, name):
        while name in self.aliases:
            name = self.aliases[name]
        return name


def rust_type(c_type, bindings, unknown):
    c_type = c_type.replace("*", " * ").replace("struct ", "")
    stars = c_type.count("*")
    const = c_type.split("*")[0].split().count("const") > 0
    base = " ".join(word for word in c_type.replace("*", " ").split() if word != "const")
    if base in SCALARS:
        rust = SCALARS[base]
    elif base in bindings.enums:
        rust = "c_uint"
    elif base in bindings.known:
        rust = f"sys::{base}"
    elif stars:
        unknown.add(base)
        rust = "c_void"
    else:
        unknown.add(base + " (by value)")
        rust = "c_uint"
    for level in range(stars):
        rust = ("*const " if const and level == 0 else "*mut ") + rust
    return rust


def rust_params(params, bindings, unknown):
    if params in ("", "void"):
        return []
    out = []
    for param in params.split(","):
        param = param.strip()
        array = re.search(r"\[\w*\]$", param)
        if array:
            param = param[: array.start()].strip()
        split = re.fullmatch(r"(.*?[\s*])(\w+)", param)
        if not split:
            fail(f"cannot read the parameter {param!r}")
        c_type, name = split[1].strip() + ("*" if array else ""), split[2]
        out.append((name + "_" if name in RESERVED else name, rust_type(c_type, bindings, unknown)))
    return out


def class_of(base):
    return next(name for name, pattern in CLASSES if re.fullmatch(pattern, base))


def collect(directory, table):
    """Adds one release's variants to {exported name: (base, introduced, flavour, C parameters)}."""
    # The companions' typedefs and declarations share the main headers' shape.
    typedefs, declared = [], {}
    for stem in ["cuda", *COMPANIONS]:
        header = directory / f"{stem}Typedefs.h"
        if header.exists():
            typedefs += c_typedefs(preprocess(directory, header.name))
        header = directory / f"{stem}.h"
        if header.exists():
            declared.update(c_functions(preprocess(directory, header.name)))
    families = collections.defaultdict(lambda: ([], []))
    for base, introduced, flavour, params in set(typedefs):
        families[(base, flavour != "")][0].append((introduced, flavour, params))
        # The wheels carry the profiler's typedefs but not its header; it never had a second variant.
        if base.startswith("cuProfiler"):
            declared.setdefault(base, params)
    for exported, params in declared.items():
        base, number, flavour = re.fullmatch(r"(cu\w+?)(?:_v(\d+))?(_ptsz|_ptds)?", exported).groups()
        families[(base, flavour is not None)][1].append((int(number or 1), exported, params))
    for (base, _), (types, names) in families.items():
        if len(types) != len(names):
            fail(f"{directory}: {base} has {len(types)} typedefs and {len(names)} declarations: {types} {names}")
        for (introduced, flavour, _), (_, exported, params) in zip(sorted(types), sorted(names)):
            entry = (base, introduced, flavour, params)
            if exported in table and table[exported][:3] != entry[:3]:
                fail(f"{directory}: {exported} is {entry[:3]}, elsewhere {table[exported][:3]}")
            table[exported] = entry


def release(directory):
    return int(re.search(r"#define CUDA_VERSION (\d+)", (directory / "cuda.h").read_text())[1])


def render(directories):
    directories = sorted(map(pathlib.Path, directories), key=release)
    table = {}
    for directory in directories:  # oldest first: the newest signature stays
        collect(directory, table)
    bindings, unknown, rows = Bindings(), set(), []
    ordered = sorted(table.items(), key=lambda item: (item[1][0], item[1][2] != "", item[1][1]))
    for exported, (base, introduced, _, params) in ordered:
        args = ", ".join(f"{n}: {t}" for n, t in rust_params(params, bindings, unknown))
        rows.append(f"{exported} {introduced} {class_of(base)} ({args})")
    releases = ", ".join(f"{v // 1000}.{v % 1000 // 10}" for v in map(release, directories))
    newest = release(directories[-1])
    text = "\n".join([
        "# Written by generate.py; do not edit. Releases read: " + releases + ".",
        "# A row has the exported name, the first release with it, its class and its arguments; rows are sorted by base name, flavour, release.",
        f"newest {newest}",
        *rows,
        "",
    ])
    if unknown:
        print("passed on unread:", ", ".join(sorted(unknown)), file=sys.stderr)
    return text, len(rows)


def main(arguments):
    check = "--check" in arguments
    directories = [a for a in arguments if a != "--check"]
    if not directories:
        fail(__doc__)
    text, count = render(directories)
    if check:
        if TARGET.read_text() != text:
            fail(f"{TARGET} differs from the table of these headers")
    else:
        TARGET.write_text(text)
    print(f"{count} symbols", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
