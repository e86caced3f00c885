"""Counts what makes comments hard to read, and fails where there is too much of it.

A comment is a run of lines of `//`, `///` or `//!`. Counted are
- comments that document an item by one word: none is allowed;
- comments that open with a pronoun or the like, which says nothing to a reader of that comment alone: at most the part that is
  allowed below, which only ever gets smaller;
- words that stand for a subject without naming it, or that published crates hardly use (quinn-proto 0.15, rustix and raft less
  than 0.1 per 1,000 words): at most as many as below.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPENERS = re.compile(r"(It|That|This|These|Those|What|Whoever|Whose|Whom|Who|Nobody|Of)\b")
MOST_OPENERS = 3.0
VAGUE = re.compile(r"\b(nobody|somebody|whoever|whatever|whichever|whom|anew|so long|so many)\b", re.IGNORECASE)
MOST_VAGUE = 0.3


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
    all_comments = openers = words = 0
    bad, vague = [], []
    for name in names:
        for number, documents, lines in comments((ROOT / name).read_text()):
            first = next((line for line in lines if line), "")
            if not first or first.startswith(("#", "```", "SPDX")):
                continue
            all_comments += 1
            text = " ".join(lines)
            words += len(text.split())
            vague += [f"{name}:{number}: `{word}`" for word in VAGUE.findall(text)]
            openers += bool(OPENERS.match(first))
            if documents and len(lines) == 1 and re.fullmatch(r"[A-Z]\w*\.?", first):
                bad.append(f"{name}:{number}: `{first}` says too little")
    part = 100 * openers / all_comments
    rate = 1000 * len(vague) / words
    print(f"{all_comments} comments, {part:.1f} % of them open with a pronoun; {rate:.2f} vague words in 1,000")
    if part > MOST_OPENERS:
        bad.append(f"comments that open with a pronoun: {part:.1f} %, at most {MOST_OPENERS} % are allowed")
    if rate > MOST_VAGUE:
        bad += [*vague, f"{rate:.2f} vague words in 1,000, at most {MOST_VAGUE} are allowed"]
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
