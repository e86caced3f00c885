"""Counts, per Cargo package, what makes comments hard to read, and fails where a package has too much of it.

A comment is a run of lines of `//`, `///` or `//!`; code blocks, tables and headings are left out. All pages (*.md but the change log)
count as one more package. The bounds are twice the highest rate found in well-written crates of the field (raft-rs, kube, etagere,
guillotiere). A comment that documents an item by one word is never allowed.
"""

import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
RATES = {  # per 1,000 words
    "unnamed nouns": (0.45, r"[Ww]hat (?:is|was|it|they|has|had|does|did|comes?|came|waits?|runs?|others?|a|an|the|each|all|its|those|one|no)"),
    "who or whose": (0.45, r"[Ww]ho(?:se|ever)?"),
    "that": (20, r"[Tt]hat"),
    "one or that of": (2.2, r"(?:another|the|other|each|no|next|new) one|one that|ones|that of|those of"),
}
OPENERS = "openers (%)"
MOST_OPENERS = 6.2
OPENER = re.compile(r"(?:It|They|Its|That|This|These|Those|So|Such|Of|Who|Whoever|What|Whatever|Which|Where|Nobody|Somebody)\b")
SKIPPED = re.compile(r"[|#]|SPDX")


def tracked(*patterns):
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).splitlines()


def comments(text, page):
    """The number of a comment's last line, whether it documents an item, and its prose; a paragraph of a page is a comment."""
    prose, code, documents = [], False, False
    for number, line in enumerate([*text.splitlines(), ""]):
        found = re.match(r"()(\s*\S.*)" if page else r"\s*(///|//!|//)(?!/)(.*)", line)
        if found:
            documents = found[1] in ("///", "//!")
            words = found[2].strip()
            code ^= words.startswith("```")
            if not code and not words.startswith("```") and not SKIPPED.match(words):
                prose.append(words)
        elif prose:
            yield number, documents, " ".join(prose).strip()
            prose = []
        code &= page or bool(found)


def main():
    packages = sorted((str(pathlib.PurePath(name).parent) for name in tracked("*Cargo.toml")), key=len, reverse=True)
    words, blocks, found, bad = Counter(), Counter(), defaultdict(Counter), []
    for name in tracked("*.rs", "*.md"):
        page = name.endswith(".md")
        package = "pages" if page else next(folder for folder in packages if folder == "." or name.startswith(f"{folder}/"))
        for number, documents, text in comments((ROOT / name).read_text(), page) if name != "CHANGELOG.md" else ():
            words[package] += len(text.split())
            blocks[package] += bool(text)
            found[OPENERS][package] += bool(OPENER.match(text))
            for column, (_, pattern) in RATES.items():
                found[column][package] += len(re.findall(rf"\b(?:{pattern})\b", text))
            if documents and re.fullmatch(r"[A-Z]\w*\.?", text):
                bad.append(f"{name}:{number}: `{text}` says too little")
    for column, bound in {**{name: bound for name, (bound, _) in RATES.items()}, OPENERS: MOST_OPENERS}.items():
        total = {name: blocks[name] / 100 if column == OPENERS else words[name] / 1000 for name in words}
        rates = sorted(((found[column][name] / total[name], name) for name in words if total[name]), reverse=True)
        print(f"{column}: most in {rates[0][1]}, {rates[0][0]:.2f} (at most {bound})")
        bad += [f"{name}: {column}: {rate:.2f}, at most {bound}" for rate, name in rates if rate > bound]
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
