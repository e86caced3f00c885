#!/usr/bin/env python3
"""From a fresh virtual environment to the first green test on a simulated GPU: prints the seconds, and fails beyond 60 of them.

    python3 gshare-hook/package/first_test.py [DIR]      # the folder of the wheels [default: target/dist]

The shell step of the GitHub action (examples/github-workflow) installs the wheel gshare-sim, and `pytest` runs as a later step of a
workflow would. Then
- PyTorch's values, if this Python has PyTorch;
- a profile that does not exist fails the action's step by its name;
- the wheel gshare joins in, shares no file with gshare-sim, and goes without harm to it;
- the commands of the image for CI (Containerfile) in a virtual environment of their own: no container is started.
"""

import csv
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import dist
import package

BAR_SECONDS = 60
ACTION = package.ROOT / "examples/github-workflow/action.yml"
CONTAINERFILE = package.ROOT / "gshare-hook/package/Containerfile"
DRIVER_TEST = """
import ctypes

def test_bytes_come_back_from_the_second_gpu():
    cuda = ctypes.CDLL("libcuda.so.1")
    count, name, context, memory = ctypes.c_int(), ctypes.create_string_buffer(64), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value == 2
    assert cuda.cuDeviceGetName(name, 64, 1) == 0 and b"A100" in name.value
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0 and cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(5)) == 0
    back = ctypes.create_string_buffer(5)
    assert cuda.cuMemcpyHtoD_v2(memory, b"hello", ctypes.c_size_t(5)) == 0
    assert cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(5)) == 0 and back.raw == b"hello"
"""
TORCH_TEST = """
import torch

def test_a_product_has_values():
    left = torch.arange(6.0, device="cuda:1").reshape(2, 3)
    assert (left @ left.T).tolist() == [[5.0, 14.0], [14.0, 50.0]]
"""


class Environment:
    """A virtual environment, an empty home, and the variables of a workflow so far."""

    def __init__(self, place):
        self.venv, self.work = place / "venv", place / "work"
        subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        self.work.mkdir()
        foreign = ("GSHARE_", "PYTEST_", "PYTHON", "LD_")
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        own = {"HOME": place, "TMPDIR": place, "XDG_RUNTIME_DIR": place, "GITHUB_ENV": place / "github_env", "GSHARE_IDLE_EXIT": "1s"}
        self.variables |= {key: str(value) for key, value in own.items()}
        self.variables |= {"PATH": f"{self.venv}/bin:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, *argv, **variables):
        return subprocess.run(argv, cwd=self.work, env=self.variables | variables, capture_output=True, text=True, timeout=600)

    def succeeds(self, *argv, **variables):
        done = self.run(*argv, **variables)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def action(self, **given):
        """A use of the action: gives its outcome, and sets the variables of later steps."""
        text = ACTION.read_text()
        inputs = dict(re.findall(r'^  (\w+):\n    description: .*\n    default: "?([^"\n]+)"?$', text, re.MULTILINE)) | given
        variables = {name: inputs[of] for name, of in re.findall(r"(\w+): \$\{\{ inputs\.(\w+) \}\}", text)}
        lines = re.search(r"^      run: \|\n((?:        .*\n)+)", text, re.MULTILINE)[1]
        done = self.run("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", lines, **variables)
        if done.returncode == 0:
            set_by_it = pathlib.Path(self.variables["GITHUB_ENV"]).read_text().splitlines()
            self.variables |= dict(line.split("=", 1) for line in set_by_it)
        return done

    def files(self, project):
        (record,) = self.venv.glob(f"lib/python3*/site-packages/{project}-*.dist-info/RECORD")
        return {os.path.normpath(record.parent.parent / row[0]) for row in csv.reader(record.read_text().splitlines())}


def has_torch():
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0


def expect(what, found, wanted):
    if found != wanted:
        raise SystemExit(f"{what}: {found}, expected {wanted}")


def first_test(place, sim):
    environment = Environment(place)
    (environment.work / "test_driver.py").write_text(DRIVER_TEST)
    begun = time.monotonic()
    done = environment.action(version=str(sim), devices="2")
    if done.returncode != 0:
        raise SystemExit(f"the action fails: {done.stdout}{done.stderr}")
    environment.succeeds("pip", "install", "--quiet", "pytest")
    environment.succeeds("pytest", "-q", "test_driver.py")
    seconds = time.monotonic() - begun
    print(f"install to the first green test: {seconds:.1f} s (at most {BAR_SECONDS} s)", flush=True)
    if seconds > BAR_SECONDS:
        raise SystemExit("too long")
    expect("programs", {path.name for path in (environment.venv / "bin").glob("gshare*")}, {"gshare"})
    expect("the test's end without the plugin's option", environment.run("pytest", "-q", "test_driver.py", PYTEST_ADDOPTS="").returncode, 1)
    return environment


def values(environment):
    if not has_torch():
        print("PyTorch's values: not tried, for this Python has no PyTorch")
        return
    origin = subprocess.run([sys.executable, "-c", "import torch; print(torch.__path__[0])"], check=True, capture_output=True, text=True)
    (packages,) = environment.venv.glob("lib/python3*/site-packages")
    (packages / "torch_of_this_python.pth").write_text(str(pathlib.Path(origin.stdout.strip()).parent))
    (environment.work / "test_values.py").write_text(TORCH_TEST)
    begun = time.monotonic()
    environment.succeeds("pytest", "-q", "test_values.py")
    print(f"a test of PyTorch's values: {time.monotonic() - begun:.1f} s", flush=True)


def refusals(environment, sim):
    for given, words in (({"profile": "b2000"}, "b200, gb200"), ({"devices": "17"}, "1 to 16"), ({"version": "none.whl"}, "none.whl")):
        done = environment.action(**({"version": str(sim)} | given))
        expect(f"the action with {given} fails", done.returncode != 0, True)
        expect(f"its message has {words}", words in done.stderr, True)


def both_wheels(environment, whole):
    environment.succeeds("pip", "install", "--quiet", "--no-index", whole)
    # PyTorch of another environment may lack a package here.
    expect("unmet requirements", re.findall("^gshare.*", environment.run("pip", "check").stdout, re.MULTILINE), [])
    expect("files in both wheels", environment.files("gshare") & environment.files("gshare_sim"), set())
    environment.succeeds("gshare-openfaas", "--version")
    environment.succeeds("pip", "uninstall", "--quiet", "--yes", "gshare")
    environment.succeeds("pytest", "-q", "test_driver.py")


def image(place, folder):
    environment = Environment(place)
    text = CONTAINERFILE.read_text()
    install = re.search(r"^RUN --mount=type=bind,target=/dist (.+)$", text, re.MULTILINE)[1]
    entry, command = (json.loads(re.search(rf"^{name} (.+)$", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD"))
    environment.succeeds("bash", "-ec", install.replace("/dist", str(folder)))
    (environment.work / "test_driver.py").write_text(DRIVER_TEST)
    environment.succeeds(*entry, *command, GSHARE_SIM_GPUS="2")


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else package.ROOT / "target/dist").resolve()
    (sim,), (whole,) = folder.glob("gshare_sim-*.whl"), folder.glob("gshare-*.whl")
    expect("the action's release", re.search(r"default: (\S+)\nruns:", ACTION.read_text())[1], dist.version())
    with tempfile.TemporaryDirectory(prefix="gshare-first-", ignore_cleanup_errors=True) as name:
        place, other = pathlib.Path(name, "action"), pathlib.Path(name, "image")
        place.mkdir()
        other.mkdir()
        environment = first_test(place, sim)
        values(environment)
        refusals(environment, sim)
        both_wheels(environment, whole)
        image(other, folder)


if __name__ == "__main__":
    sys.exit(main())
