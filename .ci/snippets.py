"""Compiles and runs the Rust programs of README.md and docs/ as a reader would, in projects outside of the workspace.

    python3 .ci/snippets.py

A block of `toml` with `[dependencies]` is the manifest of its document; crates of our repository are taken from this checkout. Each block
of `rust` is a whole program, which has to end well; a block of `rust,no_run` serves until it is stopped, and is only compiled.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS = 'git = "https://github.com/gshare/gshare"'
PROJECT = """[workspace]
members = ["*"]
resolver = "3"

[profile.dev]
debug = false
"""
PACKAGE = """[package]
name = "{name}"
edition = "2024"

"""


def blocks(file):
    return re.findall(r"^```(toml|rust(?:,no_run)?)\n(.*?)^```$", file.read_text(), re.MULTILINE | re.DOTALL)


def main():
    argv = ["cargo", "metadata", "--no-deps", "--format-version=1"]
    packages = json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout)["packages"]
    folders = {package["name"]: pathlib.Path(package["manifest_path"]).parent for package in packages}
    place, run = ROOT / "target/snippets", []
    shutil.rmtree(place, ignore_errors=True)
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found = blocks(file)
        programs = [(kind, text) for kind, text in found if kind != "toml"]
        manifests = [text for kind, text in found if kind == "toml" and text.startswith("[dependencies]")]
        if not programs:
            continue
        if len(manifests) != 1:
            sys.exit(f"{file.relative_to(ROOT)}: need one manifest for its programs, has {len(manifests)}")
        name = file.stem.lower()
        manifest = re.sub(
            rf"^([\w-]+) = {{ {re.escape(OURS)} }}", lambda line: f'{line[1]} = {{ path = "{folders[line[1]]}" }}', manifests[0], flags=re.MULTILINE
        )
        source = place / name / "src/bin"
        source.mkdir(parents=True)
        (place / name / "Cargo.toml").write_text(PACKAGE.format(name=name) + manifest)
        for number, (kind, text) in enumerate(programs, 1):
            (source / f"{name}_{number}.rs").write_text(text)
            run += [f"{name}_{number}"] if kind == "rust" else []
    (place / "Cargo.toml").write_text(PROJECT)
    shutil.copy(ROOT / "Cargo.lock", place)
    target = ROOT / "target"
    subprocess.run(["cargo", "build", "--quiet", "--workspace", "--target-dir", target], cwd=place, check=True)
    for program in run:
        print(f"{program}:", flush=True)
        subprocess.run([target / "debug" / program], check=True, timeout=60)
    print(f"{len(run)} programs of the documents ran")


if __name__ == "__main__":
    main()
