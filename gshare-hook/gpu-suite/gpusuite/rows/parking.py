"""Programs whose memory is parked and comes back: outcomes, turns on one device, and the speed of the moves."""

import dataclasses
import os
import shutil
import subprocess
import time

from .. import stats
from ..context import Context, Row
from ..errors import Failed, NotHere, NotInstalled
from .metering import START_SECONDS
from .outcomes import CASE_SECONDS, SAME_EACH_TIME, compare
from .packages import CUPY, JAX, TORCH, TRITON, VLLM

MIB, GIB = 1 << 20, 1 << 30
NAME = "parked"
PARK = ["--park", "--name", NAME]
# Seconds until the daemon must know of movable memory, and for one move.
KNOWN_SECONDS = 5
MOVE_SECONDS = 120
# A simulated link that is slower than the host's own copies, and the bytes of a move on it.
SIMULATED_LINK = 250_000_000
SIMULATED_BYTES = GIB // 4
TURNS = 2
# The least speed of a move beside a plain copy of the same bytes, and of both moves together.
MOVE_BAR = 0.8
BOTH_BAR = 1 / 1.3


def movable(node, name):
    """Bytes of the instance on the device that can move, by `gshare status`."""
    of = [client["parking"] for client in node.clients(name)]
    return sum(parking["bytes"] for parking in of if parking and parking["residence"] == "resident")


def park(context, node, name=NAME):
    """Parks a program; gives the moved bytes and the seconds. The daemon hears of movable memory a moment after it is there."""
    end = time.monotonic() + KNOWN_SECONDS
    while not (size := movable(node, name)) and time.monotonic() < end:
        time.sleep(0.02)
    start = time.monotonic()
    said = node.gshare("daemon", "park", name, timeout=context.left(MOVE_SECONDS))
    return 0 if "already" in said else size, time.monotonic() - start


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a program, parked before and within each step, and of a program that is not, have the same outcome.

    The other program is bare, or has the options `other` of `gshare run`. On a simulated device its account must show the moves.
    """

    case: str
    needs: tuple[tuple[str, str], ...]
    env: tuple[tuple[str, str], ...] = ()
    other: tuple[str, ...] | None = None

    def __call__(self, context: Context) -> str:
        python, moved = context.environment(dict(self.needs)).python, []
        with context.machine.node() as node:
            other = node.workload(python, "parked", self.case, hooked=self.other, env=self._env())
            bare = self._take(context, other, lambda: None)
            program = node.workload(python, "parked", self.case, hooked=PARK, env=self._env())
            parked = self._take(context, program, lambda: moved.append(park(context, node)[0]))
        context.note(moved_bytes=moved)
        work = [answer.get("work") for answer in (bare, parked)]
        if None not in work:
            more = work[1]["copied_bytes"] - work[0]["copied_bytes"]
            # A move is two copies, but freed memory of a pool ends without any.
            if more < sum(moved):
                raise Failed(f"{sum(moved)} bytes were parked, and the device copied {more} bytes more than bare")
            # Moves are copies too, so kernels alone are compared.
            for answer, done in zip((bare, parked), work, strict=True):
                answer["facts"]["kernels"], answer["work"] = done["kernels"], None
        times = sum(size > 0 for size in moved)
        return f"{compare(context, bare, parked, counted=False)}, parked {times} times, at most {max(moved) >> 20} MiB"

    def _env(self):
        return {**SAME_EACH_TIME, **dict(self.env)}

    @staticmethod
    def _take(context, program, order):
        """Lets a program take its steps, with an order before each, and one when its memory is back; gives its answer."""
        while "case" not in (heard := program.hear(context.left(CASE_SECONDS))):
            if "step" in heard:
                order()
                program.say("go")
                order()
        code, _ = program.finish(context.left(30))
        if "error" not in heard and code != 0:
            raise Failed(program.describe("did not end well"))
        return heard


def in_turns(context: Context):
    """Two programs of 60 % each of a room take turns; a third program holds all other memory of the device.

    Both hold their memory before the first turn, so one of them is in host memory at every turn.
    """
    python = context.environment({}).python
    room = GIB // 2 if context.machine.simulated else 16 * GIB
    size, waits, names = room * 6 // 10, [], ("one", "other")
    # Contexts take memory beside the room, and little of a small one.
    with context.machine.node(context_bytes=MIB) as node:
        rest = str(context.machine.device["total_bytes"] - room)
        node.workload(python, "views", rest, hooked=["--mem", rest]).hear(context.left(START_SECONDS))
        programs = []
        for name in names:
            programs.append(node.workload(python, "parked", "blocks", size, "whole", hooked=["--park", "--name", name]))
            programs[-1].hear(context.left(START_SECONDS))
        for _ in range(TURNS):
            for program in programs:
                program.say("work")
                waits.append(program.hear(context.left(MOVE_SECONDS))["seconds"])
                held = sum(client["memory_bytes"] for name in names for client in node.clients(name))
                if held > room:
                    raise Failed(f"{held} bytes are on the device, and {room} were left for both programs")
        # Now both want the device at once.
        for program in programs:
            program.say("check")
        right = [program.hear(context.left(MOVE_SECONDS))["right"] for program in programs]
        if right != [True, True]:
            raise Failed(f"bytes differ: {right}")
        for program in programs:
            code, _ = program.finish(context.left(30))
            if code != 0:
                raise Failed(program.describe("did not end well"))
    context.note(waits_s=waits)
    return f"two of {size / GIB:.1f} in {room / GIB:.1f} GiB: {len(waits)} turns of at most {max(waits):.1f} s, all bytes right"


def size_of_moves(context):
    """Bytes for a move: 60 GB in the full form, unless the device or the host's memory are too small, and 12 GB in the others."""
    if context.machine.simulated:
        return SIMULATED_BYTES
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = 60_000_000_000 if context.form == "full" else 12_000_000_000
    return min(most, host // 3, context.machine.device["total_bytes"] // 2)


def moves(context: Context):
    """A park, and the first copy after it, which brings all memory back, beside plain page-locked copies of the bytes."""
    python, size = context.environment({}).python, size_of_moves(context)
    speeds, times = {"out": [], "in": [], "both": []}, []
    with context.machine.node(host_bandwidth=SIMULATED_LINK) as node:
        program = node.workload(python, "parked", "blocks", size, hooked=PARK)
        program.hear(context.left(START_SECONDS))

        def ask(word):
            program.say(word)
            return program.hear(context.left(MOVE_SECONDS))

        for _ in range(stats.FEWEST):
            plain = ask("copy")
            moved = {"out": park(context, node)[1], "in": ask("look")["seconds"]}
            plain["both"], moved["both"] = sum(plain.values()), sum(moved.values())
            times.append({"plain": plain, "moved": moved})
            for way, seconds in moved.items():
                speeds[way].append(plain[way] / seconds)
        if not ask("check")["right"]:
            raise Failed("bytes differ after the moves")
    speed = {way: stats.estimate(samples) for way, samples in speeds.items()}
    context.note(bytes=size, times_s=times)
    if not context.machine.simulated:
        for way, bar in (("out", MOVE_BAR), ("in", MOVE_BAR), ("both", BOTH_BAR)):
            stats.check_at_least(f"speed beside a plain copy, {way}", speed[way], bar)
    link = f" on a simulated link of {SIMULATED_LINK / 1e9:g} GB/s" if context.machine.simulated else ""
    parts = ", ".join(f"{way} {seen.text(digits=2)}" for way, seen in speed.items())
    return f"{size / 1e9:.1f} GB: {parts} of the speed of a plain copy{link}"


def checkpoint(context: Context):
    """The driver's checkpoint of a bare process by `cuda-checkpoint`, beside plain copies of the bytes."""
    tool = shutil.which("cuda-checkpoint")
    if tool is None:
        raise NotInstalled("no cuda-checkpoint in the path")
    if context.machine.simulated:
        raise NotHere("a simulated driver has no checkpoints")
    python, size = context.environment({}).python, size_of_moves(context)
    with context.machine.node() as node:
        program = node.workload(python, "parked", "blocks", size)
        program.hear(context.left(START_SECONDS))
        program.say("copy")
        plain, seconds = program.hear(context.left(MOVE_SECONDS)), []
        for _ in ("out", "in"):
            start = time.monotonic()
            argv = [tool, "--toggle", "--pid", str(program.child.pid)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=context.left(MOVE_SECONDS))
            if done.returncode != 0:
                raise NotHere(f"cuda-checkpoint: {(done.stderr or done.stdout).strip()[-200:]}")
            seconds.append(time.monotonic() - start)
        program.say("check")
        if not program.hear(context.left(MOVE_SECONDS))["right"]:
            raise Failed("bytes differ after a checkpoint")
    context.note(bytes=size, plain_s=plain, checkpoint_s=seconds)
    speed = [plain[way] / took for way, took in zip(("out", "in"), seconds, strict=True)]
    return f"{size / 1e9:.1f} GB: out {speed[0]:.2f}, in {speed[1]:.2f} of the speed of a plain copy"


MEASURED = frozenset({"full", "short"})
ALWAYS = frozenset({"full", "short", "ci"})


def _steps(name, case, needs, forms=MEASURED, **more):
    return Row(f"parked: {name}", "parking", Steps(case, tuple(needs.items()), **more), needs, forms, alone=False)


ROWS = [
    _steps("driver API", "driver", {}, ALWAYS),
    _steps("cupy", "cupy", CUPY, ALWAYS),
    _steps("torch", "torch", TORCH),
    _steps("torch expandable", "torch", TORCH, env=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
    # With `--park` a pool may keep more freed memory than the driver's own, parked or not.
    _steps("torch cudaMallocAsync", "torch", TORCH, env=(("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),),
           other=("--park", "--name", "other")),
    _steps("triton", "triton", TRITON),
    _steps("jax", "jax", JAX),
    _steps("vllm", "vllm", VLLM),
    Row("parked: in turns", "parking", in_turns, forms=ALWAYS),
    Row("parked: speed", "cost", moves, forms=MEASURED),
    Row("parked: cuda-checkpoint", "cost", checkpoint, forms=MEASURED),
]
