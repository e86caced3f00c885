"""Runs the commands of the first table of docs/figures.md, and prints each figure beside the printed one.

    python3 .ci/figures.py            every row: some two hours on two CPUs with nothing else to do
    python3 .ci/figures.py --check    only: each row has an entry here, and each printed figure stands in its row
    python3 .ci/figures.py token      rows whose command has this word

A figure is a `ratio` (off by more than a fifth, it fails), a bound (`most`: above it by more than a fifth, it fails) or a `time` of the
machine that was measured, which is printed alone: another machine has other times.
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OFF = 0.2


def number(pattern, scale=1.0):
    """The first number in the output behind a pattern."""

    def find(output):
        found = re.search(pattern, output, re.MULTILINE | re.DOTALL)
        return float(found[1]) * scale if found else None

    return find


def largest(pattern):
    """The largest number in the output behind a pattern."""
    return lambda output: max((abs(float(found)) for found in re.findall(pattern, output, re.MULTILINE)), default=None)


def caps(output):
    """The largest distance of a measured share from its cap, in points."""
    rows = re.findall(r"^  \S+ +\S+ +([\d.]+)% +\S+ +([\d.]+)%$", output, re.MULTILINE)
    return max((abs(float(cap) - float(measured)) for cap, measured in rows), default=None)


def suite(output):
    """The largest measured share of the programs with a cap of 40 %."""
    return largest(r"40 %.*?\b(0\.\d+)")(output)


def round_trip(cpus, row):
    return number(rf"^{cpus}.*?^{row} .* ([\d.]+)$")


# By the words with which a row begins: name, printed figure as it stands in the row, its number, kind, and where the output has it.
FIGURES = {
    "one process capped": [("off a cap", "0.1 points", 0.1, "most", caps)],
    "programs without waits": [
        ("off a share", "1.2 points", 1.2, "most", number(r"off by at most ([\d.]+) points of the device")),
        ("off, of its own speed", "3.2 (10 us)", 3.2, "most", number(r"([\d.]+) of each program's own speed")),
    ],
    "the same in virtual time": [("off a share", "1.5 points", 1.5, "most", largest(r"^\S.{29} +([\d.]+) +[\d.]+ +[\d.]+ +\d+$"))],
    "added to a launch": [
        ("a launch, 1 thread", "+5.5", 5.5, "time", number(r"^cuLaunchKernelEx\D*1 \D*[\d.]+ +[\d.]+ +([-\d.]+)")),
        ("a graph's launch", "+4.9 ns", 4.9, "time", number(r"^cuGraphLaunch\D*1 \D*[\d.]+ +[\d.]+ +([-\d.]+)")),
    ],
    "a token's round trip": [
        ("two CPUs, p50", "1.2 and 1.2 times", 1.2, "ratio", round_trip("two", "p50")),
        ("two CPUs, p99", "1.2 and 1.2 times", 1.2, "ratio", round_trip("two", "p99")),
        ("one CPU, p50", "1.8 to 1.9", 1.85, "ratio", round_trip("one", "p50")),
        ("one CPU, p99", "2.1 to 3.2", 2.65, "ratio", round_trip("one", "p99")),
    ],
    "share error": [("points", "0.96 points", 96.0, "most", largest(r"worst share error (\d+) basis"))],
    "a decision of the token": [
        ("64 clients", "0.41 us", 410.0, "time", number(r"^token: 64 clients, (\d+) ns")),
        ("1,024 clients", "0.47 us", 470.0, "time", number(r"^token: 1024 clients, (\d+) ns")),
        ("64 clients, insertions into a map", "10 and 9", 10.0, "ratio", number(r"^token: 64 clients.*?ratio ([\d.]+)")),
        ("1,024 clients, insertions into a map", "10 and 9", 9.0, "ratio", number(r"^token: 1024 clients.*?ratio ([\d.]+)")),
    ],
}


def rows():
    """Claim, figure and command of each row of the first table."""
    table = (ROOT / "docs/figures.md").read_text().split("|---|---|---|\n")[1].split("\n\n")[0]
    command = None
    for line in table.splitlines():
        claim, figure, printed_by = re.fullmatch(r"\| (.*) \| (.*) \| (.*) \|", line).groups()
        command = command if printed_by == "the same" else printed_by.strip("`")
        yield claim, figure, command
