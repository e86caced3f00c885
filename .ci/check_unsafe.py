#!/usr/bin/env python3
"""Checks that the files with unsafe code are those that docs/unsafe.md lists."""

import pathlib
import re
import subprocess
import sys

COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|r#*".*?"#*|"(?:\\.|[^"\\])*"', re.DOTALL)
UNSAFE = re.compile(r"\bunsafe\b(?!_)")
LISTED = pathlib.Path("docs/unsafe.md")


def main() -> int:
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.rs"],
        check=True, capture_output=True, text=True,
    ).stdout.split()
    found = set()
    for name in files:
        path = pathlib.Path(name)
        if path.exists() and UNSAFE.search(COMMENT_OR_TEXT.sub("", path.read_text())):
            found.add(name)
    listed = set(re.findall(r"`([^`]+\.rs|[^`]+/\*)`", LISTED.read_text()))
    folders = tuple(name[:-1] for name in listed if name.endswith("/*"))
    wrong = [f"{name}: unsafe code, but {LISTED} does not list it" for name in sorted(found)
             if name not in listed and not (folders and name.startswith(folders))]
    for name in sorted(listed):
        if not any(file == name or name.endswith("/*") and file.startswith(name[:-1]) for file in found):
            wrong.append(f"{name}: {LISTED} lists it, but it has no unsafe code")
    print("\n".join(wrong) if wrong else f"{len(found)} files with unsafe code, all listed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
