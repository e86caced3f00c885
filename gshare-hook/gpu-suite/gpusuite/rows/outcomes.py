"""Programs whose bare and hooked runs must have the same outcome.

Cases of one script run in one process, bare and hooked, in an order alternating from script to script. An outcome is
the case's answer (shapes, copies read back, errors by name, memory counts), on a simulated device also the kernels, copies and
bytes in the device's account, and on a GPU the values. Kernels of a simulated device compute nothing, so values are not compared
there, and a row says so; a row `values: ...` runs the case there with PyTorch's operators computed, and compares them. A case that fails bare is FAILED even where it fails hooked alike: two equal failures show nothing.
"""

import dataclasses

from ..context import Context, Row
from ..errors import Failed, NotHere, OutOfTime
from ..node import COMPUTE
from .packages import CUDA12, CUPY, JAX, NCCL, NUMBA, NVRTC, TORCH, TRANSFORMERS, TRITON, VLLM

# Metered and counted, though alone: the hook stops metering a client of the whole device without a limit after one look.
METERED = ["--quota", "0.5:1", "--mem", "16GiB"]
# Settings which make a GPU's bare runs equal to each other.
SAME_EACH_TIME = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Keys of a profile with one MIG device, which has room for METERED.
CUT = {"mig": '[{ name = "1g.20gb", sms = 8, memory_bytes = 21474836480 }]', "cut": '["1g.20gb"]'}
CASE_SECONDS = 240


@dataclasses.dataclass(frozen=True)
class Batch:
    """Cases for one process: one script, one set of packages, one environment, one node."""

    script: str
    needs: tuple[tuple[str, str], ...]
    env: tuple[tuple[str, str], ...] = ()
    gpus: int = 1
    driver: str | None = None
    # On a simulated device, with the values of PyTorch's operators.
    computes: bool = False
    # On a MIG device of a simulated GPU.
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case of a batch; `check` of its row. `counted` is off where the number of kernels depends on timing."""

    batch: Batch
    case: str
    counted: bool = True

    def __call__(self, context: Context) -> str:
        if self.batch.computes and not context.machine.simulated:
            raise NotHere("on a GPU the row without `values:` compares them")
        if self.batch not in context.batches:
            context.batches[self.batch] = run_batch(context, self.batch)
        bare, hooked = (side.get(self.case) for side in context.batches[self.batch])
        if bare is None or hooked is None:
            raise OutOfTime("the time of the whole run was spent within its script")
        return compare(context, bare, hooked, self.counted, self.batch.computes)


def run_batch(context, batch):
    """Runs all chosen cases of a batch bare and hooked; gives two dictionaries from case to answer."""
    cases = [row.check.case for row in context.rows if isinstance(row.check, Outcome) and row.check.batch == batch]
    environment = context.environment(dict(batch.needs))
    sides = {}
    ways = ["bare", "hooked"] if len(context.batches) % 2 == 0 else ["hooked", "bare"]
    with context.machine.node(gpus=batch.gpus, driver=batch.driver, **(CUT if batch.cut else {})) as node:
        for way in ways:
            hooked = [*METERED, *(["--compute"] if batch.computes else [])] if way == "hooked" else None
            sides[way] = run_cases(context, node, environment, batch, cases, hooked)
    return sides["bare"], sides["hooked"]


def run_cases(context, node, environment, batch, cases, hooked):
    """Answers by case. If the process ends within a case, the rest run in a new process."""
    answers, left = {}, list(cases)
    while left:
        try:
            limit = context.left(CASE_SECONDS + 30 * len(left))
        except OutOfTime:
            break
        # The hooked program has these from the option.
        more = COMPUTE if batch.computes and hooked is None else {}
        env = {**SAME_EACH_TIME, **dict(batch.env), **more}
        program = node.workload(environment.python, batch.script, *left, hooked=hooked, env=env)
        with program:
            code, heard = program.finish(limit)
            begun = None
            for answer in heard:
                if "begin" in answer:
                    begun = answer["begin"]
                else:
                    answers[answer["case"]] = answer
            missing = [case for case in left if case not in answers]
            if not missing:
                if code != 0:
                    # The cases passed but the process ended badly: none of its cases counts.
                    words = program.describe("did not end well after its last case")
                    answers |= {case: {"case": case, "error": words} for case in left}
                return answers
            culprit = begun if begun in missing else missing[0]
            what = "took too long" if code is None else "ended within the case"
            answers[culprit] = {"case": culprit, "error": program.describe(what)}
            left = [case for case in missing if case != culprit]
    return answers


def compare(context, bare, hooked, counted, computes=False):
    """The figure of a case with equal outcomes; `Failed` names the difference."""
    errors = {way: answer["error"] for way, answer in (("bare", bare), ("hooked", hooked)) if "error" in answer}
    if errors:
        raise Failed("; ".join(f"{way}: {text}" for way, text in errors.items()))
    context.note(bare_seconds=bare["seconds"], hooked_seconds=hooked["seconds"], work=bare["work"], facts=bare["facts"])
    for name in bare["facts"].keys() | hooked["facts"].keys():
        seen = bare["facts"].get(name), hooked["facts"].get(name)
        if seen[0] != seen[1]:
            raise Failed(f"{name} differs: {seen[0]} bare, {seen[1]} hooked")
        if name in ("copied", "pinned") and seen[0] is not True:
            raise Failed(f"bytes copied to the device did not come back unchanged ({name})")
    parts = [f"{len(bare['facts'])} facts equal"]
    work = bare["work"], hooked["work"]
    if None not in work:
        if counted and work[0] != work[1]:
            raise Failed(f"the device counted {work[0]} bare and {work[1]} hooked")
        counts = f"{work[0]['kernels']} kernels, {work[0]['copies']} copies"
        parts.append(counts if counted else f"{counts} (not compared: their number depends on timing)")
    if bare["values"]:
        if context.machine.simulated and not computes:
            parts.append("values not compared: kernels compute nothing")
        elif bare["values"] != hooked["values"]:
            raise Failed("values differ")
        else:
            parts.append("values equal")
    return ", ".join(parts)


def _rows(framework, needs, script, cases, forms=("full", "short"), env=None, counted=True, alone=False, **of_batch):
    batch = Batch(script, tuple(needs.items()), tuple((env or {}).items()), **of_batch)
    return [
        Row(name, "outcome", Outcome(batch, case, counted), needs, frozenset(forms), framework, alone)
        for name, case in cases.items()
    ]


SMALL = ("full", "short", "ci")
CUPY_LIBRARIES = {**CUPY, "nvidia-cublas-cu12|nvidia-cublas": "", "nvidia-cufft-cu12|nvidia-cufft": ""}
# One compiler process, and nothing from an earlier run: the same work bare and hooked.
COMPILE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

ROWS = [
    *_rows("nvidia-cuda-runtime", {"nvidia-cuda-runtime": "13"}, "cases_driver", {"cudart 13": "cudart_13"}, SMALL),
    *_rows("nvidia-cuda-runtime", {"nvidia-cuda-runtime": "13"}, "cases_driver", {"cudart 13, MIG": "cudart_13"}, SMALL, cut=True),
    *_rows("nvidia-cuda-runtime-cu12", CUDA12, "cases_driver", {"cudart 12": "cudart_12"}, SMALL),
    *_rows("nvidia-cuda-runtime-cu12", CUDA12, "cases_driver", {"cudart 12, driver 12.8": "cudart_12"}, SMALL, driver="12.8"),
    *_rows("cuda-bindings", {"cuda-bindings": "13", **NVRTC}, "cases_driver", {"cuda.bindings 13": "cuda_bindings"}, SMALL),
    *_rows("cuda-bindings", {"cuda-bindings": "12", **CUDA12, "numpy": ""}, "cases_driver",
           {"cuda.bindings 12": "cuda_bindings"}, SMALL),
    *_rows("cuda-core", {"cuda-core": "", **NVRTC}, "cases_driver", {"cuda.core": "cuda_core"}, SMALL),
    *_rows("numba-cuda", NUMBA, "cases_driver", {"numba": "numba"}, SMALL),
    *_rows("warp-lang", {"warp-lang": "", "numpy": ""}, "cases_driver", {"warp": "warp"}, SMALL),
    *_rows("tinygrad", {"tinygrad": "", **NVRTC}, "cases_driver", {"tinygrad": "tinygrad"}, SMALL),
    # Counts the processes on the device.
    *_rows("nvidia-ml-py", {"nvidia-ml-py": ""}, "cases_driver", {"nvidia-ml-py": "nvml"}, SMALL, alone=True),
    *_rows("cupy-cuda12x|cupy-cuda13x", CUPY, "cases_cupy",
           {"cupy elementwise": "elementwise", "cupy RawKernel": "raw_kernel"}, SMALL),
    *_rows("cupy-cuda12x|cupy-cuda13x", CUPY_LIBRARIES, "cases_cupy", {"cupy matmul": "matmul", "cupy fft": "fft"}),
    *_rows("torch", TORCH, "cases_torch", {
        "torch eager": "eager", "torch matmul": "matmul", "torch conv": "conv", "torch LSTM": "lstm", "torch SDPA": "sdpa",
        "torch FFT": "fft", "torch linalg": "linalg", "torch training": "training", "torch graph": "graph",
        "torch allocator": "allocator",
    }),
    *_rows("torch", TRITON, "cases_torch", {
        "values: torch eager": "eager", "values: torch matmul": "matmul", "values: torch conv": "conv", "values: torch LSTM": "lstm",
        "values: torch SDPA": "sdpa", "values: torch FFT": "fft", "values: torch linalg": "linalg",
        "values: torch training": "training", "values: torch graph": "graph", "values: torch allocator": "allocator",
        "values: triton": "triton_kernel",
    }, computes=True),
    *_rows("torch", TRITON, "cases_torch",
           {"values: torch compile": "compiled", "values: torch compile + graphs": "compiled_graphs"}, env=COMPILE, computes=True),
    *_rows("triton", TRITON, "cases_torch", {"triton": "triton_kernel"}),
    *_rows("torch", TRITON, "cases_torch",
           {"torch compile": "compiled", "torch compile + graphs": "compiled_graphs"}, env=COMPILE),
    *_rows("torch", TORCH, "cases_torch", {"torch expandable segments": "allocator"},
           env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    *_rows("torch", TORCH, "cases_torch", {"torch cudaMallocAsync": "allocator"},
           env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    *_rows("torch", TORCH, "cases_torch_processes", {
        "torch DataLoader fork": "loader_fork", "torch DataLoader spawn": "loader_spawn", "torch after fork": "after_fork",
        "torch IPC": "ipc",
    }),
    *_rows("nvidia-nccl-cu13", NCCL, "cases_torch_processes", {"NCCL world 1": "nccl_1"}),
    *_rows("nvidia-nccl-cu13", NCCL, "cases_torch_processes", {"NCCL world 2": "nccl_2"}, gpus=2),
    *_rows("nvidia-nccl-cu13", NCCL, "cases_torch_processes",
           {"values: NCCL world 2": "nccl_2", "values: NCCL DDP world 2": "ddp_2"}, gpus=2, computes=True),
    *_rows("transformers", TRANSFORMERS, "cases_transformers", {
        "transformers decoding": "growing_cache", "transformers static cache": "static_cache", "transformers training": "trained",
    }),
    *_rows("transformers", TRANSFORMERS, "cases_transformers", {
        "values: transformers decoding": "growing_cache", "values: transformers static cache": "static_cache",
        "values: transformers training": "trained",
    }, computes=True),
    *_rows("jax", JAX, "cases_jax", {"jax jit": "jit", "jax conv": "conv"}),
    *_rows("vllm", VLLM, "cases_vllm", {"vLLM eager": "eager"}, counted=False),
    *_rows("vllm", VLLM, "cases_vllm", {"vLLM compile + graphs": "compiled"}, counted=False),
]
