"""Checks every command that a document gives: all Markdown files but CHANGELOG.md, which tells of what was.

    python3 .ci/commands.py --bin target/debug

A command is a line of a block of `sh`, what follows `$ ` in a block of `console`, or code in a line of prose that begins with the name
of one of our programs, `cargo` or `python3`. Each of them is one of
- run: in an empty home and an empty folder with links to what git tracks, where the driver is the simulated one, a daemon serves, and a
  client waits; it has to succeed within a time, and what goes on until it is stopped (ENDLESS) has to print something and stop;
- parsed: its subcommands and options are in the help of its own program; its packages and targets are in cargo's metadata; its script
  is there. This holds for all prose, and for what PARSED lists with the reason;
- not run: NOT_RUN lists it with the reason.
In all cases a path into the checkout has to be there. A command that is none of these fails the check, and so does an entry of a table
that no document needs.

What a console block shows after a command is what the command prints, to the letter: a command whose figures vary from run to run has
no place there. Output of a command that is not run, and a block of `text`, are listed in TEXTS with what they are.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 60
PROGRAMS = ("gshare", "gshared", "gshare-dra", "gshare-openfaas", "cargo", "python3")

# Commands that begin so are parsed: why they are not run.
PARSED = {
    "cargo gshare": "builds programs and loads the machine for a minute",
    "cargo test": "a step of its own",
    "cargo build": "other steps build",
    "cargo install": "other steps build",
    "python3 gshare-hook/package/": "a step of its own",
    "python3 gshare-hook/gpu-suite/suite.py": "a step of its own",
    "python3 suite.py --short": "a step of its own",
    "python3 suite.py --venv": "a step of its own",
    "python3 suite.py --sim": "a step of its own",
    "python3 suite.py --sim=h100": "a step of its own",
    "gshare run --sim --compute -- pytest": "tests of the reader's",
    "gshare run --sim --compute -- python3 gshare-hook/": "PyTorch for CUDA, 5 GB",
    "gshare up": "takes a port of the machine",
    "gshare ps": "asks `gshare up`",
    "gshare run --shim=/run/gshare/store.sock": "asks `gshare store serve`",
    "gshare daemon park": "asks a program that holds memory",
    "gshare lab profile": "minutes of measuring",
}
# These go on until they are stopped: they are run until they print something, and stopped then.
ENDLESS = ("gshare top", "gshare store serve")
# Commands that begin so are not run: what they need.
NOT_RUN = {
    "cargo run --manifest-path examples/own_host/Cargo.toml": "a step of its own",
    "kubectl": "a cluster",
    "helm": "a cluster; the python step renders the chart",
    "pytest": "tests of the reader's; the python step runs the option",
    "KUBEBUILDER_ASSETS=/path/to/k8s/": "a control plane",
    "GSHARE_SEEDS=1000 cargo test": "a quarter of an hour; the tests run six seeds",
    "kind": "a cluster",
    "podman": "builds images",
    "GSHARE_BUNDLE=build": "minutes of a release build, which `routes.py --cargo` makes",
    "cargo deny": "the list of advisories, from the network",
    "cargo add": "a crate of the reader's",
    "curl": "asks a host that serves until it is stopped, or the release page: `routes.py` runs those",
    "url=https://": "`routes.py` installs with it",
    "whl=": "`routes.py` installs with it",
    "pip install": "the release page: `first_test.py` installs the same wheel",
    "gshare run --sim --compute -- python3 -m pytest": "PyTorch, and the tests of a library",
    "gshare run --sim=a100,devices=": "PyTorch",
}
# First lines of blocks of text, and what they are.
TEXTS = {
    "unmodified CUDA programs (PyTorch, CuPy, Triton, plain C)": "a drawing",
    "0.0 s  devices: 2 x Tesla V100-SXM2-16GB (simulated)": "figures of one run of `gshare up --demo`",
    "openfaas: http://127.0.0.1:8080": "what a host says that serves until it is stopped",
    '{"gpu_ms":': "an answer of that host",
    "POST / HTTP/1.1                    HTTP/1.1 200 OK": "a call and its answer on the wire",
    "alice (pid 4711) has waited for 57ms [limit]": "figures of one moment of a node",
}
# Words of the documents, and what they stand for here: see Stage.
PID, JOURNAL, CLIENT = ("PID", "4711"), ("DIR", "JOURNAL", "/var/lib/gshare/journal"), ("NAME",)
STORE = "/run/gshare/store.sock"
# Other programs that are run.
HELPERS = ("mkdir",)
# Programs of the reader.
THEIRS = ("serve.py", "train.py", "test_training.py", "my_cuda_program", "program")
CARGO_VALUES = {"-p", "--package", "--bin", "--bench", "--example", "--test", "--path", "--root", "--target-dir", "--features"}
CARGO_FLAGS = {"-q", "--quiet", "--release", "--workspace", "--lib", "--locked", "--all-targets"}
TARGETS = {"--bin": "bin", "--bench": "bench", "--example": "example", "--test": "test"}

PROGRAM = '''#!/usr/bin/env python3
"""Launches kernels of the driver's, as a program of the reader would."""
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: {code}")
device, context, module, function, memory = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(4))
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry work() { ret; }\\n"
call("cuModuleLoadData", ctypes.byref(module), ptx)
call("cuModuleGetFunction", ctypes.byref(function), module, b"work")
if "WORK_PID" in os.environ:
    open(os.environ["WORK_PID"], "w").write(str(os.getpid()))
end = time.monotonic() + float(os.environ.get("WORK_SECONDS", "0.2"))
while time.monotonic() < end:
    call("cuLaunchKernel", function, 1024, 1, 1, 32, 1, 1, 0, None, None, None)
    call("cuCtxSynchronize")
'''


class Wrong(Exception):
    """The command, or what the document says of it, is wrong."""


Command = collections.namedtuple("Command", "file line text output folder prose")


def tracked():
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def documents():
    return [name for name in tracked() if name.endswith(".md") and name != "CHANGELOG.md" and (ROOT / name).exists()]


def without_comment(line):
    return re.sub(r"(^|\s)#(?=\s|$)(?:[^'\"]|'[^']*'|\"[^\"]*\"|['\"])*$", "", line).rstrip()


def blocks(lines):
    """Number of the first line, language and lines of each fenced block; prose has no language."""
    language, begun, held = None, 1, []
    for number, line in enumerate([*lines, "```"], 1):
        fence = re.match(r"\s*(?:```|~~~)(\w*)", line)
        if not fence:
            held.append(line)
            continue
        yield begun, language, held
        language, begun, held = (fence[1] if language is None else None), number + 1, []


def joined(numbered):
    """Lines that end in a backslash with those that they go on in."""
    whole, begun = "", 0
    for number, line in numbered:
        begun = begun if whole else number
        whole += line.rstrip("\\").rstrip() + " " if line.endswith("\\") else line
        if not line.endswith("\\"):
            yield begun, whole
            whole = ""


def commands(file):
    for begun, language, lines in blocks((ROOT / file).read_text().splitlines()):
        numbered = list(enumerate(lines, begun))
        if language in ("sh", "bash", "shell"):
            folder = "."
            for number, line in joined(numbered):
                text = re.sub(r"\s+", " ", without_comment(line)).strip()
                if text.startswith("cd "):
                    folder = text[3:]
                elif text:
                    yield Command(file, number, text, None, folder, False)
        elif language == "console":
            at = [index for index, line in enumerate(lines) if line.startswith("$ ")]
            for index, after in zip(at, [*at[1:], len(lines)]):
                last = index
                while lines[last].endswith("\\") or "\n".join(lines[index : last + 1]).count("'") % 2:
                    last += 1
                text = " ".join(line.rstrip("\\").strip() for line in lines[index : last + 1])[2:]
                yield Command(file, begun + index, text, lines[last + 1 : after], ".", False)
        elif language is None:
            text = "\n".join(lines)
            for found in re.finditer(r"`([^`]+)`", text):
                words = re.sub(r"\s+", " ", found[1])
                if words.split(" ")[0] in PROGRAMS and " " in words:
                    yield Command(file, begun + text.count("\n", 0, found.start()), words, None, ".", True)


def texts(file):
    """Place and first line of each block of text."""
    for begun, language, lines in blocks((ROOT / file).read_text().splitlines()):
        if language == "text":
            yield f"{file}:{begun}", next((line.strip() for line in lines if line.strip()), "")


class Packages:
    def __init__(self):
        argv = ["cargo", "metadata", "--no-deps", "--format-version=1"]
        found = json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout)["packages"]
        self.folders = {pathlib.Path(package["manifest_path"]).parent: package["name"] for package in found}
        self.targets = {package["name"]: {(kind, t["name"]) for t in package["targets"] for kind in t["kind"]} for package in found}

    def check(self, words):
        """The options of cargo; returns the program that would run, and the words after `--`."""
        sub, *rest = words
        own, theirs = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
        packages, wanted, words = [], [], iter(own)
        for word in words:
            if word in CARGO_VALUES:
                value = next(words, None)
                if value is None:
                    raise Wrong(f"{word} has no value")
                if word in ("-p", "--package"):
                    if value not in self.targets:
                        raise Wrong(f"no package {value}")
                    packages.append(value)
                elif word in TARGETS:
                    wanted.append((TARGETS[word], value))
                elif word == "--path" and ROOT / value not in self.folders:
                    raise Wrong(f"no package in {value}")
                elif word == "--path":
                    packages.append(self.folders[ROOT / value])
            elif word.startswith("-") and word not in CARGO_FLAGS:
                raise Wrong(f"cargo {sub}: this check knows no option {word}")
        for kind, name in wanted:
            if name != "*" and not any((kind, name) in self.targets[package] for package in packages or self.targets):
                raise Wrong(f"{' '.join(packages)} has no {kind} {name}")
        programs = [name for kind, name in wanted if kind == "bin"]
        return (programs[0] if programs else None), theirs


class Stage:
    """An empty home and folder, a simulated GPU, a daemon with a journal, and a client `alice` who waits again and again."""

    def __init__(self, place, binaries):
        self.binaries, self.place = binaries, place
        self.work, self.journal, self.helps = place / "work", place / "journal", {}
        for name in ("home", "run", "work/target", "driver", "journal", "tmp"):
            (place / name).mkdir(parents=True, mode=0o700)
        for name in {path.split("/")[0] for path in tracked()}:
            (self.work / name).symlink_to(ROOT / name)
        for name in ("debug", "release"):
            (self.work / "target" / name).symlink_to(binaries)
        driver = next((path for path in (binaries / "deps/libfake_cuda.so", binaries / "libfake_cuda.so") if path.exists()), None)
        if driver is None:
            raise Wrong(f"{binaries} has no libfake_cuda.so")
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (place / "driver" / name).symlink_to(driver)
        for name in THEIRS:
            (self.work / name).write_text(PROGRAM)
            (self.work / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GSHARE")}
        self.environment = kept | {
            "HOME": str(place / "home"),
            "XDG_RUNTIME_DIR": str(place / "run"),
            "TMPDIR": str(place / "tmp"),
            "GSHARE_SOCKET": str(place / "run/gshared.sock"),
            "LD_LIBRARY_PATH": str(place / "driver"),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.processes = []

    def __enter__(self):
        pid = self.place / "pid"
        try:
            config = self.place / "gshared.toml"
            config.write_text(f"[journal]\ndir = '{self.journal}'\n")
            daemon = ["gshare", "daemon", "--config", str(config), "--socket", self.environment["GSHARE_SOCKET"]]
            self.start("daemon", daemon)
            self.until("a daemon", lambda: os.path.exists(self.environment["GSHARE_SOCKET"]))
            alice = ["gshare", "run", "--name", "alice", "--quota", "0:0.1", "--", "python3", "serve.py"]
            # A device of her own: those of one device have one profile.
            self.start("alice", alice, WORK_SECONDS="600", WORK_PID=str(pid), GSHARE_SIM_DEVICE=str(self.place / "device"))
            why = ["gshare", "why", "alice", "--journal", str(self.journal)]
            self.until("alice, who is held up", lambda: "[limit]" in self.said(why))
            self.pid = pid.read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name, argv, **more):
        with open(self.place / f"{name}.log", "w") as log:
            self.processes.append(
                subprocess.Popen(argv, cwd=self.work, env=self.environment | more, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def until(self, what, holds):
        end = time.monotonic() + SECONDS
        while not holds():
            if time.monotonic() > end or any(process.poll() is not None for process in self.processes):
                raise Wrong(f"no {what}: " + " / ".join(log.read_text() for log in self.place.glob("*.log")))
            time.sleep(0.1)

    def said(self, argv):
        done = self.done(argv)
        return done.stdout + done.stderr

    def done(self, argv):
        kept = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": SECONDS}
        return subprocess.run(argv, cwd=self.work, env=self.environment, **kept)

    def help(self, *argv):
        if argv not in self.helps:
            done = self.done([*argv, "--help"])
            if done.returncode:
                raise Wrong(f"{' '.join(argv)} --help ends with {done.returncode}: {done.stderr.strip()[-300:]}")
            self.helps[argv] = done.stdout
        return self.helps[argv]

    def parse(self, program, words):
        """Whether the program's help has the subcommands and options."""
        argv = [program]
        options = []
        for word in words:
            subs = set(re.findall(r"^  ([a-z][\w-]*)(?:  |$)", self.commands_of(argv), re.MULTILINE))
            if word == "--":
                break
            if word.startswith("-") and len(word) > 1:
                options.append(word.split("=")[0])
            elif subs and word in subs:
                argv.append(word)
            elif subs and not re.fullmatch(r"[A-Z_]+|\.\.\.", word):
                raise Wrong(f"{' '.join(argv)} has no command {word}")
        text = self.help(*argv)
        for option in options:
            if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text):
                raise Wrong(f"{' '.join(argv)} has no option {option}")

    def commands_of(self, argv):
        found = re.search(r"^Commands:\n((?:  .*\n|\n(?=  ))*)", self.help(*argv), re.MULTILINE)
        return found[1] if found else ""

    def run(self, command, packages):
        text = command.text
        if text.startswith("cargo run "):
            own = text.split(" -- ")[0].split(" | ")[0]
            program, _ = packages.check(shlex.split(own)[1:])
            text = text.replace(own, program, 1).replace(f"{program} -- ", f"{program} ", 1)
        stands = {word: self.pid for word in PID} | {word: str(self.journal) for word in JOURNAL} | {word: "alice" for word in CLIENT}
        stands[STORE] = str(self.place / "store.sock")
        text = " ".join(stands.get(word, word) for word in text.split(" "))
        argv = ["bash", "-o", "pipefail", "-c", text]
        folder = self.work / command.folder
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen(argv, cwd=folder, env=self.environment, start_new_session=True, **files)
            try:
                if entry(ENDLESS, command.text):
                    said = lambda: any(os.fstat(file.fileno()).st_size for file in (out, err))
                    self.until("output", lambda: process.poll() is not None or said())
                    if process.poll() is not None:
                        raise Wrong("has ended by itself")
                    os.killpg(process.pid, signal.SIGTERM)
                # A program that a signal ends has a code below zero.
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise Wrong(f"has not ended after {SECONDS} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            err.seek(0)
            printed, errors = out.read(), err.read()
        if code and not (code == -signal.SIGTERM and entry(ENDLESS, command.text)):
            raise Wrong(f"ends with {code}: {(errors + printed).strip()[-600:]}")
        if command.output is not None and printed.splitlines() != command.output:
            raise Wrong("prints\n" + printed)


def entry(table, text):
    return next((key for key in table if text == key or text.startswith(key if key.endswith(("/", "=")) else key + " ")), None)


def check_paths(text, top, folder):
    """Paths that begin in a folder of the checkout."""
    for word in re.findall(r"(?<![\w./:\"-])[\w.-]+/[\w./*-]+", text):
        if word.split("/")[0] in top and not any((ROOT / folder).glob(word)):
            raise Wrong(f"{word} is not there")


def parse(command, stage, packages):
    for part in re.split(r" && | \| ", command.text):
        parse_one(part.split(" > ")[0], command.folder, stage, packages)


def parse_one(text, folder, stage, packages):
    program, *rest = shlex.split(text)
    program = program.removeprefix("target/debug/")
    if program == "cargo" and rest[:1] == ["gshare"]:
        program, *rest = rest
    if program == "cargo":
        program, theirs = packages.check(rest)
        if program and rest[0] == "run" and theirs:
            stage.parse(program, theirs)
    elif program == "python3":
        script = ROOT / folder / rest[0]
        if not script.is_file():
            raise Wrong(f"{rest[0]} is not there")
        options = [word.split("=")[0] for word in rest[1:] if word.startswith("--")]
        # Scripts without options are not asked for help: they would begin to work.
        text = stage.help("python3", str(script)) if options else ""
        for option in options:
            if option not in text:
                raise Wrong(f"{rest[0]} has no option {option}")
    elif program == "gshare" and rest[:1] == ["up"]:
        stage.parse("gshare-openfaas", rest[1:])
    elif program in PROGRAMS:
        stage.parse(program, rest)
    else:
        raise Wrong("is neither run, nor parsed, nor in a table of this check")


def check(command, stage, packages, top, used):
    check_paths(command.text, top, command.folder)
    for table, name in ((NOT_RUN, "not run"), (PARSED, "parsed")):
        key = entry(table, command.text)
        if key:
            used.add(key)
            if name == "parsed":
                parse(command, stage, packages)
            return name
    if command.prose:
        parse(command, stage, packages)
        return "parsed"
    if command.text.split(" ")[0] not in (*PROGRAMS, *HELPERS):
        raise Wrong("is neither run, nor parsed, nor in a table of this check")
    used.add(entry(ENDLESS, command.text))
    stage.run(command, packages)
    return "run"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "target/debug", help="folder of the programs and libraries")
    parser.add_argument("--times", action="store_true", help="print what was run, and its time")
    options = parser.parse_args()
    packages, top, used, wrong = Packages(), {path.split("/")[0] for path in tracked()}, set(), []
    place = pathlib.Path(tempfile.mkdtemp(prefix="commands-"))
    try:
        with Stage(place, options.bin.resolve()) as stage:
            for file in documents():
                counts, shown = collections.Counter(), []
                for command in commands(file):
                    begun = time.monotonic()
                    try:
                        kind = check(command, stage, packages, top, used)
                    except (Wrong, ValueError, OSError, subprocess.SubprocessError) as error:
                        kind = "wrong"
                        wrong.append(f"{file}:{command.line}: `{command.text}`: {error}")
                    counts[kind] += 1
                    if kind in ("parsed", "not run") and command.output:
                        shown.append((f"{file}:{command.line}", command.output[0]))
                    if options.times:
                        print(f"{time.monotonic() - begun:5.1f} s  {kind:8} {file}:{command.line}: {command.text}", flush=True)
                for where, first in [*texts(file), *shown]:
                    key = next((key for key in TEXTS if first.startswith(key)), None)
                    used.add(key)
                    if key is None:
                        wrong.append(f"{where}: output that TEXTS does not list: {first}")
                if counts:
                    kinds = ("run", "parsed", "not run", "wrong")
                    print(f"{file}: {', '.join(f'{counts[kind]} {kind}' for kind in kinds)}", flush=True)
    except Wrong as error:
        wrong.append(str(error))
    else:
        wrong += [f"no document has `{key}`: take it out of the tables" for key in [*PARSED, *NOT_RUN, *ENDLESS, *TEXTS] if key not in used]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
