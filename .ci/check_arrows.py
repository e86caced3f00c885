#!/usr/bin/env python3
"""Checks which package of the workspace may depend on which, and what a library's user has to build."""

import json
import subprocess
import sys

# Normal and build dependencies. Whoever is not named here may not be depended on.
ARROWS = {
    "gshare": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore"},
    "gshare-core": set(),
    # The whole-node simulation drives what ships: the daemon's Node and the hook's Meter.
    "gshare-sim": {"gshare-core", "gshare-meter", "gshare-sched"},
    "gshare-sched": {"gshare-core"},
    "gshare-etcd": {"gshare-core", "gshare-sched"},
    "gshare-profile": {"gshare-core"},
    "gshare-modelstore": {"gshare-core", "gshare-cuda-abi"},
    "gshare-store-c": {"gshare-core", "gshare-modelstore"},
    "gshared": {"gshare-core", "gshare-sched"},
    "gshare-runner": {"gshare-core", "gshare-sched"},
    "gshare-cli": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-fake-cuda-spec"},
    "gshare-cuda-abi": set(),
    "gshare-fake-cuda-spec": set(),
    "gshare-fake-cuda": {"gshare-cuda-abi", "gshare-fake-cuda-spec"},
    "gshare-meter": {"gshare-core"},
    "gshare-hook": {"gshare-core", "gshare-cuda-abi", "gshare-meter"},
    "xtask": set(),
    "gshare-openfaas": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-fake-cuda-spec"},
    "gshare-examples": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-sim"},
    "gshare-bench": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore", "gshare-runner", "gshared", "gshare-sim"},
}
# What the crates that hosts embed may depend on directly.
LIGHT = {
    "gshare": {"gshare-core", "gshare-sched", "gshare-profile", "gshare-modelstore"},
    "gshare-core": {"thiserror", "serde", "schemars", "loom"},
    "gshare-sched": {"gshare-core", "thiserror", "serde", "schemars"},
    "gshare-meter": {"gshare-core", "thiserror", "loom"},
}


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
    print("\n".join(wrong) if wrong else f"arrows of {len(packages)} packages are as designed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
