"""Cost of the hook: throughput of whole programs, and the time until the first kernel, in pairs of alternating order."""

import dataclasses
import time

from .. import stats
from ..context import Context, Row
from ..errors import Failed
from .metering import KINDS, START_SECONDS, measure, speeds
from .outcomes import METERED
from .packages import TORCH

LOSS = 0.01
START = 0.05


@dataclasses.dataclass(frozen=True)
class Loss:
    """Throughput lost by a metered program, alone on the device.

    One bare and one hooked process are warm and work in turns, bare first in every other pair, so that a change of the host or
    of the clock hits both alike.
    """

    kind: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        with context.machine.node() as node:
            bare = node.workload(python, "busy", self.kind)
            steps = bare.hear(context.left(START_SECONDS))["steps"]
            hooked = node.workload(python, "busy", self.kind, steps, hooked=METERED)
            hooked.hear(context.left(START_SECONDS))
            times = {"bare": [], "hooked": []}
            for pair in range(max(stats.FEWEST, context.effort.windows)):
                order = [("bare", bare), ("hooked", hooked)]
                for way, program in order if pair % 2 == 0 else reversed(order):
                    window = measure(context, program, 1, context.effort.seconds, 0.2)
                    times[way].append(1 / speeds(window)[0])
        return judge(context, "throughput lost", times, LOSS)


@dataclasses.dataclass(frozen=True)
class Start:
    """Time of a whole process: imports, the first kernel, and its end.

    Imports vary by a tenth from run to run, so pairs are added until the interval is half as wide as the bar on either side.
    Its width decides, never its place, which would favour the bar. If the whole run has no time for another pair, the pairs
    counted so far are judged.
    """

    script: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        times, longest = {"bare": [], "hooked": []}, 0.0
        with context.machine.node() as node:
            # The first run of each fills the caches of files and is not counted.
            for pair in range(-1, context.effort.most_pairs):
                if pair >= max(stats.FEWEST, context.effort.pairs) and stats.estimate(added(times)).half_width <= START / 2:
                    break
                if pair >= stats.FEWEST and not context.has(longest):
                    break
                began = time.monotonic()
                ways = ["bare", "hooked"] if pair % 2 == 0 else ["hooked", "bare"]
                for way in ways:
                    start = time.monotonic()
                    run = node.workload(python, "first_kernel", self.script, hooked=METERED if way == "hooked" else None)
                    code, _ = run.finish(context.left(START_SECONDS))
                    if code != 0:
                        raise Failed(run.describe("failed"))
                    if pair >= 0:
                        times[way].append(time.monotonic() - start)
                longest = max(longest, time.monotonic() - began)
        return judge(context, "time added to a start", times, START, longer=True)


def added(times):
    """The excess time of each hooked run over the bare run of its pair, as a part of the bare run."""
    return [hooked / bare - 1 for bare, hooked in zip(times["bare"], times["hooked"], strict=True)]


def judge(context, name, times, bar, longer=False):
    """The text of a loss within its bar; `stats.check_at_most` raises the other results."""
    losses = added(times) if longer else stats.pair_losses(times["bare"], times["hooked"])
    loss, alone = stats.estimate(losses), stats.estimate(times["bare"])
    context.note(loss=loss.json(), bare=alone.json())
    stats.check_at_most(name, loss, bar)
    return f"{name}: {loss.text(100, 2, '+')} %"


MEASURED = frozenset({"full", "short"})
FULL = frozenset({"full"})
# The busy programs with a measured loss beside their measured share.
LOSS_OF = ("numba", "torch matmul", "torch graph", "triton", "cupy", "jax")
STARTS = [
    Row("start: torch", "cost", Start("torch", tuple(TORCH.items())), TORCH, MEASURED),
    Row("start: driver API", "cost", Start("driver", ()), {}, FULL),
]
LOSSES = [
    Row(f"loss: {name}", "cost", Loss(kind, tuple(needs.items())), needs, FULL)
    for name, (kind, needs) in KINDS.items() if name in LOSS_OF
]
