#!/usr/bin/env python3
"""PyTorch's own database of operators on a simulated GPU that computes, beside the CPU: a table, and each difference by name and reason.

    gshare run --sim --compute -- python3 op_db.py --samples 5
    gshare run --sim --compute -- python3 op_db.py --samples 1 --only 'nn.functional.*' --dtypes float32

A case is one operator with one type and one direction (forward, in place, with
out=, backward, double backward). Both sides get the same inputs. A case whose
result differs between two runs on the CPU, by the seed, is random and not compared, nor is one that the CPU itself cannot do.
Operators run in child processes, so one that ends its process costs itself only. Needs torch, numpy, pytest and expecttest.
"""

import argparse
import collections
import fnmatch
import json
import subprocess
import sys
import warnings

WAYS = ("forward", "in place", "out", "backward", "double")
GRADIENTS = ("backward", "double")
# Their content is undefined.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Differences of sums in another order.
CLOSE = {"float32": (1e-4, 1e-4), "bfloat16": (2e-2, 2e-2), "float64": (1e-7, 1e-7), "float16": (5e-3, 5e-3), "complex64": (1e-4, 1e-4)}


def to_host(value):
    """The same inputs on the CPU. A view keeps the bytes around it, which some operators reach."""
    import torch
    from torch.utils import _pytree

    def leaf(each):
        if isinstance(each, torch.Tensor):
            here = each.detach().cpu()
            if each.layout is torch.strided and each.untyped_storage().nbytes() > each.numel() * each.itemsize:
                storage = each.untyped_storage().cpu()
                here = torch.empty(0, dtype=each.dtype).set_(storage, each.storage_offset(), each.size(), each.stride())
            return here.requires_grad_(each.requires_grad)
        return torch.device("cpu") if str(each) in ("cuda", "cuda:0") else each

    return _pytree.tree_map(leaf, value)


def tensors(value):
    import torch
    from torch.utils import _pytree

    return [each for each in _pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def results(info, inputs, way, filled):
    """The tensors that a direction gives; None where it has none."""
    import torch

    leaf, args, kwargs = inputs
    operator = info.op
    if way == "in place":
        into = leaf.clone()
        return [*tensors(info.inplace_variant(into, *args, **kwargs)), into]
    if way == "out":
        made = operator(leaf, *args, **kwargs)
        if not isinstance(made, (torch.Tensor, tuple)) or not all(isinstance(each, torch.Tensor) for each in made):
            return None
        # One of the right size, and one that the operator has to enlarge. The seed fills the first one, because `ihfftn` over one
        # dimension does not write its output on the CPU.
        filled_like = lambda each: torch.full_like(each, torch.initial_seed() % 2)
        fits = tuple(map(filled_like, made)) if isinstance(made, tuple) else filled_like(made)
        grows = tuple(each.new_empty(0) for each in made) if isinstance(made, tuple) else made.new_empty(0)
        return [each for out in (fits, grows) for each in [*tensors(operator(leaf, *args, **kwargs, out=out)), *tensors(out)]]
    out = operator(leaf, *args, **kwargs)
    process = filled.output_process_fn_grad if filled else None
    if way == "forward":
        return tensors(out)
    if process:
        out = process(out)
    outs = [each for each in tensors(out) if each.requires_grad]
    inputs = [each for each in tensors((leaf, args, kwargs)) if each.requires_grad]
    if not outs or not inputs:
        return None
    given = [torch.cos(torch.arange(each.numel(), dtype=torch.float64)).reshape(each.shape).to(each.device, each.dtype) for each in outs]
    again = way == "double"
    if again:
        given = [each.requires_grad_() for each in given]
    grads = torch.autograd.grad(outs, inputs, given, create_graph=again, allow_unused=True)
    if not again:
        return [each for each in grads if each is not None]
    outs = [each for each in grads if each is not None and each.requires_grad]
    if not outs:
        return None
    ones = [torch.sin(torch.arange(each.numel(), dtype=torch.float64)).reshape(each.shape).to(each.device, each.dtype) for each in outs]
    return [each for each in torch.autograd.grad(outs, inputs + given, ones, allow_unused=True) if each is not None]


def seeded(seed, call, *args):
    """Gives (result, None) or (None, error). The database's operators set a seed of their own, which is moved by this one."""
    import torch

    real = torch.manual_seed
    real(seed)
    torch.manual_seed = lambda own: real(own + seed)
    try:
        return call(*args), None
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
    finally:
        torch.manual_seed = real


def equal(ours, theirs, dtype):
    import torch

    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    atol, rtol = CLOSE.get(dtype, (0, 0))
    for one, other in zip(ours, theirs):
        try:
            torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=rtol, atol=atol, equal_nan=True)
        except Exception as error:
            return " ".join(str(error).split())[:160]
    return None


def case(info, dtype, way, count):
    """("equal" | "random" | "no cpu" | "none" | "different" | "error", reason)"""
    import itertools
    import torch

    samples, error = seeded(1, lambda: list(itertools.islice(info.sample_inputs("cuda", dtype, requires_grad=way in GRADIENTS), count)))
    if error:
        return "no samples", error
    name, seen = str(dtype).split(".")[1], set()
    for sample in samples:
        if way == "in place" and sample.broadcasts_input:
            continue
        there = (sample.input, sample.args, sample.kwargs)
        here = to_host(there)
        theirs, error = seeded(2, results, info, here, way, sample)
        if error:
            seen.add("no cpu")
            continue
        if theirs is None:
            continue
        theirs = [each.detach().clone() if each.layout is torch.strided else each.detach() for each in theirs]
        # Before the device's run, which may write to its inputs.
        again, _ = seeded(3, results, info, to_host(there), way, sample)
        random = again is None or equal(again, theirs, name)
        ours, error = seeded(2, results, info, there, way, sample)
        if error:
            # PyTorch itself has no such operator for CUDA.
            return ("not on CUDA", "") if "CUDA' backend" in error else ("error", error)
        if info.name in UNDEFINED or random:
            seen.add("random")
            continue
        differ = equal(ours, theirs, name)
        if differ:
            return "different", differ
        seen.add("equal")
    return next((each for each in ("equal", "random", "no cpu") if each in seen), "none"), ""


def child(arguments):
    """Cases by line from standard input, answers by line."""
    warnings.simplefilter("ignore")
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    known = {(info.name, info.variant_test_name): info for info in op_db}
    for line in sys.stdin:
        name, variant, dtype, way = json.loads(line)
        info = known[name, variant]
        print(json.dumps({"begin": True}), flush=True)
        print(json.dumps({"end": case(info, getattr(torch, dtype), way, arguments.samples)}), flush=True)


def cases(arguments):
    """Asked of a child, since this process must not load torch: names of operators, types and directions."""
    text = (
        "import json, torch\nfrom torch.testing._internal.common_methods_invocations import op_db\n"
        "for o in op_db:\n"
        "    print(json.dumps([o.name, o.variant_test_name, [str(d)[6:] for d in o.dtypes], "
        "[str(d)[6:] for d in o.backward_dtypes], o.supports_autograd, o.supports_gradgrad, o.supports_out, o.inplace_variant is not None]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", text], stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        name, variant, dtypes, backward, grad, gradgrad, out, in_place = json.loads(line)
        if not fnmatch.fnmatch(name, arguments.only):
            continue
        for way in arguments.ways.split(","):
            for dtype in arguments.dtypes.split(","):
                can = {"forward": True, "in place": in_place, "out": out, "backward": grad, "double": grad and gradgrad}[way]
                if can and dtype in (backward if way in GRADIENTS else dtypes) and not (way in GRADIENTS and "int" in dtype):
                    yield [name, variant, dtype, way]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5, help="of each operator and type [default: 5]")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="operators by name [default: *]")
    parser.add_argument("--dtypes", default="float32,bfloat16,int64")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=120, help="the longest case")
    parser.add_argument("--json", metavar="FILE", help="all answers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    import threading

    argv = [sys.executable, __file__, "--child", "--samples", str(arguments.samples)]
    program, answers, quiet = None, [], 0
    for asked in cases(arguments):
        if program is None:
            program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        program.stdin.write(json.dumps(asked) + "\n")
        program.stdin.flush()
        timer = threading.Timer(arguments.seconds, program.kill)
        timer.start()
        answer = None
        for line in program.stdout:
            if line.startswith('{"end"'):
                answer = json.loads(line)["end"]
                break
        timer.cancel()
        if answer is None:
            answer = ["error", f"its process ended with {program.wait()}"]
            program = None
        answers.append((*asked, *answer))
    if program:
        program.stdin.close()
        program.wait()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(answers, file, indent=0)
    counts = collections.defaultdict(collections.Counter)
    for _, _, dtype, way, answer, _ in answers:
        counts[way, dtype][answer] += 1
    print("| direction | type | equal | different | error | of comparable | random | not on the CPU or not on CUDA | no result |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for (way, dtype), by in counts.items():
        comparable = by["equal"] + by["different"] + by["error"]
        share = f"{100 * by['equal'] / comparable:.1f} %" if comparable else "-"
        print(f"| {way} | {dtype} | {by['equal']} | {by['different']} | {by['error']} | {share} | {by['random']} | {by['no cpu'] + by['not on CUDA']} "
              f"| {by['none'] + by['no samples']} |")
    print()
    for name, variant, dtype, way, answer, reason in answers:
        if answer in ("different", "error", "no samples"):
            print(f"{name}{'.' if variant else ''}{variant} {dtype} {way}: {answer}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
