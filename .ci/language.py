"""Counts, per Cargo package, what makes comments hard to read, and fails where a package has too much of it.

A comment is a run of lines of `//`, `///` or `//!`, or a paragraph of a page; code blocks, tables and headings are left out. All pages
(*.md but the change log) count as one more package. The bounds are twice the highest rate in well-written crates of the field (raft-rs,
kube, etagere, guillotiere). A comment that documents an item by one word is never allowed.
"""

import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPENERS = "openers (%)"
BOUNDS = {"unnamed nouns": 0.45, "who or whose": 0.45, "that": 20, "one or that of": 2.2, OPENERS: 6.2}
PATTERNS = {  # counted per 1,000 words; openers are counted per 100 comments
    "unnamed nouns": r"\b[Ww]hat (is|was|it|they|has|had|does|did|comes?|came|waits?|runs?|others?|a|an|the|each|all|its|those|one|no)\b",
    "who or whose": r"\b[Ww]ho(se|ever)?\b",
    "that": r"\b[Tt]hat\b",
    "one or that of": r"\b((another|the|other|each|no|next|new) one|one that|ones|that of|those of)\b",
    OPENERS: r"^(It|They|Its|That|This|These|Those|So|Such|Of|Who|Whoever|What|Whatever|Which|Where|Nobody|Somebody)\b",
}


def tracked(*patterns):
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).splitlines()


def comments(text, page):
    """A comment's last line, whether it documents an item, and its prose."""
    prose, code, marker = [], False, None
    for number, line in enumerate([*text.splitlines(), ""]):
        found = re.match(r"()(\s*\S.*)" if page else r"\s*(///|//!|//)(?!/)(.*)", line)
        if found:
            marker, words = found[1], found[2].strip()
            code ^= words.startswith("```")
            prose += [] if code or words.startswith(("```", "|", "#", "SPDX")) else [words]
        elif prose:
            yield number, marker in ("///", "//!"), " ".join(prose).strip()
            prose = []
        code &= page or bool(found)


def main():
    packages = sorted((name.removesuffix("Cargo.toml") for name in tracked("*Cargo.toml")), key=len, reverse=True)
    units, found, bad = defaultdict(Counter), defaultdict(Counter), []
    for name in tracked("*.rs", "*.md", ":!CHANGELOG.md"):
        page = name.endswith(".md")
        package = "pages" if page else next(folder for folder in packages if name.startswith(folder))
        for number, documents, text in comments((ROOT / name).read_text(), page):
            for column, pattern in PATTERNS.items():
                units[column][package] += bool(text) / 100 if column == OPENERS else len(text.split()) / 1000
                found[column][package] += len(re.findall(pattern, text))
            bad += [f"{name}:{number}: `{text}` says too little"] if documents and re.fullmatch(r"[A-Z]\w*\.?", text) else []
    for column, bound in BOUNDS.items():
        rates = sorted(((found[column][name] / units[column][name], name) for name in units[column]), reverse=True)
        print(f"{column}: most in {rates[0][1]}, {rates[0][0]:.2f} (at most {bound})")
        bad += [f"{name}: {column}: {rate:.2f}, at most {bound}" for rate, name in rates if rate > bound]
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
