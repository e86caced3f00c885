"""A row, its resources, and its execution."""

import concurrent.futures
import copy
import dataclasses
import os
import queue
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from .environments import Environment, Environments
from .errors import Failed, OutOfTime, RowEnd
from .node import Machine


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    `check` returns the figure, a text, or raises the row's other result. `needs` maps packages to beginnings of versions. `forms`
    are the forms of the suite with this row. The matrix prints the version of the package `framework`. A row that is
    `alone` has the machine to itself, since it measures, or counts the work of others.
    """

    name: str
    kind: str
    check: Callable[["Context"], str]
    needs: dict[str, str] = dataclasses.field(default_factory=dict)
    forms: frozenset[str] = frozenset({"full"})
    framework: str = ""
    alone: bool = True


# The daemon's `window` where no configuration says another.
DAEMON_WINDOW_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Effort:
    """Extent of the measurements of a form: windows of one process, their seconds, and pairs of whole runs. More pairs
    follow, up to `most_pairs`, while the interval of their losses is wide.

    A capped program works for its part of each of the daemon's windows and then waits, so it is measured over `daemon_windows`
    whole windows: five and a half would show 0.67 and 0.73 in turns for a cap of 0.7. Nine windows and more have an interval that
    one outlier on either side does not widen, which a busy host needs.
    """

    windows: int
    seconds: float
    daemon_windows: int
    pairs: int
    most_pairs: int
    demo_seconds: int

    @property
    def capped_seconds(self):
        """Seconds of one measured window of a capped program."""
        return self.daemon_windows * DAEMON_WINDOW_SECONDS


EFFORTS = {
    "full": Effort(windows=12, seconds=1.0, daemon_windows=10, pairs=12, most_pairs=40, demo_seconds=10),
    "short": Effort(windows=9, seconds=0.3, daemon_windows=6, pairs=6, most_pairs=8, demo_seconds=3),
    "ci": Effort(windows=6, seconds=0.4, daemon_windows=8, pairs=6, most_pairs=6, demo_seconds=2),
}


CPUS_A_ROW = 4


class Context:
    """State common to all rows of a run: the machine, the environments, the deadline and the results of earlier rows."""

    def __init__(self, machine: Machine, environments: Environments, form: str, rows: list[Row], minutes: float | None):
        self.machine, self.environments, self.form, self.rows = machine, environments, form, rows
        self.effort = EFFORTS[form]
        self.end = None if minutes is None else time.monotonic() + minutes * 60
        # Answers of batches of cases, by batch; see `rows.outcomes`.
        self.batches = {}
        # Starts of frameworks are short of CPUs: a row has four, so that none takes longer for the others.
        self.side_by_side = max(1, len(os.sched_getaffinity(0)) // CPUS_A_ROW)
        # Figures of a row beside its text, for the JSON.
        self.figures = {}

    def environment(self, needs) -> Environment:
        return self.environments.meeting(needs)

    def left(self, most):
        """Seconds for a step: `most`, or the rest of the whole run; `OutOfTime` without a rest."""
        if self.end is None:
            return most
        left = self.end - time.monotonic()
        if left < 1:
            raise OutOfTime("the time of the whole run was spent before")
        return min(most, left)

    def has(self, seconds):
        """Tells if the whole run has time for a step of `seconds`."""
        return self.end is None or time.monotonic() + seconds <= self.end

    def note(self, **figures):
        """Adds figures of the current row to the JSON."""
        self.figures.update(figures)

    def carry_out_all(self, rows: list[Row]):
        """Runs rows, and yields the line of each at its end. Rows which need not be alone run first, side by side."""
        groups = {}
        for row in rows:
            if not row.alone:
                # Cases of one batch share a process: the first row runs it for all.
                groups.setdefault(getattr(row.check, "batch", row.name), []).append(row)
        lines = queue.SimpleQueue()

        def run(group):
            for row in group:
                lines.put(self.carry_out(row))

        with concurrent.futures.ThreadPoolExecutor(self.side_by_side) as pool:
            running = [pool.submit(run, group) for group in groups.values()]
            for _ in range(sum(map(len, groups.values()))):
                yield lines.get()
        for done in running:
            done.result()
        yield from (self.carry_out(row) for row in rows if row.alone)

    def carry_out(self, row: Row) -> dict:
        """Runs one row; gives its line of the table."""
        # Figures are the row's own; all else is shared.
        return copy.copy(self)._carry_out(row)

    def _carry_out(self, row: Row) -> dict:
        start, self.figures, environment = time.monotonic(), {}, None
        try:
            if row.needs:
                environment = self.environment(row.needs)
            self.left(1)
            result, text = "ok", row.check(self)
        except RowEnd as end:
            result, text = end.result, str(end)
            if result == "FAILED" and self.end is not None and time.monotonic() > self.end:
                # A step cut short by the end of the run shows nothing about the row.
                result, text = OutOfTime.result, f"cut short: {text}"
        except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
            # A fault of the suite or an answer of another shape: the row shows nothing, and the next row goes on.
            traceback.print_exc()
            result, text = Failed.result, traceback.format_exc(limit=-1).strip().splitlines()[-1]
        line = {
            "row": row.name, "kind": row.kind, "result": result, "figure": text, "simulated": self.machine.simulated,
            "seconds": round(time.monotonic() - start, 1), "figures": self.figures,
        }
        if environment is not None:
            line["environment"] = environment.name
            line["packages"] = environment.found(row.needs)
            # The present package of two which serve a row.
            named = (row.framework or next(iter(row.needs))).split("|")
            line["framework"] = next(name for name in named if name in environment.packages)
        return line


def host():
    """The host, for the head of the table."""
    return {"cpus": len(os.sched_getaffinity(0)), "python": sys.version.split()[0], "load": round(os.getloadavg()[0], 1)}
