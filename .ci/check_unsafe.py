#!/usr/bin/env python3
"""Checks that the files with unsafe code are the ones the README lists."""

import pathlib
import re
import subprocess
import sys

COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|r#*".*?"#*|"(?:\\.|[^"\\])*"', re.DOTALL)
UNSAFE = re.compile(r"\bunsafe\b(?!_)")
LISTED = re.compile(r"<!-- unsafe files -->(.*?)<!-- end -->", re.DOTALL)


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
    section = LISTED.search(pathlib.Path("README.md").read_text())
    listed = set(re.findall(r"`([^`]+\.rs|[^`]+/\*)`", section.group(1))) if section else set()
    folders = tuple(name[:-1] for name in listed if name.endswith("/*"))
    wrong = [f"{name}: unsafe code, but not listed in README.md" for name in sorted(found)
             if name not in listed and not (folders and name.startswith(folders))]
    for name in sorted(listed):
        if name.endswith("/*"):
            if not any(file.startswith(name[:-1]) for file in found):
                wrong.append(f"{name}: listed in README.md, but no file there has unsafe code")
        elif name not in found:
            wrong.append(f"{name}: listed in README.md, but has no unsafe code")
    reasons = pathlib.Path("docs/unsafe.md").read_text()
    wrong += [f"{name}: listed in README.md, but docs/unsafe.md gives no reason" for name in sorted(listed) if f"`{name}`" not in reasons]
    print("\n".join(wrong) if wrong else f"{len(found)} files with unsafe code, all listed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
