"""A limit of 2 GiB holds from both sides, and every view of memory agrees, to the byte."""

import dataclasses
import time

from ..context import Context, Row
from ..errors import Failed
from .packages import CUPY, JAX, TORCH, VLLM

LIMIT = 2 << 30
MIB = 1 << 20
BLOCK = 64 * MIB
# JAX's own share of the visible memory, from its documentation of GPU memory allocation.
JAX_PART = 0.75
START_SECONDS = 180
# Seconds until the daemon must know of an allocation.
STATUS_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class Filled:
    """Blocks of 64 MiB until the error; at most `slack` bytes of the limit may be left.

    The slack is one block without room and the allocator's own granularity.
    """

    kind: str
    needs: tuple[tuple[str, str], ...]
    slack: int = BLOCK
    env: tuple[tuple[str, str], ...] = ()

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        with context.machine.node() as node:
            run = node.workload(python, "fill", self.kind, BLOCK, hooked=["--mem", str(LIMIT)], env=dict(self.env))
            seen = run.hear(context.left(START_SECONDS))
            code, _ = run.finish(context.left(30))
            if code != 0:
                raise Failed(run.describe("did not end well"))
        context.note(seen=seen)
        same_view(seen["driver"], seen["nvml"])
        if seen["driver"]["total"] != LIMIT or seen.get("framework_total", LIMIT) != LIMIT:
            raise Failed(f"total memory reads {seen['driver']['total']} of {LIMIT}")
        most = seen.get("pool", LIMIT)
        if "pool" in seen and not LIMIT * JAX_PART - 2 * MIB <= most <= LIMIT * JAX_PART:
            raise Failed(f"JAX's pool has {most} bytes of {LIMIT}: not {JAX_PART:.0%}")
        if seen["refused"] == "nothing":
            raise Failed(f"{seen['allocated']} bytes were allocated of {LIMIT}, and nothing was refused")
        if not most - self.slack <= seen["allocated"] <= most:
            raise Failed(f"out of memory after {seen['allocated']} bytes: not within {self.slack} of {most}")
        if seen["driver"]["used"] < seen["allocated"]:
            raise Failed(f"{seen['allocated']} bytes are held and {seen['driver']['used']} are shown as used")
        if not seen["again"]:
            raise Failed("after the memory was given back, nothing can be allocated")
        of = f"{seen['allocated'] / MIB:.0f} of {most / MIB:.0f} MiB"
        return f"out of memory at {of}, all views equal: {seen['driver']['used']} of {LIMIT} bytes used"


@dataclasses.dataclass(frozen=True)
class Cache:
    """vLLM sizes its cache by the tenant's view: its part of the limit, less weights and activations, and not of the card."""

    needs: tuple[tuple[str, str], ...]
    limit: int = 16 << 30

    def __call__(self, context: Context) -> str:
        python = context.environment(dict(self.needs)).python
        with context.machine.node() as node:
            run = node.workload(python, "cases_vllm", "kv", hooked=["--mem", str(self.limit)])
            seen = run.hear(context.left(START_SECONDS))
        context.note(seen=seen)
        most = seen["utilisation"] * self.limit
        text = f"cache of {seen['cache'] / MIB:.0f} MiB, {seen['utilisation']:.0%} of {self.limit / MIB:.0f} MiB"
        # A model of two layers needs little beside: a tenth of its part is a generous allowance.
        if not 0.9 * most <= seen["cache"] <= most:
            raise Failed(text)
        return text


def same_view(driver, nvml):
    for name in ("total", "free", "used"):
        if driver[name] != nvml[name]:
            raise Failed(f"{name}: the driver says {driver[name]}, NVML {nvml[name]}")


@dataclasses.dataclass(frozen=True)
class Views:
    """Processes of one run hold sizes that add up; the driver, NVML, its list of processes and PyTorch show each of them the sum.

    With `status` the row checks the figures of `gshare status` meanwhile.
    """

    sizes: tuple[int, ...]
    torch: bool = False
    status: bool = False

    def __call__(self, context: Context) -> str:
        python = context.environment({"torch": ""} if self.torch else {}).python
        options = [*map(str, self.sizes), *(["--torch"] if self.torch else [])]
        with context.machine.node() as node:
            run = node.workload(python, "views", *options, hooked=["--mem", str(LIMIT), "--name", "views"])
            views = run.hear(context.left(START_SECONDS))["views"]
            context.note(views=views)
            if self.status:
                self._check_status(node, {view["pid"]: view["held"] for view in views})
        if not self.status:
            self._check(views)
        names = "status" if self.status else "driver, NVML, its list" + (", torch" if self.torch else "")
        return f"{len(views)} processes: {names}: {sum(self.sizes)} bytes used"

    def _check(self, views):
        held = sum(self.sizes)
        for view in views:
            for name in ("driver", "nvml", "torch"):
                if name in view and view[name] != {"total": LIMIT, "free": LIMIT - held, "used": held}:
                    raise Failed(f"one of {len(views)} processes: {name} shows {view[name]}; {held} of {LIMIT} are used")
            listed = view["processes"]
            if sorted(listed.values()) != sorted(self.sizes):
                raise Failed(f"one of {len(views)} processes: NVML's list shows {listed}; held are {list(self.sizes)}")

    def _check_status(self, node, held):
        """Bytes by process as `gshare status` has them; the daemon hears of them a moment later."""
        end = time.monotonic() + STATUS_SECONDS
        while (shown := {client["pid"]: client["memory_bytes"] for client in node.clients("views")}) != held:
            if time.monotonic() > end:
                raise Failed(f"status shows {shown}; held are {held}")
            time.sleep(0.05)


MEASURED = frozenset({"full", "short"})
ALWAYS = frozenset({"full", "short", "ci"})
ONE, THREE = (300 * MIB,), (300 * MIB, 200 * MIB + 512, 50 * MIB)
# PyTorch takes whole blocks of 2 MiB.
TORCH_ONE, TORCH_THREE = (256 * MIB,), (256 * MIB, 128 * MIB, 64 * MIB)


def _filled(name, kind, needs, forms=MEASURED, slack=BLOCK, env=()):
    return Row(f"2 GiB: {name}", "memory", Filled(kind, tuple(needs.items()), slack, tuple(env)), needs, forms, alone=False)


ROWS = [
    _filled("driver API", "driver", {}, ALWAYS, slack=0),
    _filled("torch native", "torch", TORCH, slack=0),
    _filled("torch expandable", "torch", TORCH, env=[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")]),
    _filled("torch cudaMallocAsync", "torch", TORCH, env=[("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")]),
    _filled("cupy", "cupy", CUPY, slack=0),
    _filled("jax preallocation", "jax", JAX),
    Row("vLLM cache", "memory", Cache(tuple(VLLM.items())), VLLM, MEASURED, alone=False),
    Row("views: 1 process", "memory", Views(ONE), {}, ALWAYS, alone=False),
    Row("views: 3 processes", "memory", Views(THREE), {}, MEASURED, alone=False),
    Row("views: 1 process, torch", "memory", Views(TORCH_ONE, torch=True), TORCH, MEASURED, alone=False),
    Row("views: 3 processes, torch", "memory", Views(TORCH_THREE, torch=True), TORCH, MEASURED, alone=False),
    Row("status: 1 process", "memory", Views(ONE, status=True), {}, MEASURED, alone=False),
    Row("status: 3 processes", "memory", Views(THREE, status=True), {}, MEASURED, alone=False),
    Row("status: 3 processes, torch", "memory", Views(TORCH_THREE, torch=True, status=True), TORCH, MEASURED, alone=False),
]
