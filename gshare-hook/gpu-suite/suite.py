#!/usr/bin/env python3
"""Runs unmodified GPU programs bare and under gshare, compares them, and prints one table.

    cargo build --release -p gshare-cli -p gshare-hook -p gshare-fake-cuda
    python3 gshare-hook/gpu-suite/suite.py --short --make-venvs target/suite-venvs     # on this machine's GPU
    python3 gshare-hook/gpu-suite/suite.py --short --sim --venv torch=/path/to/venv     # on a simulated device

The rows are the same on a GPU and on a simulated device, and the table names the device, also if the simulated driver
was reached by LD_LIBRARY_PATH. A row without its packages in any environment is `not installed`, never `ok`. A figure with its
whole interval beyond its bar is MISSED; a figure with an indecisive interval is `noisy`. The card's settings stay unchanged.
Only the standard library is used. Exit code: 0 if all possible rows are ok, 1 if a row failed or missed its bar, 3 if
a row was undecided or not reached in time, 2 for a wrong argument.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys
import time

from gpusuite import context, environments, node, rows, table
from gpusuite.errors import ArgumentError, NotHere, RowEnd

SHORT_MINUTES = 8.0
# The groups with small packages, enough for the rows of the form `ci`.
CI_GROUPS = ("driver", "cuda12")


def parser():
    root = pathlib.Path(__file__).resolve().parents[2]
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--bin", default=root / "target" / "release", type=pathlib.Path, help="folder of gshare, the hook and the simulator")
    add("--sim", nargs="?", const=node.Simulator.profile, metavar="PROFILE", help="run on a simulated device [a100]")
    add("--driver", metavar="VERSION", help=f"CUDA version of the simulated driver [{node.Simulator.driver}]")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_true", help=f"within {SHORT_MINUTES:g} minutes")
    form.add_argument("--ci", action="store_true", help="rows with small packages, none of them measured; implies --strict")
    add("--minutes", type=float, help="end after this many minutes; rows that were not reached are `no time`")
    add("--venv", action="append", default=[], metavar="NAME=PATH", help="a virtual environment or an interpreter")
    add("--make-venvs", metavar="DIR", help="make virtual environments of the pinned versions in DIR before the rows")
    groups = f"those to make, of {', '.join(environments.groups())} [all; with --ci: {', '.join(CI_GROUPS)}]"
    add("--groups", nargs="+", metavar="GROUP", help=groups)
    add("--strict", action="store_true", help="a row without its packages, hardware or build fails the run")
    add("--only", nargs="+", metavar="ROW", help="rows to run, by name or by its beginning")
    add("--list", action="store_true", help="print the rows and their requirements")
    add("--json", metavar="FILE", help="write the report as JSON; `-` for standard output instead of the table")
    add("--matrix", metavar="FILE", help="write the page with the matrix of frameworks and versions")
    add("--from", dest="source", nargs="+", metavar="FILE", help="take the rows from these JSON files and run none")
    return made


def main():
    arguments = parser().parse_args()
    try:
        if arguments.source:
            return show(arguments, read_reports(arguments.source))
        chosen = choose(arguments)
        if arguments.list:
            for row in chosen:
                needs = " ".join(f"{name} {version}".strip() for name, version in row.needs.items()) or "-"
                print(f"{row.name:28} {row.kind:8} {','.join(sorted(row.forms)):14} {needs}")
            return 0
        return show(arguments, run(arguments, chosen))
    except ArgumentError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    except RowEnd as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 1


def form_of(arguments):
    return "short" if arguments.short else "ci" if arguments.ci else "full"


def choose(arguments):
    """The rows of the form, or the rows of `--only`, of any form."""
    everything = rows.all_rows()
    if not arguments.only:
        return [row for row in everything if form_of(arguments) in row.forms]
    for name in arguments.only:
        if not any(row.name.startswith(name) for row in everything):
            raise ArgumentError("--only", f"no row {name!r}; --list prints them")
    return [row for row in everything if row.name in arguments.only or row.name.startswith(tuple(arguments.only))]


def machine_of(arguments):
    """The machine of the programs; identifies the driver, in a process of its own."""
    if arguments.driver and not arguments.sim:
        raise ArgumentError("--driver", "only a simulated driver can be of another version; add --sim")
    simulator = None
    if arguments.sim:
        if not (node.PROFILES / f"{arguments.sim}.toml").exists():
            known = ", ".join(sorted(path.stem for path in node.PROFILES.glob("*.toml")))
            raise ArgumentError("--sim", f"no profile {arguments.sim!r}; there are {known}")
        simulator = node.Simulator(arguments.sim, arguments.driver or node.Simulator.driver)
    machine = node.Machine(arguments.bin.resolve(), simulator)
    for name in ("gshare", "libgshare_hook.so", *(["libfake_cuda.so"] if simulator else [])):
        if not machine.built(name):
            build = "cargo build -p gshare-cli -p gshare-hook -p gshare-fake-cuda"
            raise ArgumentError("--bin", f"no {arguments.bin / name}: {build}")
    with machine.node() as place, place.workload(sys.executable, "device") as probe:
        try:
            device = probe.hear(60)
        except RowEnd as error:
            raise NotHere(f"the driver of this machine says nothing; without a GPU add --sim: {error}") from None
    return dataclasses.replace(machine, device=device)


def run(arguments, chosen):
    """Carries the rows out; gives the report."""
    given, problems = list(arguments.venv), []
    if arguments.make_venvs:
        for group in arguments.groups or (CI_GROUPS if arguments.ci else environments.groups()):
            try:
                given += environments.make(arguments.make_venvs, [group])
            except RowEnd as error:
                problems.append(str(error))
                print(f"suite.py: {error}", file=sys.stderr)
    found = environments.Environments.given(given)
    machine = machine_of(arguments)
    minutes = arguments.minutes if arguments.minutes is not None else SHORT_MINUTES if arguments.short else None
    if minutes is not None and minutes <= 0:
        raise ArgumentError("--minutes", f"{minutes:g} is not positive")
    start = time.monotonic()
    suite = context.Context(machine, found, form_of(arguments), chosen, minutes)
    report = {
        "suite": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gshare": gshare_version(machine),
        "form": f"{suite.form}, chosen rows" if arguments.only else suite.form,
        "host": context.host(),
        "device": machine.device,
        "environments": [{"name": e.name, "python": e.version, "packages": e.packages} for e in found.all],
        "problems": problems,
        "rows": [],
        "seconds": 0.0,
    }
    print(table.on(report), file=sys.stderr, flush=True)
    order = {row.name: place for place, row in enumerate(chosen)}
    for line in suite.carry_out_all(chosen):
        report["rows"] = sorted([*report["rows"], line], key=lambda line: order[line["row"]])
        report["seconds"] = round(time.monotonic() - start, 1)
        print(table.line(line), file=sys.stderr, flush=True)
        # A run cut short keeps its finished rows.
        write_json(arguments, report)
    return report


def write_json(arguments, report):
    if arguments.json and arguments.json != "-":
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def gshare_version(machine):
    """Version of the command, and the commit of the suite's checkout, if any."""
    done = subprocess.run([machine.bin / "gshare", "--version"], capture_output=True, text=True, check=False)
    git = ["git", "-C", str(node.SUITE), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    return " ".join([*done.stdout.split()[1:2], *([f"({commit})"] if commit else [])])


def read_reports(paths):
    """The report of one run, or of several together."""
    reports = []
    for path in paths:
        try:
            reports.append(json.loads(pathlib.Path(path).read_text()))
            reports[-1]["rows"], reports[-1]["device"]["simulated"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError("--from", f"{path}: not a report of this suite: {error}") from error
    try:
        return table.merge(reports)
    except ValueError as error:
        raise ArgumentError("--from", str(error)) from error


def show(arguments, report):
    if arguments.matrix:
        pathlib.Path(arguments.matrix).write_text(table.matrix(report))
    if arguments.json == "-":
        print(json.dumps(report))
    else:
        write_json(arguments, report)
        print(table.text(report))
    return table.exit_code(report, strict=arguments.strict or arguments.ci)


if __name__ == "__main__":
    sys.exit(main())
