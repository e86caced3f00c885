"""Runs the commands of the first table of docs/figures.md, and prints each figure beside the printed one.

    python3 .ci/figures.py            every row: hours, on a machine with nothing else to do
    python3 .ci/figures.py token      rows whose command has this word
    python3 .ci/figures.py --check    runs nothing: each row has its place here, and each printed figure stands in its row

A `ratio` that is off by more than a fifth fails, and so does a bound (`most`) that is passed by more than a fifth. A `time` belongs to the
machine of the table: it is printed, and fails nothing.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OFF = 0.2


def first(pattern):
    """The first number that a pattern finds."""

    def find(output):
        found = re.search(pattern, output, re.MULTILINE | re.DOTALL)
        return float(found[1]) if found else None

    return find


def largest(pattern):
    return lambda output: max((float(found) for found in re.findall(pattern, output, re.MULTILINE)), default=None)


def caps(output):
    """The largest distance of a measured share from its limit, in points."""
    rows = re.findall(r"^\S+ +[\d.]+% +([\d.]+)% +[\d.]+% +([\d.]+)%$", output, re.MULTILINE)
    return max((abs(float(limit) - float(measured)) for limit, measured in rows), default=None)


def trip(cpus, row):
    return first(rf"^{cpus} CPUs?:.*?^{row} +[\d.]+ +[\d.]+ +([\d.]+)$")


def added(call):
    return first(rf"^{call} +[\d.]+ +[\d.]+ +(-?[\d.]+)")


def got(cpus, tensors):
    return first(rf"^{cpus} CPUs?\n.*?GET of {tensors} tensors +p50 +[\d.]+ us \(([\d.]+) x\)")


# By the words with which a row begins: kind, the figure as it stands in the row, its number, and where the output has it.
FIGURES = {
    "one process capped": [("most", "0.1 points", 0.1, caps)],
    "programs without waits": [
        ("most", "1.2 points over 10 s", 1.2, first(r"off by at most ([\d.]+) points of the device")),
        ("most", "3.2 (10 us)", 3.2, first(r"all by ([\d.]+) of their own speed")),
    ],
    "the same in virtual time": [("most", "1.5 points", 1.5, largest(r"^kernels of \d+ us: off by ([\d.]+) points"))],
    "added to a launch": [
        ("time", "+5.5", 5.5, first(r"^kernel_ex, 1 threads(?: +-?[\d.]+){3} +(-?[\d.]+)")),
        ("time", "+4.9 ns", 4.9, first(r"^graph, 1 threads(?: +-?[\d.]+){3} +(-?[\d.]+)")),
    ],
    "a token's round trip": [
        ("ratio", "1.2 and 1.2 times it on two CPUs", 1.2, trip("two", "p50")),
        ("ratio", "1.2 and 1.2 times it on two CPUs", 1.2, trip("two", "p99")),
        ("ratio", "1.8 to 1.9", 1.85, trip("one", "p50")),
        ("ratio", "2.1 to 3.2 times on one", 2.65, trip("one", "p99")),
    ],
    "share error": [("most", "0.89 points", 89, largest(r"worst share error (\d+) basis"))],
    "a decision of the token": [
        ("time", "0.41 us at 64", 410, first(r"^token: 64 clients, (\d+) ns")),
        ("time", "0.46 us at 1,024", 460, first(r"^token: 1024 clients, (\d+) ns")),
        ("ratio", "10.7 and 11.6 insertions", 10.7, first(r"^token: 64 clients.*?ratio ([\d.]+)")),
        ("ratio", "10.7 and 11.6 insertions", 11.6, first(r"^token: 1024 clients.*?ratio ([\d.]+)")),
    ],
    "a pod placed": [
        ("time", "0.09 to 0.21 us", 210, largest(r"^ +\d+ (?:profile|light|half) +default +(\d+)")),
        ("time", "at 100,000, 0.57 us", 570, first(r"^ +100000 fine +default +(\d+)")),
    ],
    "Dilu's placement": [("time", "0.39 us", 390, first(r"^dilu, +30000 GPUs: place p50 (\d+)"))],
    "a place that fails": [
        ("time", "0.1 and 0.2 us", 0.1, largest(r"^  squares of [\d.]+ %: ([\d.]+)")),
        ("time", "0.1 and 0.2 us", 0.2, largest(r"^  squares of [\d.]+ %: [\d.]+ ([\d.]+)")),
    ],
    "added to a call of the driver": [("time", "launch 10", 10, added("launch")), ("time", "memory info 0.19 us", 190, added("memory info"))],
    "a model got from the store": [
        ("ratio", "1.1 times it on two CPUs", 1.1, got("two", 500)),
        ("ratio", "1.2 on one", 1.2, got("one", 500)),
    ],
    "an event of a request": [
        ("time", "0.58 us at 12 GPUs", 580, first(r"^request/evict_cost_aware/12_gpus_\S+: (\d+) ns")),
        ("time", "3.8 us at 10,000", 3800, first(r"^request/evict_cost_aware/10000_gpus_\S+: (\d+) ns")),
    ],
}
# Rows without a number to compare, and why.
NOT_COMPARED = {
    "their longest time": "a bound for each row of the bench, which marks what is missed",
    "a busy program": "parts of the speed of each program, by case",
    "two to four programs": "the bench marks what is missed",
    "programs paced by their host": "the bench marks what is missed",
    "PyTorch's products": "frameworks of some gigabytes; the step `frameworks` has those with small packages",
    "the daemon's charge": "counts of the seeds, which the row above runs",
    "composed worlds": "means over the functions of a table",
    "the same on whole devices": "means over the functions of a table",
    "LALB on real arrivals": "windows of a trace, which is not in the repository",
    "`gshare up`, optimised build": "real processes for minutes, under load; the script prints its rows",
    "the same host": "real processes for minutes, under load; the script prints its rows",
    "the search by which": "a table of searches by profile",
    "trials until the optimum": "the paper's profiles, which are not in the repository",
}


def entry(table, claim):
    return next((key for key in table if claim.startswith(key)), None)


def rows():
    """Claim, figure and command of each row of the first table."""
    table = (ROOT / "docs/figures.md").read_text().split("|---|---|---|\n")[1].split("\n\n")[0]
    command = None
    for line in table.splitlines():
        cells = re.fullmatch(r"\| (.*) \| (.*) \| (.*) \|", line)
        if not cells:
            sys.exit(f"docs/figures.md: no row of three cells: {line[:80]}")
        claim, figure, printed_by = cells.groups()
        command = command if printed_by == "the same" else printed_by.strip("`")
        yield claim, figure, command


def check():
    wrong, used = [], set()
    for claim, figure, _ in rows():
        key = entry(FIGURES, claim) or entry(NOT_COMPARED, claim)
        used.add(key)
        if key is None:
            wrong.append(f"no entry for the row `{claim[:60]}`")
        wrong += [f"`{key}`: the row has no `{printed}`" for _, printed, *_ in FIGURES.get(key, []) if printed not in figure]
    wrong += [f"no row begins with `{key}`" for key in [*FIGURES, *NOT_COMPARED] if key not in used]
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


def run(word):
    outputs, failed = {}, False
    for claim, _, command in rows():
        key = entry(FIGURES, claim)
        if key is None or word not in command:
            continue
        if command not in outputs:
            argv = command.replace("gshare ", "cargo run --release -p gshare-cli -- ", 1) if command.startswith("gshare ") else command
            print(f"\n$ {argv}", flush=True)
            done = subprocess.run(argv, shell=True, cwd=ROOT, capture_output=True, text=True)
            outputs[command] = done.stdout + done.stderr
            if done.returncode:
                print(done.stderr[-2000:])
        for kind, text, printed, find in FIGURES[key]:
            found = find(outputs[command])
            ratio = None if found is None else found / printed
            bad = found is None or (kind != "time" and ratio > 1 + OFF) or (kind == "ratio" and ratio < 1 - OFF)
            failed |= bad
            said = "not in the output" if found is None else f"{found:g} beside {printed:g}: {ratio:.2f}"
            print(f"{'WRONG' if bad else 'ok':5} {kind:5} {key} ({text}): {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else run(" ".join(sys.argv[1:])))
