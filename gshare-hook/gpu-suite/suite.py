#!/usr/bin/env python3
"""Runs unmodified GPU programs bare and under gshare, compares them, and prints one table.

    cargo build --release -p gshare-cli -p gshare-hook -p gshare-fake-cuda -p gshare-examples
    python3 gshare-hook/gpu-suite/suite.py [--bin target/release] [--only ROW ...] [--json]

For a machine with a GPU. What a row needs and is not installed is reported as skipped, never as passed; a figure beyond its
bar (shares within 2 points, at most 1 % of throughput lost) as MISSED, and wrong outputs as FAILED. With `--sim`
the rows that need no framework run on the simulated device, to check the suite itself.
The card's settings are left as they are. Only the standard library is used here.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKLOADS = HERE / "workloads"
POINTS = 0.02
LOSS = 0.01
# Metered, and alone on the device: half of the time is guaranteed, all of it may be used, and memory is counted. (A client
# with the whole device and no memory limit is let go after one look: that would measure nothing.)
METERED = ["--quota", "0.5:1", "--mem", "8GiB"]
# What else makes two bare runs differ.
SAME_EACH_TIME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}


class Skip(Exception):
    """A row that cannot be shown here, with the reason."""


class Missed(Exception):
    """A row whose outputs are right and whose figure is beyond its bar."""


class Suite:
    def __init__(self, args):
        self.args = args
        self.bin = pathlib.Path(args.bin).resolve()
        self.gshare = str(self.bin / "gshare")
        self.rows = []

    # -- running things ------------------------------------------------------------------------------------------

    def command(self, argv, hooked=None, env=None):
        """The command line and environment of a program, bare (`hooked` is None) or under `gshare run`."""
        env = {**os.environ, **(env or {})}
        if hooked is None:
            return argv, env
        sim = ["--sim"] if self.args.sim else []
        return [self.gshare, "run", *sim, *hooked, "--", *argv], env

    def run(self, argv, hooked=None, env=None, timeout=240):
        argv, env = self.command(argv, hooked, env)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout)
        return done

    def workload(self, name, *options, hooked=None, env=None, timeout=240):
        """Runs a workload script; gives the JSON object that it prints last."""
        done = self.run([sys.executable, str(WORKLOADS / f"{name}.py"), *options], hooked, env, timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{name} exited with {done.returncode}: {done.stderr.strip()[-400:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def needs(self, *modules):
        if self.args.sim:
            raise Skip("needs a GPU")
        for module in modules:
            probe = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
            if probe.returncode != 0:
                raise Skip(f"no {module}")

    def row(self, name, check):
        if self.args.only and name not in self.args.only:
            return
        start = time.monotonic()
        try:
            result, figure = "ok", check()
        except Skip as reason:
            result, figure = "skipped", str(reason)
        except Missed as reason:
            result, figure = "MISSED", str(reason)
        except (RuntimeError, AssertionError, KeyError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            result, figure = "FAILED", f"{type(error).__name__}: {error}"
        self.rows.append({"row": name, "result": result, "figure": figure, "seconds": round(time.monotonic() - start, 1)})
        print(f"{name:24} {result:8} {figure}", file=sys.stderr, flush=True)

    # -- rows ----------------------------------------------------------------------------------------------------

    def device(self):
        if self.args.sim:
            return "simulated device"
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True,
        )
        assert done.returncode == 0, "nvidia-smi finds no GPU"
        return done.stdout.strip().replace("\n", "; ")

    def demo(self, *options):
        done = subprocess.run(
            [self.gshare, "demo", "--json", "--seconds", str(self.args.seconds), *options],
            capture_output=True, text=True, timeout=600,
        )
        assert done.returncode == 0, done.stderr.strip()[-400:]
        report = json.loads(done.stdout)
        expected = "simulated" if self.args.sim else "real"
        assert report["device"] == expected, f"ran on a {report['device']} device"
        return report["phases"]

    def shares(self):
        clients = self.demo()[0]["clients"]
        off = max(abs(client["measured"] - client["limit"]) for client in clients)
        text = ", ".join(f"{client['limit']:.2f} -> {client['measured']:.3f}" for client in clients)
        if off > POINTS:
            raise Missed(f"{text}: off by {off * 100:.1f} points")
        return text

    def caps(self):
        clients = [client for phase in self.demo("--caps") for client in phase["clients"]]
        off = max(abs(client["measured"] - client["limit"]) for client in clients)
        if off > POINTS:
            raise Missed(f"off by {off * 100:.1f} points")
        return f"{len(clients)} caps, off by at most {off * 100:.2f} points"

    def launch_cost(self):
        with tempfile.TemporaryDirectory() as folder:
            program = os.environ.get("GSHARE_LAUNCH_COST") or f"{folder}/launch_cost"
            if not os.path.exists(program):
                built = subprocess.run(["gcc", "-O2", "-o", program, str(HERE / "launch_cost.c"), "-ldl"],
                                       capture_output=True, text=True)
                if built.returncode != 0:
                    raise Skip("no gcc and no GSHARE_LAUNCH_COST")
            def ns(hooked, env=None):
                done = self.run([program], hooked, env)
                assert done.returncode == 0, done.stderr.strip()[-300:]
                return float(done.stdout.splitlines()[-1])

            # Bare is without the hook in the process at all; the simulated driver is put in the path by hand.
            env = {}
            if self.args.sim:
                os.symlink(self.bin / "libfake_cuda.so", f"{folder}/libcuda.so.1")
                env = {"LD_LIBRARY_PATH": folder, "GSHARE_SIM_DEVICE": f"{folder}/device"}
            bare = statistics.median(ns(None, env) for _ in range(5))
            hooked = statistics.median(ns(["--quota", "0.9:1"]) for _ in range(5))
        return f"bare {bare:.1f} ns, hooked {hooked:.1f} ns: {hooked - bare:+.1f} ns a launch"

    def same_output(self, name, *options, modules=("torch",), env=None):
        """Bare and metered runs, in turns, give the same digest; what throughput is lost is the figure."""

        def check():
            self.needs(*modules)
            bare, metered = [], []
            for _ in range(self.args.repeats):
                for runs, hooked in ((bare, None), (metered, METERED)):
                    runs.append(self.workload(name, *options, hooked=hooked, env={**SAME_EACH_TIME, **(env or {})}))
            digests = {run["digest"] for run in bare}
            seconds = [statistics.median(run["seconds"] for run in runs) for runs in (bare, metered)]
            loss = 1 - seconds[0] / seconds[1]
            if len(digests) > 1:
                output = "bare runs differ among themselves: outputs not compared"
            else:
                assert all(run["digest"] in digests for run in metered), f"outputs differ: {bare} {metered}"
                output = "same output"
            figure = f"{output}; throughput loss {loss * 100:+.2f} % ({seconds[0]:.3f} s bare)"
            if loss > LOSS:
                raise Missed(figure)
            return figure

        return check

    def plain_client(self, argv):
        """A driver-API program of its own, capped at 40 % and 256 MiB: it is metered and it is refused memory."""

        def check():
            done = self.run([*argv, str(self.args.seconds)], ["--quota", "0.4", "--mem", "256MiB"])
            assert done.returncode == 0, done.stderr.strip()[-400:]
            seen = json.loads(done.stdout.strip().splitlines()[-1])
            assert seen["total_bytes"] == 256 << 20, f"total memory reads {seen['total_bytes']}"
            assert seen["out_of_memory"] and seen["allocated_bytes"] <= 256 << 20, seen
            share = seen["launches_per_s"] / 1000
            if abs(share - 0.4) > POINTS:
                raise Missed(f"{share:.3f} of the time instead of 0.400")
            return f"0.40 -> {share:.3f}; out of memory after {seen['allocated_bytes'] >> 20} MiB of 256"

        return check

    def cuda_bindings(self):
        probe = subprocess.run([sys.executable, "-c", "import cuda.bindings"], capture_output=True)
        if probe.returncode != 0:
            raise Skip("no cuda-bindings")
        return self.plain_client([sys.executable, str(WORKLOADS / "cuda_bindings.py")])()

    def cudarc(self):
        program = self.bin / "cuda_client"
        if not program.exists():
            raise Skip("not built: cargo build --release -p gshare-examples")
        return self.plain_client([str(program)])()

    def memory_limit(self):
        self.needs("torch")
        seen = self.workload("torch_memory", hooked=["--mem", "2GiB"])
        assert seen["oom"], "no out-of-memory error at 2 GiB"
        assert seen["total"] == 2 << 30, f"total memory reads {seen['total']}"
        assert seen["allocated"] <= 2 << 30
        return f"OOM after {seen['allocated'] / 2**20:.0f} MiB of 2048"

    def two_tenants(self):
        self.needs("torch")
        argv = [sys.executable, str(WORKLOADS / "torch_busy.py"), str(self.args.seconds)]
        alone = self.workload("torch_busy", str(self.args.seconds))["steps"]
        running = []
        for name, quota in (("suite-30", "0.3:0.3"), ("suite-70", "0.7:0.7")):
            command, env = self.command(argv, ["--name", name, "--quota", quota])
            running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        steps = [json.loads(child.communicate(timeout=240)[0].strip().splitlines()[-1])["steps"] for child in running]
        shares = [count / alone for count in steps]
        text = f"30:70 -> {shares[0]:.3f} : {shares[1]:.3f} of the steps alone"
        if max(abs(shares[0] - 0.3), abs(shares[1] - 0.7)) > POINTS:
            raise Missed(text)
        return text

    def kill_a_holder(self):
        self.needs("torch")
        argv = [sys.executable, str(WORKLOADS / "torch_busy.py"), "600"]
        for _ in range(5):
            command, env = self.command(argv, ["--quota", "0.5:1"])
            victim = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
            time.sleep(4)
            os.killpg(victim.pid, signal.SIGKILL)
            victim.wait()
            after = self.workload("torch_busy", "2", hooked=["--quota", "0.5:1"])
            assert after["steps"] > 0
        return "5 x kill -9 of a holder, the next one runs"

    def all(self):
        self.row("device", self.device)
        self.row("shares 20/30/50", self.shares)
        self.row("caps 10..90", self.caps)
        self.row("launch cost", self.launch_cost)
        self.row("cuda-bindings", self.cuda_bindings)
        self.row("cudarc", self.cudarc)
        self.row("torch memory limit", self.memory_limit)
        self.row("torch eager", self.same_output("torch_train"))
        self.row("torch compile", self.same_output("torch_train", "--compile", modules=("torch", "triton")))
        self.row("torch graphs", self.same_output("torch_graph"))
        expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        self.row("torch expandable", self.same_output("torch_train", env=expandable))
        self.row("torch loader workers", self.same_output("torch_train", "--workers", "2"))
        self.row("torch 30/70", self.two_tenants)
        self.row("torch kill -9", self.kill_a_holder)
        self.row("cupy", self.same_output("cupy_fft", modules=("cupy",)))
        self.row("triton", self.same_output("triton_add", modules=("torch", "triton")))
        self.row("jax", self.same_output("jax_matmul", modules=("jax",)))
        self.row("numba", self.same_output("numba_saxpy", modules=("numba", "numpy")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="target/release", help="folder of gshare and libgshare_hook.so")
    parser.add_argument("--sim", action="store_true", help="check the suite itself on the simulated device")
    parser.add_argument("--seconds", type=int, default=10, help="length of each share measurement")
    parser.add_argument("--repeats", type=int, default=3, help="bare and metered runs of each framework's workload")
    parser.add_argument("--only", nargs="*", help="rows to run")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    suite = Suite(args)
    suite.all()
    failed = [row for row in suite.rows if row["result"] == "FAILED"]
    if args.json:
        print(json.dumps({"rows": suite.rows}))
    else:
        for row in suite.rows:
            print(f"{row['row']:24} {row['result']:8} {row['seconds']:6.1f} s  {row['figure']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
