#!/usr/bin/env python3
"""Installs each archive of dist.py in an empty root, and has the command run a program on the simulated driver there.

    python3 gshare-hook/package/routes.py [DIR]      # the folder of the archives [default: target/dist]
    python3 gshare-hook/package/routes.py --cargo    # `cargo install` alone: builds everything for release

The tarball is unpacked, the package for dpkg too (`dpkg-deb --extract`), the package for rpm is installed in its own root, the wheel goes
into a virtual environment. Scripts of packages are not run, and a package without its program is left out, as is rpm's
without root's rights. No command sees another installation: the environment has a search path and a home of its own.
The script shows for each route that
- `gshare doctor` finds the hook, the simulated driver and the store's client, all of them in this root;
- a program under `gshare run --sim --mem 64MiB` has the hook in it, and gets 32 MiB of GPU memory but not 128 MiB;
- `gshare up` finds its host, the manual pages are present, and the daemon accepts its shipped configuration;
- from the wheel: `gshare_store` puts a tensor into a store and maps it.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

import dist
import package

PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
allocate = lambda mebibytes: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mebibytes << 20))
print(allocate(32), allocate(128), *{line.split()[-1] for line in open("/proc/self/maps") if "libgshare_hook" in line})
"""
OUT_OF_MEMORY = 2

# A tensor of four bytes goes into the store and comes back as a view of its memory.
STORE = """
import ctypes, sys, time, gshare_ffs, gshare_store
class Array:
    memory = (ctypes.c_uint8 * 4)(1, 2, 3, 4)
    __array_interface__ = {"version": 3, "shape": (4,), "typestr": "|u1", "data": (ctypes.addressof(memory), True)}
for _ in range(200):
    try:
        store = gshare_store.connect(sys.argv[1])
        break
    except gshare_store.StoreError:
        time.sleep(0.05)
store.put("model", {"weights": Array()})
tensor = store.get("model")["weights"]
print(*(ctypes.c_uint8 * 4).from_address(tensor.__array_interface__["data"][0]))
"""


class Route:
    """An installation below a prefix, and commands which see no other installation."""

    def __init__(self, prefix, home, python="python3"):
        self.prefix, self.python, self.home = prefix, python, home
        self.environment = {
            "PATH": f"{prefix / 'bin'}:/usr/bin:/bin",
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "TMPDIR": str(home),
        }

    def run(self, *argv):
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, cwd=self.home, timeout=60)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def check(self, configuration):
        expect("version", self.run("gshare", "--version").split()[-1], dist.version())
        checks = json.loads(self.run("gshare", "doctor", "--json"))["checks"]
        found = {check["check"]: check["found"] for check in checks}
        for name in ("hook", "simulator", "store client", "host"):
            expect(f"doctor: {name} is of this root", self.is_inside(found[name]), True)
        begun = time.monotonic()
        printed = self.run("gshare", "run", "--sim", "--mem", "64MiB", "--", self.python, "-c", PROGRAM).split()
        seconds = time.monotonic() - begun
        expect("results of 32 MiB and 128 MiB", printed[:2], ["0", str(OUT_OF_MEMORY)])
        expect("the hook is of this root", self.is_inside(printed[2]), True)
        self.run("gshare", "up", "--help")
        pages = {path.name.removesuffix(".gz") for path in (self.prefix / "share/man/man1").iterdir()}
        expect("manual pages", pages >= {"gshare.1", "gshare-run.1"}, True)
        if configuration:
            self.run("gshared", "--check", "--config", configuration)
        return seconds

    def is_inside(self, path):
        return pathlib.Path(path).resolve().is_relative_to(self.prefix.resolve())

    def check_store(self):
        socket = self.home / "store.sock"
        server = subprocess.Popen(["gshare", "store", "serve", "--socket", socket], env=self.environment)
        try:
            expect("the tensor", self.run(self.python, "-c", STORE, socket).split(), ["1", "2", "3", "4"])
        finally:
            server.terminate()
            server.wait()


def expect(what, found, wanted):
    if found != wanted:
        raise SystemExit(f"{what}: {found}, expected {wanted}")


def tarball(file, root):
    with tarfile.open(file) as archive:
        archive.extractall(root, filter="data")
    (prefix,) = root.iterdir()
    return prefix, prefix / "etc/gshare/gshared.toml", "python3"


def debian(file, root):
    subprocess.run(["dpkg-deb", "--extract", file, root], check=True)
    return root / "usr", root / "etc/gshare/gshared.toml", "python3"


def rpm(file, root):
    # The package's dependencies are installed, but unknown to rpm in this root.
    subprocess.run(["rpm", "--root", root, "--nodeps", "--noscripts", "--install", file], check=True, stderr=subprocess.DEVNULL)
    return root / "usr", root / "etc/gshare/gshared.toml", "python3"


def wheel(file, root):
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    pip = [root / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", file]
    subprocess.run(pip, check=True)
    return root, None, root / "bin/python"


def cargo():
    """The command and the host from cargo, with the libraries in them: these are unpacked in the user's home."""
    with tempfile.TemporaryDirectory(prefix="gshare-route-") as name:
        root, home = pathlib.Path(name), pathlib.Path(name, "home")
        home.mkdir()
        begun = time.monotonic()
        for path in ("gshare-sched/cli", "examples/hosts/openfaas"):
            bins = ["--bin", "gshare-openfaas"] if "openfaas" in path else []
            argv = ["cargo", "install", "--quiet", "--locked", "--path", path, "--root", root, *bins]
            subprocess.run(argv, check=True, cwd=package.ROOT, env=os.environ | {"GSHARE_BUNDLE": "build"})
        took = time.monotonic() - begun
        route = Route(root, home)
        route.run("gshare", "man", "--output", root / "share/man/man1")
        first = route.check(None)
        print(f"cargo install: {took:.0f} s, first run {first:.1f} s")
    return 0


def main():
    if sys.argv[1:] == ["--cargo"]:
        return cargo()
    folder = pathlib.Path(sys.argv[1] if sys.argv[1:] else package.ROOT / "target/dist")
    print(f"{'archive':<48} {'packed':>9} {'installed':>10} {'to install':>11} {'first run':>10}")
    installs = [(tarball, "*.tar.gz", True), (debian, "*.deb", shutil.which("dpkg-deb"))]
    installs += [(rpm, "*.rpm", shutil.which("rpm") and os.geteuid() == 0), (wheel, "*.whl", True)]
    for install, pattern, can in installs:
        files = list(folder.glob(pattern))
        if not can:
            print(f"{pattern}: not installed, for want of its program or of root's rights")
            continue
        expect(f"archives {pattern} in {folder}", len(files), 1)
        with tempfile.TemporaryDirectory(prefix="gshare-route-") as name:
            root, home = pathlib.Path(name, "root"), pathlib.Path(name, "home")
            root.mkdir()
            home.mkdir()
            begun = time.monotonic()
            prefix, configuration, python = install(files[0].resolve(), root)
            took = time.monotonic() - begun
            route = Route(prefix, home, python)
            first = route.check(configuration)
            if install is wheel:
                route.check_store()
            ours = [path for part in ("bin/gshar*", "lib/gshare/*") for path in prefix.glob(part)]
            size = sum(path.stat().st_size for path in ours) / 1e6
            packed = files[0].stat().st_size / 1e6
            print(f"{files[0].name:<48} {packed:>6.1f} MB {size:>7.1f} MB {took:>9.1f} s {first:>8.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
