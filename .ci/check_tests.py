"""Checks that no test file is forgotten: where a package lists its tests itself, each file in tests/ is one or a module of one."""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def forgotten(manifest):
    described = tomllib.loads(manifest.read_text())
    if described.get("package", {}).get("autotests", True):
        return []
    files = {file.stem: file for file in (manifest.parent / "tests").glob("*.rs")}
    used, found = set(), {pathlib.Path(test.get("path", test["name"])).stem for test in described["test"]}
    while found:
        used |= found
        found = {name for one in found & set(files) for name in re.findall(r"^mod (\w+);", files[one].read_text(), re.M)} - used
    return sorted(file.relative_to(ROOT) for name, file in files.items() if name not in used)


def main():
    manifests = [path for path in ROOT.glob("**/Cargo.toml") if "target" not in path.relative_to(ROOT).parts]
    files = [file for manifest in manifests for file in forgotten(manifest)]
    for file in files:
        print(f"{file}: no [[test]] of its package and no module of one, so that its tests never run")
    return 1 if files else 0


if __name__ == "__main__":
    sys.exit(main())
