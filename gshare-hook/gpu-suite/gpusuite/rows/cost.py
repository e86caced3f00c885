"""Cost of the hook, and of parking that is possible and unused: throughput of programs, and the time until the first kernel.

Runs come in pairs of alternating order.
"""

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
PARKED_START = 0.02


# Two ways to run a program, whose difference is a cost, with the options of `gshare run`; None for a bare program.
HOOK = (("without", None), ("with", METERED))
PARKING = (("without", METERED), ("with", [*METERED, "--park"]))


@dataclasses.dataclass(frozen=True)
class Loss:
    """Throughput lost by a metered program, alone on the device.

    A process of each way is warm, and they work in turns. Every other pair begins with the other process, so that a change of the
    host or of the clock hits both alike.
    """

    kind: str
    needs: tuple[tuple[str, str], ...]
    ways: tuple = HOOK

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        with context.machine.node() as node:
            programs, steps = {}, ()
            for way, options in dict(self.ways).items():
                programs[way] = node.workload(python, "busy", self.kind, *steps, hooked=options)
                steps = (programs[way].hear(context.left(START_SECONDS))["steps"],)
            times = {way: [] for way in programs}
            for pair in range(max(stats.FEWEST, context.effort.windows)):
                order = list(programs.items())
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
    ways: tuple = HOOK
    bar: float = START

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        options = dict(self.ways)
        times, longest = {way: [] for way in options}, 0.0
        with context.machine.node() as node:
            # The first run of each fills the caches of files and is not counted.
            for pair in range(-1, context.effort.most_pairs):
                if pair >= max(stats.FEWEST, context.effort.pairs) and stats.estimate(added(times)).half_width <= self.bar / 2:
                    break
                if pair >= stats.FEWEST and not context.has(longest):
                    break
                began = time.monotonic()
                for way in options if pair % 2 == 0 else reversed(options):
                    start = time.monotonic()
                    run = node.workload(python, "first_kernel", self.script, hooked=options[way])
                    code, _ = run.finish(context.left(START_SECONDS))
                    if code != 0:
                        raise Failed(run.describe("failed"))
                    if pair >= 0:
                        times[way].append(time.monotonic() - start)
                longest = max(longest, time.monotonic() - began)
        return judge(context, "time added to a start", times, self.bar, longer=True)


def added(times):
    """The excess time of the runs with the cost over the other run of their pair, as a part of the latter."""
    return [more / less - 1 for less, more in zip(times["without"], times["with"], strict=True)]


def judge(context, name, times, bar, longer=False):
    """The text of a loss within its bar; `stats.check_at_most` raises the other results."""
    losses = added(times) if longer else stats.pair_losses(times["without"], times["with"])
    loss, alone = stats.estimate(losses), stats.estimate(times["without"])
    context.note(loss=loss.json(), without=alone.json())
    stats.check_at_most(name, loss, bar)
    return f"{name}: {loss.text(100, 2, '+')} %"


MEASURED = frozenset({"full", "short"})
FULL = frozenset({"full"})
# The busy programs with a measured loss beside their measured share.
LOSS_OF = ("numba", "torch matmul", "torch graph", "triton", "cupy", "jax")
STARTS = [
    Row("start: torch", "cost", Start("torch", tuple(TORCH.items())), TORCH, MEASURED),
    Row("start: driver API", "cost", Start("driver", ()), {}, FULL),
    Row("start: torch, --park", "cost", Start("torch", tuple(TORCH.items()), PARKING, PARKED_START), TORCH, FULL),
]
LOSSES = [
    Row(f"loss: {name}", "cost", Loss(kind, tuple(needs.items())), needs, FULL)
    for name, (kind, needs) in KINDS.items() if name in LOSS_OF
]
LOSSES.append(
    Row("loss: torch training, --park", "cost", Loss("torch_training", tuple(TORCH.items()), PARKING), TORCH, FULL)
)
