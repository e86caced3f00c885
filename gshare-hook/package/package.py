#!/usr/bin/env python3
"""Builds the shipped `libgshare_hook.so`, checks it, and prints its sizes and costs.

    python3 gshare-hook/package/package.py            # build for glibc 2.17, check, measure
    python3 gshare-hook/package/package.py check FILE # check and measure an existing library

A library built on a current system asks for a current C library and does not load in older images. The shipped library is therefore
linked against the symbols of glibc 2.17 (2012: every distribution with a supported driver), by `cargo-zigbuild` and
`ziglang`, which pip fetches into the target directory. The check reads the file itself: its demands on the C library,
its libraries, its exports, and its static thread-local storage.

Needs cargo, python3 with pip, and a way to fetch the two packages; `check` needs nothing. Only the standard library is used.
"""

import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLIBC = (2, 17)
TARGET = "x86_64-unknown-linux-gnu"
HOOK = "libgshare_hook.so"
TOOLS = ["cargo-zigbuild==0.24.0", "ziglang==0.17.1"]
NEEDED = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
# Bytes of static thread-local storage: every thread of every program pays for it, and early loaders keep little of it.
TLS_LIMIT = 1024

EM_X86_64, ET_DYN = 62, 3
SHT_STRTAB, SHT_DYNAMIC, SHT_DYNSYM, SHT_VERNEED = 3, 6, 11, 0x6FFFFFFE
DT_NEEDED, PT_TLS = 1, 7


class Elf:
    """The parts of a 64-bit little-endian ELF file needed by the check."""

    def __init__(self, data):
        self.data = data
        if data[:6] != b"\x7fELF\x02\x01":
            raise SystemExit("not a 64-bit little-endian ELF file")
        head = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        self.type, self.machine = head[0], head[1]
        program_at, section_at = head[4], head[5]
        program_size, programs, section_size, sections = head[8:12]
        self.segments = [struct.unpack_from("<IIQQQQQQ", data, program_at + i * program_size) for i in range(programs)]
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_at + i * section_size) for i in range(sections)]

    def text(self, table, offset):
        start = self.sections[table][4] + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def of_type(self, kind):
        return [section for section in self.sections if section[1] == kind]

    def needed(self):
        for section in self.of_type(SHT_DYNAMIC):
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", self.data, at)
                if tag == DT_NEEDED:
                    yield self.text(section[6], value)

    def version_needs(self):
        """Pairs of a library and its version required by this file."""
        for section in self.of_type(SHT_VERNEED):
            at = section[4]
            while True:
                _, count, file, first, following = struct.unpack_from("<HHIII", self.data, at)
                entry = at + first
                for _ in range(count):
                    _, _, _, name, after = struct.unpack_from("<IHHII", self.data, entry)
                    yield self.text(section[6], file), self.text(section[6], name)
                    entry += after
                if following == 0:
                    break
                at += following

    def exports(self):
        for section in self.of_type(SHT_DYNSYM):
            for at in range(section[4], section[4] + section[5], 24):
                name, info, other, where, _, _ = struct.unpack_from("<IBBHQQ", self.data, at)
                if name and where != 0 and info >> 4 in (1, 2) and other & 3 == 0:
                    yield self.text(section[6], name)

    def thread_local_bytes(self):
        return sum(segment[6] for segment in self.segments if segment[0] == PT_TLS)


def version(text):
    """`GLIBC_2.3.4` as (2, 3, 4); None for a version of something else."""
    family, _, numbers = text.partition("_")
    if family != "GLIBC" or not numbers.replace(".", "").isdigit():
        return None
    return tuple(int(number) for number in numbers.split("."))


def check(path):
    """All obstacles to loading the library on some system; and its figures."""
    data = path.read_bytes()
    elf = Elf(data)
    wrong = []
    if elf.machine != EM_X86_64 or elf.type != ET_DYN:
        wrong.append("not an x86-64 shared library")
    asked = sorted({name for _, name in elf.version_needs()}, key=lambda name: version(name) or (0,))
    for name in asked:
        number = version(name)
        # GCC_* belong to libgcc_s, which is part of every installation.
        if number is None and not name.startswith("GCC_"):
            wrong.append(f"needs {name}")
        if number is not None and number > GLIBC:
            wrong.append(f"needs {name}, the bound is GLIBC_{'.'.join(map(str, GLIBC))}")
    wrong += [f"needs the library {name}" for name in elf.needed() if name not in NEEDED]
    exports = sorted(elf.exports())
    strange = [name for name in exports if name not in ("dlsym", "dlvsym") and not name.startswith("cu")]
    if "dlsym" not in exports or strange:
        wrong.append(f"exports {strange or 'no dlsym'}")
    tls = elf.thread_local_bytes()
    if tls > TLS_LIMIT:
        wrong.append(f"takes {tls} bytes of thread-local storage in every thread, the bound is {TLS_LIMIT}")
    newest = max((version(name) or (0,) for name in asked), default=(0,))
    figures = {
        "file": os.path.relpath(path),
        "size_bytes": len(data),
        "glibc_needed": ".".join(map(str, newest)),
        "exports": len(exports),
        "thread_local_bytes": tls,
    }
    return wrong, figures


def start_up(library, runs):
    """Cost of the preloaded hook for a program without CUDA, in us: the median of pairs."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "nothing"
        source = pathlib.Path(folder) / "nothing.c"
        source.write_text("int main(void) { return 0; }\n")
        try:
            subprocess.run(["gcc", "-O1", "-o", program, source], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            program = pathlib.Path("/bin/true")

        def once(preload):
            environment = {key: value for key, value in os.environ.items() if not key.startswith("GSHARE_")}
            environment.pop("LD_PRELOAD", None)
            if preload:
                environment["LD_PRELOAD"] = str(library)
            begun = time.perf_counter_ns()
            subprocess.run([program], env=environment, check=True)
            return time.perf_counter_ns() - begun

        pairs = [(once(False), once(True)) for _ in range(runs)]
    bare, added = statistics.median(bare for bare, _ in pairs), statistics.median(hooked - bare for bare, hooked in pairs)
    return {"start_bare_us": round(bare / 1e3), "start_added_us": round(added / 1e3)}


def loads(library):
    """The two ways in that need no changed program: the environment, and the loader's own option (what a line in
    /etc/ld.so.preload does for every program)."""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    mapped = ["grep", "-c", library.name, "/proc/self/maps"]
    ways = {"LD_PRELOAD": subprocess.run(mapped, env=environment, capture_output=True, text=True)}
    loader = pathlib.Path("/lib64/ld-linux-x86-64.so.2")
    grep = next((p for p in map(pathlib.Path, ["/usr/bin/grep", "/bin/grep"]) if p.exists()), None)
    if loader.exists() and grep:
        argv = [str(loader), "--preload", str(library), str(grep), *mapped[1:]]
        ways["ld.so --preload"] = subprocess.run(argv, capture_output=True, text=True)
    wrong = [
        f"{way}: {done.stderr.strip() or 'not in the process'}"
        for way, done in ways.items()
        if done.returncode != 0 or done.stderr or done.stdout.strip() in ("", "0")
    ]
    return wrong, sorted(ways)


def target_folder():
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "package"


def fetched(tools, program, requirements):
    """The program, in pip's target folder."""
    if not (tools / "bin" / program).exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--no-compile"]
        subprocess.run([*pip, "--target", str(tools), *requirements], check=True)
    return tools / "bin" / program


def build(packages=("gshare-hook",), profile="release"):
    """Builds packages for the old C library; gives cargo's folder of this build."""
    target = target_folder()
    tools = target / "tools"
    fetched(tools, "cargo-zigbuild", TOOLS)
    environment = {
        **os.environ,
        "PATH": f"{tools / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(tools),
        # The shipped library is small and optimised as a whole, even if this run's other builds are not.
        "CARGO_PROFILE_RELEASE_STRIP": "symbols",
        "CARGO_PROFILE_RELEASE_LTO": "thin",
    }
    glibc = ".".join(map(str, GLIBC))
    names = [f"--package={name}" for name in packages]
    argv = ["cargo", "zigbuild", "--quiet", "--locked", f"--profile={profile}", *names, "--target", f"{TARGET}.{glibc}"]
    subprocess.run([*argv, "--target-dir", str(target)], check=True, cwd=ROOT, env=environment)
    return target / TARGET / ("debug" if profile == "dev" else profile)


def main():
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if arguments and (arguments[0] != "check" or len(arguments) != 2):
        print(__doc__, file=sys.stderr)
        return 2
    library = (pathlib.Path(arguments[1]) if arguments else build() / HOOK).resolve()
    wrong, figures = check(library)
    failed, ways = loads(library)
    wrong += failed
    figures |= {"loads_by": ways} | start_up(library, 201)
    print(json.dumps(figures | {"wrong": wrong}, indent=2))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
