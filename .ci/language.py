"""Counts what makes comments hard to read, and fails where there is too much of it.

A comment is a run of lines of `//`, `///` or `//!`. Counted are
- comments that document an item by one word: none is allowed;
- sentences at the beginning of a comment that open with a pronoun or the like, which says nothing to who reads only them: at most
  the part that is allowed below, which only ever gets smaller.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPENERS = re.compile(r"(It|That|This|These|Those|What|Whoever|Whose|Whom|Who|Nobody|Of)\b")
MOST_OPENERS = 3.0


def comments(text):
    """The first line's number of a comment, whether it documents an item, and its lines."""
    lines, begun, documents = [], 0, False
    for number, line in enumerate(text.splitlines() + [""], 1):
        found = re.match(r"\s*(///|//!|//)(?!/)\s?(.*)$", line)
        if found:
            begun = begun or number
            lines.append(found.group(2).strip())
            documents = found.group(1) != "//"
        elif lines:
            yield begun, documents, lines
            lines, begun = [], 0


def main():
    names = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    all_comments = openers = 0
    bad = []
    for name in names:
        for number, documents, lines in comments((ROOT / name).read_text()):
            first = next((line for line in lines if line), "")
            if not first or first.startswith(("#", "```", "SPDX")):
                continue
            all_comments += 1
            openers += bool(OPENERS.match(first))
            if documents and len(lines) == 1 and re.fullmatch(r"[A-Z]\w*\.?", first):
                bad.append(f"{name}:{number}: `{first}` says too little")
    part = 100 * openers / all_comments
    print(f"{all_comments} comments, {part:.1f} % of them open with a pronoun")
    if part > MOST_OPENERS:
        bad.append(f"comments that open with a pronoun: {part:.1f} %, at most {MOST_OPENERS} % are allowed")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
