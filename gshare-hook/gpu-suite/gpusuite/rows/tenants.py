"""Tenants with several processes, and tenants which die while they hold a token."""

import dataclasses
import os
import signal
import time

from .. import stats
from ..context import Context, Row
from ..errors import Failed
from .metering import KERNEL_US, SETTLE_SECONDS, START_SECONDS, measure, speeds
from .packages import TORCH

ROUNDS = 5
# Tries to stop the victim at a moment at which it holds the token, and seconds until its death must be noticed.
TRIES = 100
NOTICED_SECONDS = 10
IDLE_BAR = 0.98


def wait_until(condition, what):
    """Waits for a condition; `Failed` if it does not hold within `NOTICED_SECONDS`."""
    end = time.monotonic() + NOTICED_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"not so within {NOTICED_SECONDS} s: {what}")
        time.sleep(0.02)


@dataclasses.dataclass(frozen=True)
class IdleSibling:
    """A working process keeps the speed of its tenant beside another process of the same run with only a context."""

    kind: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        quota, count, medians = ["--quota", "0.4:0.4"], context.effort.windows, []
        with context.machine.node(kernel_us=KERNEL_US) as node:
            # Both programs are there from the start; they work in turns, so that other work of the host hits both.
            alone = node.workload(python, "busy", self.kind, "8", hooked=["--name", "alone", *quota])
            family = node.workload(python, "sibling", self.kind, "8", hooked=["--name", "family", *quota])
            for program in (alone, family):
                program.hear(context.left(START_SECONDS))
            wait_until(lambda: len(node.clients("family")) == 2, "the run with a sibling has two clients")
            for program in (alone, family, family, alone):
                medians.append(speeds(measure(context, program, count, context.effort.capped_seconds, SETTLE_SECONDS)))
        bare = stats.estimate(medians[0] + medians[3])
        stats.check_baseline(bare, 1 - IDLE_BAR)
        ratio = stats.estimate([speed / bare.median for speed in medians[1] + medians[2]])
        context.note(alone=bare.json(), ratio=ratio.json())
        stats.check_at_least("speed beside an idle sibling over speed alone", ratio, IDLE_BAR)
        return f"{ratio.text(digits=3)} of the speed without an idle sibling"


@dataclasses.dataclass(frozen=True)
class KilledHolder:
    """`kill -9` of the token's holder, five times; a waiting rival goes on each time.

    The victim is stopped first, then its status is read: a stopped process cannot return a token, so a status "holds"
    after the stop is still true at the kill, unless the daemon has taken the token back in between.
    """

    kind: str
    needs: tuple[tuple[str, str], ...]

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        noticed = []
        with context.machine.node(kernel_us=KERNEL_US) as node:
            rival = node.workload(python, "busy", self.kind, "8", hooked=["--name", "rival", "--quota", "0.5:1"])
            rival.hear(context.left(START_SECONDS))
            rival.say("hold")
            for turn in range(ROUNDS):
                name = f"victim-{turn}"
                victim = node.workload(python, "busy", self.kind, "8", hooked=["--name", name, "--quota", "0.5:1"])
                victim.hear(context.left(START_SECONDS))
                victim.say("hold")
                pid = self._stopped_holder(context, node, name)
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda name=name: not node.clients(name), f"{name} is no client after its death")
                noticed.append(time.monotonic() - killed)
                victim.kill()
                self._goes_on(node)
        context.note(noticed_s=noticed)
        return f"{ROUNDS} holders killed, each proved to hold; gone after at most {max(noticed) * 1000:.0f} ms, the rival goes on"

    @staticmethod
    def _stopped_holder(context, node, name):
        """Stops the victim while it holds the token; returns its pid."""
        wait_until(lambda: node.clients(name), f"{name} is a client")
        for _ in range(TRIES):
            context.left(1)
            clients = node.clients(name)
            pid = clients[0]["pid"]
            if not clients[0]["holds_token"]:
                continue
            os.kill(pid, signal.SIGSTOP)
            after = node.clients(name)
            if after and after[0]["holds_token"]:
                return pid
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
        raise Failed(f"{name} was never found to hold the token in {TRIES} tries")

    @staticmethod
    def _goes_on(node):
        """The rival has launched more kernels than before."""
        def launches():
            return node.clients("rival")[0]["launches"]

        before = launches()
        wait_until(lambda: launches() > before, "the rival launches after the kill")


MEASURED = frozenset({"full", "short"})
ALWAYS = frozenset({"full", "short", "ci"})
ROWS = [
    Row("kill -9: driver API", "tenant", KilledHolder("driver", ()), {}, ALWAYS),
    Row("kill -9: torch", "tenant", KilledHolder("torch_matmul", tuple(TORCH.items())), TORCH, MEASURED),
    Row("idle sibling: driver API", "tenant", IdleSibling("driver", ()), {}, MEASURED),
    Row("idle sibling: torch", "tenant", IdleSibling("torch_matmul", tuple(TORCH.items())), TORCH, MEASURED),
]
