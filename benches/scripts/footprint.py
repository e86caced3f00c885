#!/usr/bin/env python3
"""What an embedder pays for `cargo add gshare-sched`: crates and seconds of a release build from nothing."""

import json
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


def build(package: str, features: list[str]) -> float:
    with tempfile.TemporaryDirectory() as target:
        start = time.monotonic()
        subprocess.run(
            ["cargo", "build", "--quiet", "--release", "--package", package, f"--features={','.join(features)}"]
            + ["--target-dir", target],
            cwd=ROOT, check=True,
        )
        return time.monotonic() - start


def main() -> None:
    rows = []
    for name, features in CASES.items():
        names = crates("gshare-sched", features)
        rows.append({"what": name, "crates": len(names), "names": names, "build_s": round(build("gshare-sched", features), 1)})
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'':<22} {'crates':>7} {'build [s]':>10}  besides itself")
    for row in rows:
        print(f"{row['what']:<22} {row['crates']:>7} {row['build_s']:>10}  {', '.join(row['names'])}")


if __name__ == "__main__":
    main()
