"""Python environments, given or made here, and the choice of one for a row."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from .errors import ArgumentError, NotInstalled

REQUIREMENTS = pathlib.Path(__file__).resolve().parent.parent / "requirements"
# Names and versions of the installed packages, and the version of the interpreter.
PROBE = """
import importlib.metadata, json, platform
names = {}
for found in importlib.metadata.distributions():
    name = found.metadata["Name"]
    if name:
        names.setdefault(name.lower().replace("_", "-"), found.version)
print(json.dumps([platform.python_version(), names]))
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    """An interpreter and its packages."""

    name: str
    python: pathlib.Path
    version: str
    packages: dict[str, str]

    @staticmethod
    def probe(name, python):
        """Asks an interpreter; `ArgumentError` where it does not run."""
        try:
            done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ArgumentError("--venv", f"{name}={python}: {error}") from error
        if done.returncode != 0:
            raise ArgumentError("--venv", f"{name}={python}: {done.stderr.strip()[-200:]}")
        version, packages = json.loads(done.stdout)
        return Environment(name, pathlib.Path(python), version, packages)

    def found(self, needs):
        """Name and version of the package that meets each of `needs`; None where one is missing.

        `needs` maps a name to the beginning of a version ("" for any); `a|b` is either of two packages.
        """
        found = {}
        for names, version in needs.items():
            here = next((name for name in names.split("|") if self._has(name, version)), None)
            if here is None:
                return None
            found[here] = self.packages[here]
        return found

    def _has(self, name, version):
        return name in self.packages and (not version or (self.packages[name] + ".").startswith(version + "."))


class Environments:
    """All environments of a run, in the order in which rows try them."""

    def __init__(self, environments):
        self.all = environments

    @staticmethod
    def given(arguments):
        """From `NAME=PATH` arguments; `PATH` is a virtual environment or an interpreter. None given: this interpreter."""
        found = []
        for argument in arguments:
            name, equals, path = argument.partition("=")
            if not (name and equals and path):
                raise ArgumentError("--venv", f"{argument!r} is not NAME=PATH")
            if name in [environment.name for environment in found]:
                raise ArgumentError("--venv", f"{name} is given twice")
            path = pathlib.Path(path)
            python = path / "bin" / "python" if path.is_dir() else path
            if not python.exists():
                raise ArgumentError("--venv", f"{name}: no {python}")
            # The link is kept: its place tells the interpreter which packages are its own.
            found.append(Environment.probe(name, pathlib.Path(os.path.abspath(python))))
        return Environments(found or [Environment.probe("this interpreter", pathlib.Path(sys.executable))])

    def meeting(self, needs):
        """The first environment with these packages; `NotInstalled` names them if none has them all."""
        for environment in self.all:
            if environment.found(needs) is not None:
                return environment
        names = ", ".join(f"{name.replace('|', ' or ')} {version}".strip() for name, version in needs.items())
        raise NotInstalled(f"no environment has {names}")


def groups():
    """The groups for virtual environments: one requirements file each."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def make(folder, wanted):
    """Makes a virtual environment for each group in `folder`, of the pinned versions, unless one of those pins is there.

    Gives `NAME=PATH` arguments. `NotInstalled` where pip fails.
    """
    unknown = sorted(set(wanted) - set(groups()))
    if unknown:
        raise ArgumentError("--groups", f"no group {unknown[0]!r}; there are {', '.join(groups())}")
    made = []
    for group in wanted:
        place, pins = pathlib.Path(folder).absolute() / group, (REQUIREMENTS / f"{group}.txt").read_text()
        stamp = place / "installed.txt"
        if not (stamp.exists() and stamp.read_text() == pins):
            print(f"making {place}", file=sys.stderr, flush=True)
            _run([sys.executable, "-m", "venv", str(place)], group)
            pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            # Rows import a small part of each package: compiling all of them takes longer than the import.
            _run([*pip, "--no-compile", "-r", str(REQUIREMENTS / f"{group}.txt")], group)
            stamp.write_text(pins)
        made.append(f"{group}={place}")
    return made


def _run(argv, group):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotInstalled(f"group {group}: {' '.join(argv[:4])}: {(done.stderr or done.stdout).strip()[-400:]}")
