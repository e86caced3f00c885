"""Rows of gshare's own programs, which need no framework."""

import dataclasses
import json
import os
import pathlib
import subprocess

from .. import stats
from ..context import Context, Row
from ..errors import Failed, Missed, NotHere
from ..node import SUITE

POINTS = 0.02


def device(context: Context):
    """The driver's answers; `suite.py` has asked already."""
    seen = context.machine.device
    kind = "simulated" if seen["simulated"] else "GPU"
    return f"{kind}: {seen['count']} x {seen['name']}, driver {seen['driver']}, {seen['total_bytes']} bytes"


def demo(context, *options):
    """The phases of `gshare demo`, which must call the device by its right name."""
    sim = [f"--sim={context.machine.simulator.profile}"] if context.machine.simulator else []
    argv = [str(context.machine.bin / "gshare"), "lab", "shares", "--json", "--seconds", str(context.effort.demo_seconds), *sim, *options]
    env = {name: value for name, value in os.environ.items() if name != "GSHARE_SOCKET"}
    # In a checkout the demo builds both libraries again unless they are named.
    env |= context.machine.libraries()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=context.left(300))
    if done.returncode != 0:
        raise Failed(f"gshare demo: {done.stderr.strip()[-300:]}")
    report = json.loads(done.stdout)
    expected = "simulated" if context.machine.simulated else "real"
    if report["device"] != expected:
        raise Failed(f"gshare demo calls the device {report['device']}; it is {expected}")
    return report["phases"]


def shares(context: Context):
    clients = demo(context)[0]["clients"]
    text = ", ".join(f"{client['limit']:.2f} -> {client['measured']:.3f}" for client in clients)
    return _points(clients, text)


def caps(context: Context):
    clients = [client for phase in demo(context, "--caps") for client in phase["clients"]]
    return _points(clients, f"{len(clients)} caps")


def _points(clients, text):
    off = max(abs(client["measured"] - client["limit"]) for client in clients)
    text = f"{text}: off by at most {off * 100:.2f} points"
    if off > POINTS:
        raise Missed(text)
    return text


# Calls measured by `call_costs.c`, by the names in its answer.
CALLS = {
    "launch_ns": "a launch", "graph_ns": "a graph's launch", "event_ns": "an event", "copy_ns": "a copy",
    "small_ns": "1 MiB allocated and freed", "large_ns": "1 GiB",
}


METERED_CALLS = ["--quota", "0.9:1"]


def call_costs(folder):
    """The program for measuring calls of the driver, built unless `GSHARE_CALL_COSTS` names it; `NotHere` without a compiler."""
    program = os.environ.get("GSHARE_CALL_COSTS") or str(folder / "call_costs")
    if not pathlib.Path(program).exists():
        try:
            build = ["gcc", "-O2", "-o", program, str(SUITE / "call_costs.c"), "-ldl"]
            subprocess.run(build, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            raise NotHere("no gcc, and GSHARE_CALL_COSTS names no program") from None
    return program


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """CPU time of calls without cost on the device, by a C program; pairs of runs in alternating order.

    `ways` names the two kinds of runs and their options. On a GPU the second kind may add `large` to a large allocation, as a
    part of its time; a simulated driver allocates in next to no time.
    """

    ways: tuple
    large: float | None = None

    def __call__(self, context: Context) -> str:
        with context.machine.node() as node:
            program = call_costs(node.folder)

            def measured(options):
                with node.start([program], hooked=options) as run:
                    code, answers = run.finish(context.left(60))
                    if code != 0 or not answers:
                        raise Failed(run.describe("measured nothing"))
                    return answers[-1]

            pairs = []
            for pair in range(max(stats.FEWEST, context.effort.pairs)):
                order = self.ways if pair % 2 == 0 else reversed(self.ways)
                pairs.append({way: measured(options) for way, options in order})
        (less, _), (more, _) = self.ways
        parts = []
        for name, words in CALLS.items():
            without = stats.estimate([pair[less][name] for pair in pairs])
            added = stats.estimate([pair[more][name] - pair[less][name] for pair in pairs])
            context.note(**{name: without.json(), f"added_{name}": added.json()})
            parts.append(f"{words} {without.median:.0f} ns {less}, {added.text(digits=0, sign='+')} {more}")
        if self.large is not None and not context.machine.simulated:
            added = stats.estimate([pair[more]["large_ns"] / pair[less]["large_ns"] - 1 for pair in pairs])
            stats.check_at_most(f"time added to {CALLS['large_ns']}", added, self.large)
        return "; ".join(parts)


def cudarc(context: Context):
    """A `cudarc` program capped at 40 % and 256 MiB is metered and is refused memory at the limit."""
    program = context.machine.bin / "cuda_client"
    if not program.exists():
        raise NotHere("not built: cargo build -p gshare-examples --bin cuda_client")
    with context.machine.node() as node:
        run = node.start([program, str(context.effort.demo_seconds)], hooked=["--quota", "0.4", "--mem", "256MiB"])
        with run:
            code, _ = run.finish(context.left(60))
            if code != 0:
                raise Failed(run.describe("failed"))
    seen = json.loads(run.last_line)
    if seen["total_bytes"] != 256 << 20:
        raise Failed(f"total memory reads {seen['total_bytes']}")
    if not seen["out_of_memory"] or not 240 << 20 < seen["allocated_bytes"] <= 256 << 20:
        raise Failed(f"out of memory after {seen['allocated_bytes']} bytes of {256 << 20}")
    share = seen["launches_per_s"] / 1000
    text = f"0.40 -> {share:.3f}; out of memory after {seen['allocated_bytes'] >> 20} MiB of 256"
    if abs(share - 0.4) > POINTS:
        raise Missed(text)
    return text


ALWAYS = frozenset({"full", "short", "ci"})
MEASURED = frozenset({"full", "short"})
ROWS = [
    Row("device", "own", device, forms=ALWAYS),
    Row("shares 20/30/50", "share", shares, forms=MEASURED),
    Row("caps 10..90", "share", caps),
    Row("call costs", "cost", CallCosts((("bare", None), ("hooked", METERED_CALLS))), forms=MEASURED),
    Row("call costs, --park", "cost", CallCosts(
        (("hooked", METERED_CALLS), ("with --park", [*METERED_CALLS, "--park"])), large=0.5,
    ), forms=MEASURED),
    Row("cudarc", "share", cudarc),
]
