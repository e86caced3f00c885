#!/usr/bin/env python3
"""An embedder's cost of `cargo add gshare-sched`: crates, seconds of a release build from nothing, and its CPU seconds, which a
busy machine changes less."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = {"gshare-sched": [], "gshare-sched, serde": ["serde"], "gshare-sched, schema": ["schema"]}


def crates(package: str, features: list[str]) -> list[str]:
    tree = subprocess.run(
        ["cargo", "tree", "--package", package, "--edges", "normal,build", "--prefix", "none", "--no-dedupe"]
        + [f"--features={','.join(features)}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout
    return sorted({line.split()[0] for line in tree.splitlines() if line} - {package})


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(package: str, features: list[str]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as target:
        start, before = time.monotonic(), cpu()
        subprocess.run(
            ["cargo", "build", "--quiet", "--release", "--package", package, f"--features={','.join(features)}"]
            + ["--target-dir", target],
            cwd=ROOT, check=True,
        )
        return time.monotonic() - start, cpu() - before


def main() -> None:
    rows = []
    for name, features in CASES.items():
        names = crates("gshare-sched", features)
        took, used = build("gshare-sched", features)
        row = {"what": name, "crates": len(names), "names": names, "build_s": round(took, 1), "build_cpu_s": round(used, 1)}
        rows.append(row)
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'':<22} {'crates':>7} {'build [s]':>10} {'CPU [s]':>8}  besides itself")
    for row in rows:
        print(f"{row['what']:<22} {row['crates']:>7} {row['build_s']:>10} {row['build_cpu_s']:>8}  {', '.join(row['names'])}")


if __name__ == "__main__":
    main()
