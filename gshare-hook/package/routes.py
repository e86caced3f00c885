#!/usr/bin/env python3
"""Installs gshare by each command of README's section "Install", and tries each installation.

    python3 gshare-hook/package/routes.py [DIR]      # the folder of the archives [default: target/dist]
    python3 gshare-hook/package/routes.py --cargo    # `cargo install` alone: builds everything for release

A command runs as README writes it, in a root of its own: an overlay of this machine's, gone afterwards, which takes root or sudo. There
`curl` copies from the folder. Without a package manager's program its route is left out; where rpm knows no package, dependencies are
not checked. The container has its base from the registry, or else from this machine's libraries. Each installation shows that
- `gshare doctor` finds the hook, the simulated driver, the store's client and the host, all of them newly installed;
- a program under `gshare run --sim --mem 64MiB` has the hook in it, and gets 32 MiB of GPU memory but not 128 MiB;
- `gshare up --demo=end` keeps its promises, the manual pages are present, and the daemon accepts its shipped configuration;
- from the wheels: `gshare.share` limits a program, and `gshare_store` puts a tensor into a store and maps it.
The wheel gshare-sim has neither host nor store: the rest holds for it, and first_test.py tries its use in CI.
"""

import json
import os
import pathlib
import re
import shlex
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
OUT_OF_MEMORY = "2"

# The same program within a share.
SHARE = f"""
import gshare, subprocess, sys
with gshare.share(mem="64MiB", sim=True):
    subprocess.run([sys.executable, "-c", {PROGRAM!r}], check=True)
"""
# A tensor of four bytes goes into the store and comes back as a view of its memory.
STORE = """
import ctypes, subprocess, time, gshare_ffs, gshare_store
class Array:
    memory = (ctypes.c_uint8 * 4)(1, 2, 3, 4)
    __array_interface__ = {"version": 3, "shape": (4,), "typestr": "|u1", "data": (ctypes.addressof(memory), True)}
server = subprocess.Popen(["gshare", "store", "serve", "--socket", "store.sock"])
for _ in range(200):
    try:
        store = gshare_store.connect("store.sock")
        break
    except gshare_store.StoreError:
        time.sleep(0.05)
store.put("model", {"weights": Array()})
tensor = store.get("model")["weights"]
print(*(ctypes.c_uint8 * 4).from_address(tensor.__array_interface__["data"][0]))
server.terminate()
"""
# Wheels by the words of README that install them.
SIM = "install ./gshare_sim-"
WHEELS = {SIM: "gshare_sim-*.whl", "install ./gshare-": "gshare*.whl"}
# Program of each route beyond the shell's own, by such words or by the end of its archive's name.
ROUTES = {".deb": "dpkg", ".rpm": "rpm", ".tar.gz": "tar", **dict.fromkeys(WHEELS, "python3"), "podman": "podman"}
IMAGE = "docker.io/library/debian:trixie-slim"
# Name of each archive, and how a wheel's name differs where its programs ask for another C library.
CURL = """#!/bin/sh
for word; do
case $word in https:*) ;; *) continue;; esac
name=$(basename "$word"); found=/dist/$name
[ -e "$found" ] || found=$(ls /dist/$(echo "$name" | sed 's/manylinux_[0-9_]*_x86/manylinux_*_x86/'))
case " $* " in *O*) cp "$found" "$name";; *) cat "$found";; esac
done
"""


class Installation:
    """Programs of one installation. `start` begins each of its commands."""

    def __init__(self, start, ours):
        self.start, self.ours = start, ours

    def run(self, *argv, allowed=None):
        """The output of a command, which succeeds, or fails with errors of this pattern alone."""
        done = subprocess.run([*self.start, *argv], capture_output=True, text=True, timeout=300)
        if done.returncode != 0 and not (allowed and re.fullmatch(allowed, done.stderr.strip())):
            raise SystemExit(f"{shlex.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def check(self, pages=None, configuration=None, beyond_sim=("store client", "host")):
        """Gives the times of the first program and of the demonstration, which needs the host."""
        expect("version", self.run("gshare", "--version").split()[-1], dist.version())
        checks = json.loads(self.run("gshare", "doctor", "--json"))["checks"]
        found = {check["check"]: check["found"] for check in checks}
        for name in ("hook", "simulator", *beyond_sim):
            expect(f"doctor: {name} {found[name]} is newly installed", self.ours(found[name]), True)
        begun = time.monotonic()
        printed = self.run("gshare", "run", "--sim", "--mem", "64MiB", "--", "python3", "-c", PROGRAM).split()
        first = time.monotonic() - begun
        expect("results of 32 MiB and 128 MiB", printed[:2], ["0", OUT_OF_MEMORY])
        expect("the hook is newly installed", self.ours(printed[2]), True)
        if pages:
            listed = {page.removesuffix(".gz") for page in self.run("ls", pages).split()}
            expect("manual pages", listed >= {"gshare.1", "gshare-run.1"}, True)
        if configuration:
            self.run("gshared", "--check", "--config", configuration)
        return first, self.demonstrate() if beyond_sim else 0

    def demonstrate(self):
        """The demonstration shows each of its parts; a machine with other work may answer late."""
        late = r"openfaas: the demonstration does not show what it promises: (\w+ has answered \d+ of \d+ in time(; )?)+"
        begun = time.monotonic()
        printed = self.run("gshare", "up", "--demo=end", "--listen=127.0.0.1:0", allowed=late)
        expect("functions of the demonstration", re.findall(r"^  (bert|finetune|ocr|resnet|video) .*\(ready\)", printed, re.MULTILINE),
            ["bert", "finetune", "ocr", "resnet", "video"])  # fmt: skip
        return time.monotonic() - begun

    def check_python(self, store):
        expect("a program within share()", self.run("python3", "-c", SHARE).split()[:2], ["0", OUT_OF_MEMORY])
        if store:
            expect("the tensor", self.run("python3", "-c", STORE).split(), ["1", "2", "3", "4"])


def expect(what, found, wanted):
    if found != wanted:
        raise SystemExit(f"{what}: {found}, expected {wanted}")


def commands():
    """Commands of README's section by the route; lines that set a variable come before each of them."""
    section = re.search(r"^## Install\n(.*?)^## ", (package.ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    lines = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1].splitlines()
    variables = "".join(f"{line}\n" for line in lines if re.match(r"\w+=", line))
    expect("releases in README", re.findall(r"(?:/v|=)(\d[\d.]+\d)", variables), [dist.version()] * 2)
    found = {end: [line.split("  #")[0].strip() for line in lines if end in line] for end in ROUTES}
    for end, of in found.items():
        expect(f"commands of README for {end}", len(of), 1)
    return {end: variables + of[0] for end, of in found.items()}


def overlaid(end, command, folder, place):
    """An installation in an overlay of this machine's root, whose changes are in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    upper, work, root = (place / name for name in ("upper", "work", "root"))
    for each in (upper, work, root):
        each.mkdir()
    options = f"lowerdir=/,upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    for name in ("proc", "sys", "dev"):
        subprocess.run(["mount", "--rbind", f"/{name}", root / name], check=True)
    (root / "dist").mkdir()
    subprocess.run(["mount", "--bind", folder, root / "dist"], check=True)
    home, stubs = root / "new/home", root / "new/stubs"
    home.mkdir(parents=True)
    stubs.mkdir()
    rpm = '#!/bin/sh\n[ "$(/usr/bin/rpm -qa | wc -l)" = 0 ] && set -- --nodeps "$@"\nexec /usr/bin/rpm "$@"\n'
    for name, text in {"sudo": '#!/bin/sh\nexec "$@"\n', "curl": CURL, "rpm": rpm}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    environment = {"PATH": "/new/stubs:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/new/home",
        "XDG_RUNTIME_DIR": "/new/home", "TMPDIR": "/new/home"}  # fmt: skip
    if end in WHEELS:
        subprocess.run(["chroot", root, sys.executable, "-m", "venv", "/new/venv"], check=True)
        environment["PATH"] = f"/new/venv/bin:{environment['PATH']}"
        environment["PIP_NO_INDEX"] = environment["PIP_DISABLE_PIP_VERSION_CHECK"] = environment["PIP_QUIET"] = "1"
    start = ["chroot", root, "env", "-i", "-C", "/new/home", *(f"{key}={value}" for key, value in environment.items())]
    in_upper = lambda path: (upper / os.path.realpath(f"{root}/{path}").removeprefix(f"{root}/")).is_file()
    installation = Installation(start, in_upper)
    if subprocess.run([*start, "sh", "-c", "command -v gshare"], stdout=subprocess.DEVNULL).returncode == 0:
        raise SystemExit("this machine has gshare already: a new installation cannot be told from it")
    installation.run("bash", "-e", "-o", "pipefail", "-c", command)
    return installation


def try_overlaid(folder):
    ends = [end for end in ROUTES if end != "podman"]
    for end in ends:
        command = commands()[end]
        if not shutil.which(ROUTES[end]):
            print(f"{end}: not installed, for want of {ROUTES[end]}")
            continue
        files = sorted(folder.glob(WHEELS.get(end, f"gshare*{end}")))
        with tempfile.TemporaryDirectory(prefix="gshare-route-") as name:
            place, begun = pathlib.Path(name), time.monotonic()
            try:
                installation = overlaid(end, command, folder, place)
                took = time.monotonic() - begun
                prefix = "/new/venv" if end in WHEELS else "/usr/local" if end == ".tar.gz" else "/usr"
                configuration = f"{prefix if end == '.tar.gz' else ''}/etc/gshare/gshared.toml"
                beyond_sim = {"beyond_sim": ()} if end == SIM else {}
                first, demo = installation.check(f"{prefix}/share/man/man1", None if end in WHEELS else configuration, **beyond_sim)
                if end in WHEELS:
                    installation.check_python(store=end != SIM)
                ours = [path for part in ("bin/gshar*", "lib/gshare/*") for path in (place / f"upper{prefix}").glob(part)]
                sizes = [sum(path.stat().st_size for path in paths) / 1e6 for paths in (files, ours)]
                print(f"{files[0].name:<58} {sizes[0]:>6.1f} MB {sizes[1]:>7.1f} MB {took:>9.1f} s {first:>8.1f} s {demo:>5.0f} s", flush=True)
            finally:
                subprocess.run(["umount", "--recursive", "--lazy", place], check=False)


def own_base(programs):
    """An image of this machine's Python and libraries for a machine without a registry."""
    with tempfile.TemporaryDirectory(prefix="gshare-base-") as name:
        root = pathlib.Path(name)
        python, library = pathlib.Path(sys.executable).resolve(), pathlib.Path(os.__file__).parent
        files = [python, *library.glob("lib-dynload/*.so"), *programs]
        needed = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout
        # The loader's path has no arrow before it.
        for path in [str(python), "/usr/bin/env", *re.findall(r"(?:=>|^)\s+(/\S+) \(", needed, re.MULTILINE)]:
            dist.put(path, root / path.lstrip("/"), 0o755)
        unused = shutil.ignore_patterns("site-packages", "test", "__pycache__")
        shutil.copytree(library, root / str(library).lstrip("/"), ignore=unused)
        (root / "usr/bin").mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/python3").symlink_to(python)
        (root / "tmp").mkdir()
        with subprocess.Popen(["tar", "-cC", root, "."], stdout=subprocess.PIPE) as tar:
            image = ["podman", "import", "--quiet", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", "localhost/gshare-base"]
            subprocess.run(image, stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)
    return "localhost/gshare-base"


def try_image(folder):
    command = commands()["podman"].splitlines()[-1]
    if not shutil.which("podman"):
        print("podman: not tried, for want of podman")
        return
    name = next(word for word in command.split() if word.startswith("ghcr.io/"))
    expect("the image's tag in README", name.split(":")[1], dist.version())
    try:
        pulled = subprocess.run(["podman", "pull", "--quiet", IMAGE], capture_output=True, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        pulled = False
    try:
        with tempfile.TemporaryDirectory(prefix="gshare-image-") as unpacked:
            (file,) = folder.glob("gshare-*-linux.tar.gz")
            with tarfile.open(file) as archive:
                archive.extractall(unpacked, filter="data")
            ours = [*pathlib.Path(unpacked).glob("*/bin/*"), *pathlib.Path(unpacked).glob("*/lib/gshare/*")]
            base = IMAGE if pulled else own_base(ours)
        # Some machines may build images, and start no container.
        subprocess.run(["podman", "run", "--rm", "--network=host", base, "env"], check=True, capture_output=True, text=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = (error.stderr or "").strip().splitlines() or [str(error)]
        print(f"podman: not tried, for podman starts no container here: {why[-1]}")
        return
    begun = time.monotonic()
    build = ["podman", "build", "--quiet", "--pull=never", f"--build-arg=BASE={base}", "-t", name, "-f"]
    subprocess.run([*build, package.ROOT / "gshare-hook/package/Containerfile", folder], check=True, stdout=subprocess.DEVNULL)
    took = time.monotonic() - begun
    run = shlex.split(command)[: shlex.split(command).index(name)]
    installation = Installation([*run, "--entrypoint=env", name], lambda path: path.startswith("/usr/local/"))
    # The slim image has no Python: then the mechanism is shown by the demonstration.
    if pulled:
        first, demo = 0, installation.demonstrate()
    else:
        first, demo = installation.check()
    expect("README's command", Installation([*run, name], None).run("--version").split()[-1], dist.version())
    print(f"{name:<58} on {base}: built in {took:.1f} s, first run {first:.1f} s, demonstration {demo:.0f} s", flush=True)


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
        start = ["env", "-i", "-C", home, f"PATH={root}/bin:/usr/bin:/bin", f"HOME={home}", f"XDG_RUNTIME_DIR={home}", f"TMPDIR={home}"]
        installation = Installation(start, lambda path: pathlib.Path(path).resolve().is_relative_to(root.resolve()))
        installation.run("gshare", "man", "--output", root / "man1")
        first, demo = installation.check(root / "man1")
        print(f"cargo install: {took:.0f} s, first run {first:.1f} s, demonstration {demo:.0f} s")


def main():
    if sys.argv[1:] == ["--cargo"]:
        return cargo()
    *inside, folder = sys.argv[1:] or [package.ROOT / "target/dist"]
    folder = pathlib.Path(folder).resolve()
    if inside == ["--inside"]:
        return try_overlaid(folder)
    print(f"{'archive':<58} {'packed':>9} {'installed':>10} {'to install':>11} {'first run':>10} {'demo':>7}")
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*root, "unshare", "--mount", sys.executable, __file__, "--inside", folder], check=True)
    try_image(folder)


if __name__ == "__main__":
    sys.exit(main())
