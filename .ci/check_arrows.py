#!/usr/bin/env python3
"""Checks which package of the workspace may depend on which, what a library's user has to build, and the floors of the hook."""

import json
import pathlib
import re
import subprocess
import sys

# Normal and build dependencies. Whoever is not named here may not be depended on.
ARROWS = {
    "gshare": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore"},
    "gshare-core": set(),
    # The whole-node simulation drives what ships: the daemon's Node and the hook's Meter.
    "gshare-sim": {"gshare-core", "gshare-meter", "gshare-sched"},
    "gshare-sched": {"gshare-core"},
    "gshare-profile": {"gshare-core"},
    "gshare-modelstore": {"gshare-core", "gshare-cuda-abi"},
    "gshare-store-c": {"gshare-core", "gshare-modelstore"},
    "gshared": {"gshare-core", "gshare-sched"},
    "gshare-runner": {"gshare-core"},
    "gshare-cli": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-fake-cuda-spec"},
    "gshare-cuda-abi": set(),
    "gshare-fake-cuda-spec": set(),
    "gshare-fake-cuda": {"gshare-cuda-abi", "gshare-fake-cuda-spec"},
    "gshare-meter": {"gshare-core"},
    "gshare-hook": {"gshare-core", "gshare-cuda-abi", "gshare-meter"},
    "xtask": set(),
    "gshare-openfaas": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-fake-cuda-spec"},
    "gshare-examples": {"gshare-openfaas", "gshare-core", "gshare-fake-cuda-spec", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-sim"},
    "gshare-stub-driver": set(),
    "gshare-bench": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshared", "gshare-sim"},
}
# What the crates that hosts embed may depend on directly.
LIGHT = {
    "gshare": {"crossbeam-channel", "gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore"},
    "gshare-core": {"crossbeam-utils", "thiserror", "serde", "schemars", "loom"},
    "gshare-sched": {"gshare-core", "thiserror", "serde", "schemars"},
    "gshare-meter": {"gshare-core", "thiserror", "loom"},
}


# Folders of the hook: a file knows those of its own floor and below.
HOOK = pathlib.Path("gshare-hook/src")
FLOORS = ["sys", "device", "launch", "process", "exports"]
# The most files that may know each other in a circle, and lines of a file.
CIRCLE, LINES = 3, 600
PATH = re.compile(r"\b(?:crate|super)::((?:[a-z_]+::)*[a-z_]+)(?:::\{([^}]*)\})?")


def known(path: pathlib.Path, text: str, files: set[str]) -> set[str]:
    """The files that a file's paths lead to."""
    code = re.sub(r"//[^\n]*", "", text)
    found = set()
    for stem, list_ in PATH.findall(code.replace("super::", f"crate::{path.parent.name}::") if path.name != "mod.rs" else code):
        for last in [name.split("::")[0].strip() for name in list_.split(",")] if list_ else [""]:
            parts = [part for part in [*stem.split("::"), last] if part]
            # The longest beginning that is a file; a type of a floor's own file otherwise.
            for length in range(len(parts), 0, -1):
                name = "/".join(parts[:length])
                if name in files:
                    found.add(name)
                    break
    return found - {name_of(path)}


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(HOOK).with_suffix("")).removesuffix("/mod")


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Files that can be reached from each other."""
    reached = {name: set(to) for name, to in arrows.items()}
    while True:
        more = {name: to.union(*(reached[next_] for next_ in to)) for name, to in reached.items()}
        if more == reached:
            break
        reached = more
    found = {frozenset({name} | {to for to in reached[name] if name in reached[to]}) for name in arrows}
    return [set(circle) for circle in found if len(circle) > 1]


def floors() -> list[str]:
    """What is wrong with the floors of the hook."""
    paths = sorted(HOOK.rglob("*.rs"))
    files = {name_of(path) for path in paths}
    arrows, wrong = {}, []
    for path in paths:
        text, name = path.read_text(), name_of(path)
        if (lines := text.count("\n")) > LINES:
            wrong.append(f"{path}: {lines} lines, {LINES} at most")
        if name == "lib":
            continue
        arrows[name] = known(path, text, files)
        floor = FLOORS.index(name.split("/")[0])
        for to in sorted(arrows[name]):
            if FLOORS.index(to.split("/")[0]) > floor:
                wrong.append(f"{path}: uses {to}, which is on a higher floor")
    for circle in circles(arrows):
        if len(circle) > CIRCLE:
            wrong.append(f"{len(circle)} files know each other in a circle, {CIRCLE} may: {', '.join(sorted(circle))}")
    return wrong


def main() -> int:
    text = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps"], check=True, capture_output=True, text=True
    ).stdout
    packages = {package["name"]: package for package in json.loads(text)["packages"]}
    wrong = []
    for name, package in sorted(packages.items()):
        if name not in ARROWS:
            wrong.append(f"{name}: not in the table of arrows")
            continue
        normal = {dep["name"] for dep in package["dependencies"] if dep["kind"] in (None, "build")}
        for dep in sorted((normal & packages.keys()) - ARROWS[name]):
            wrong.append(f"{name} -> {dep}: not an arrow of the design")
        for dep in sorted(normal - LIGHT.get(name, normal)):
            wrong.append(f"{name} -> {dep}: too heavy for a library that hosts embed")
    wrong += floors()
    print("\n".join(wrong) if wrong else f"arrows of {len(packages)} packages and of the hook's floors are as designed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
