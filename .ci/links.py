"""Checks that relative links and anchors of all Markdown files resolve, and that each path in ARCHITECTURE.md exists.

A path is what stands in backticks there and has a slash or one of the endings below; a folder ends with a slash. Functions "in" a file
are defined there.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)*/?")
DEFINED = re.compile(r"((?:`[\w:]+`(?:, | and |\s)*)*`[\w:]+`)\s+in\s+`([^`]+\.rs)`")
ENDINGS = (".rs", ".py", ".toml", ".md", ".c", ".html", ".yml", ".service", "/")


def tracked():
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")


def prose(path):
    return FENCE.sub("", path.read_text())


def anchors(path):
    """Anchors of headings, as they are made on GitHub: the second of one name ends in `-1`."""
    seen, found = {}, set()
    for title in re.findall(r"^#+\s+(.*?)\s*#*$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def broken_links(name):
    source = ROOT / name
    text = re.sub(r"`[^`\n]*`", "", prose(source))
    for link in (first or second for first, second in LINK.findall(text)):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (source.parent / file).resolve() if file else source
        if not target.exists():
            yield f"{name}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{name}: {link}: no such heading"


def missing_paths(name):
    for text in sorted(set(re.findall(r"`([^`\n]+)`", prose(ROOT / name)))):
        if PATH.fullmatch(text) and text.endswith(ENDINGS) and not any(ROOT.glob(text)):
            yield f"{name}: `{text}`: no such path"


def strayed_functions(name):
    for functions, path in DEFINED.findall(prose(ROOT / name)):
        code = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        for function in re.findall(r"(\w+)`", functions):
            if not re.search(rf"\bfn {function}\b", code):
                yield f"{name}: `{function}`: not a function of {path}"


def main():
    documents = [name for name in tracked() if name.endswith(".md") and (ROOT / name).exists()]
    wrong = [line for name in documents for line in broken_links(name)]
    wrong += [*missing_paths("ARCHITECTURE.md"), *strayed_functions("ARCHITECTURE.md")]
    print("\n".join(wrong) or f"{len(documents)} Markdown files, no broken link")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
