"""Busy programs get their share of the device: capped at 10, 40 and 70 %, and two at 30 and 70 %.

On a simulated device every kernel takes 500 us, by a profile file, and a share is the part of a window in which the device
worked for the process, by its own account. On a GPU a share is the speed of a window beside the median of the bare windows,
half of them before and half after the capped windows; a baseline unknown to within half of the tolerance is refused.
"""

import dataclasses

from .. import stats
from ..context import Context, Row
from .packages import CUPY, JAX, NUMBA, TORCH, TRITON

POINTS = 0.02
CAPS = (0.1, 0.4, 0.7)
KERNEL_US = 500
SETTLE_SECONDS = 0.6
START_SECONDS = 180


def measure(context, program, count, seconds, settle=SETTLE_SECONDS):
    """Windows of a busy program: `settle` seconds of uncounted work, then `count` windows."""
    program.say(f"{count} {seconds} {settle}")
    return program.hear(context.left(60 + 10 * (settle + count * seconds)))


def speeds(windows):
    return [window["steps"] / window["seconds"] for window in windows]


def shares_of(context, windows, bare):
    """Share of the device in each window, as the head of this file says."""
    if context.machine.simulated:
        return [window["busy"] / window["seconds"] for window in windows]
    return [speed / bare.median for speed in speeds(windows)]


def baseline(context, windows):
    """The bare speed with its interval; on a GPU it is refused if the interval is too wide to divide by."""
    bare = stats.estimate(speeds(windows))
    if not context.machine.simulated:
        stats.check_baseline(bare, POINTS / 2)
    return bare


@dataclasses.dataclass(frozen=True)
class Capped:
    """One kind of work of `busy.py`, alone on the device, capped at each of `CAPS`."""

    kind: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        count = context.effort.windows
        with context.machine.node(kernel_us=KERNEL_US) as node:
            bare = node.workload(python, "busy", self.kind)
            steps = bare.hear(context.left(START_SECONDS))["steps"]
            # The same batches for all: a capped program would measure its own steps as longer than they are.
            capped = [
                node.workload(python, "busy", self.kind, steps, hooked=["--name", f"cap-{cap}", "--quota", f"{CAPS[0]}:{cap}"])
                for cap in CAPS
            ]
            for program in capped:
                program.hear(context.left(START_SECONDS))
            half = (count + 1) // 2
            windows = measure(context, bare, half, context.effort.seconds)
            runs = [measure(context, program, count, context.effort.capped_seconds) for program in capped]
            windows += measure(context, bare, half, context.effort.seconds)
        alone = baseline(context, windows)
        context.note(bare_steps_per_s=alone.json())
        shares = {cap: stats.estimate(shares_of(context, run, alone)) for cap, run in zip(CAPS, runs, strict=True)}
        context.note(shares={str(cap): share.json() for cap, share in shares.items()})
        for cap, share in shares.items():
            stats.check_near(f"capped at {cap:g}", share, cap, POINTS)
        return ", ".join(f"{cap:.2f} -> {share.text(digits=3)}" for cap, share in shares.items())


@dataclasses.dataclass(frozen=True)
class Two:
    """Two programs that share the device by 30 and 70 % at the same time."""

    kind: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        count, quotas = context.effort.windows, (0.3, 0.7)
        with context.machine.node(kernel_us=KERNEL_US) as node:
            bare = node.workload(python, "busy", self.kind)
            steps = bare.hear(context.left(START_SECONDS))["steps"]
            programs = [
                node.workload(python, "busy", self.kind, steps, hooked=["--name", f"of-{quota}", "--quota", f"{quota}:{quota}"])
                for quota in quotas
            ]
            for program in programs:
                program.hear(context.left(START_SECONDS))
            half = (count + 1) // 2
            windows = measure(context, bare, half, context.effort.seconds)
            for program in programs:
                program.say(f"{count} {context.effort.capped_seconds} {SETTLE_SECONDS}")
            limit = 60 + 10 * count * context.effort.capped_seconds
            runs = [program.hear(context.left(limit)) for program in programs]
            windows += measure(context, bare, half, context.effort.seconds)
        alone = baseline(context, windows)
        shares = [stats.estimate(shares_of(context, run, alone)) for run in runs]
        context.note(bare_steps_per_s=alone.json(), shares=[share.json() for share in shares])
        for quota, share in zip(quotas, shares, strict=True):
            stats.check_near(f"share of {quota:g}", share, quota, POINTS)
        return "30:70 -> " + " : ".join(share.text(digits=3) for share in shares)


MEASURED = frozenset({"full", "short"})
KINDS = {
    "driver API": ("driver", {}),
    "numba": ("numba", NUMBA),
    "torch matmul": ("torch_matmul", TORCH),
    "torch conv": ("torch_conv", TORCH),
    "torch graph": ("torch_graph", TORCH),
    "triton": ("triton", TRITON),
    "cupy": ("cupy", CUPY),
    "jax": ("jax", JAX),
}
ROWS = [
    *(
        Row(f"caps: {name}", "share", Capped(kind, tuple(needs.items())), needs, MEASURED)
        for name, (kind, needs) in KINDS.items()
    ),
    Row("30/70: driver API", "share", Two("driver", ()), {}, MEASURED),
    Row("30/70: torch matmul", "share", Two("torch_matmul", tuple(TORCH.items())), TORCH, MEASURED),
]
