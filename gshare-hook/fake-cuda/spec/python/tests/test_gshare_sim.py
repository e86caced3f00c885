"""The package `gshare_sim` as `gshare run --sim --compute` loads it. `gshare` and its libraries are on PATH.

Tests with PyTorch run where this Python has it; the others load a module of its name.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
TORCH = importlib.util.find_spec("torch") is not None
LIMITED = """
import torch
held = []
try:
    while True:
        held.append(torch.full((64 << 20,), float(len(held)), device="cuda"))
except torch.cuda.OutOfMemoryError:
    print(len(held), sum(each[-1].item() for each in held), torch.cuda.memory_allocated() >> 20, flush=True)
held.clear()
print(torch.ones(100, device="cuda").sum().item(), flush=True)
"""

# 300 kernels of 2 ms, by the profile's name for the operator, and their time from beginning to end.
SHARED = """
import time, torch
x = torch.eye(8, device="cuda") * 2
x.mm(x)
torch.cuda.synchronize()
begun = time.monotonic()
for _ in range(300):
    y = x.mm(x)
torch.cuda.synchronize()
print(time.monotonic() - begun, y.sum().item(), flush=True)
"""

# An operator fails in a replay: an index is out of range.
FAILED = """
import sys, torch
table, places = torch.arange(4.0, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = table.index_select(0, places)
graph.replay()
print(out.tolist(), flush=True)
places.fill_(9)
graph.replay()
for read in sys.argv[1:]:
    try:
        print(eval(read), flush=True)
    except RuntimeError as error:
        print(type(error).__name__, " ".join(str(error).split())[:200], flush=True)
"""

# A kernel of another library, ahead of the first operator; the library does not look at the error.
AHEAD = """
import ctypes, torch
torch.cuda.synchronize()
cuda = ctypes.CDLL("libcuda.so.1")
module, function, none = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cuModuleLoadData(ctypes.byref(module), b".version 8.0\\n.visible .entry theirs() { ret; }\\n")
cuda.cuModuleGetFunction(ctypes.byref(function), module, b"theirs")
print(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, none, none, none), flush=True)
try:
    torch.ones(3, device="cuda")
except NotImplementedError as error:
    print(error, flush=True)
"""


class OfGshareRun(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        self.variables = {"XDG_RUNTIME_DIR": place.name, "TMPDIR": place.name, "GSHARE_IDLE_EXIT": "1s", "PYTHONPATH": place.name}

    def run_it(self, *words, sim="--sim", options=(), **environment):
        argv = ["gshare", "run", sim, "--compute", *options, "--", sys.executable, *map(str, words)]
        return subprocess.run(argv, env={**os.environ, **self.variables, **environment}, capture_output=True, text=True, timeout=600)


class Loading(OfGshareRun):
    def stub(self, release):
        (self.place / "torch").mkdir(exist_ok=True)
        (self.place / "torch/__init__.py").write_text(f"__version__ = {release!r}\nclass version:\n    cuda = None\n")

    def test_a_programs_own_sitecustomize_is_run_and_torch_is_not_loaded(self):
        (self.place / "sitecustomize.py").write_text("print('theirs')\n")
        done = self.run_it("-c", "import os, sys; print('torch' in sys.modules, os.environ['TRITON_INTERPRET'], sys.modules['sitecustomize'].__file__)")
        self.assertRegex(done.stdout, r"^theirs\nFalse 1 .*sitecustomize.py\n$", done.stderr)

    def test_an_unknown_release_of_pytorch_is_refused_by_name(self):
        self.stub("9.1.0+cu140")
        done = self.run_it("-c", "import torch")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PyTorch 9.1.0+cu140 is not known to compute on a simulated GPU; known: 2.15", done.stderr)

    def test_a_pytorch_for_the_cpu_is_left_alone_however_it_is_looked_for(self):
        self.stub("2.15.1")
        text = "import importlib.util, sys; importlib.util.find_spec('torch'); import torch; print('gshare_sim' in sys.modules, torch.__version__)"
        done = self.run_it("-c", text)
        self.assertEqual(done.stdout, "True 2.15.1\n", done.stderr)

    def test_values_are_for_simulated_devices(self):
        done = subprocess.run(["gshare", "run", "--compute", "--", "true"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--sim", done.stderr)


@unittest.skipUnless(TORCH, "this Python has no PyTorch")
class WithPyTorch(OfGshareRun):
    def test_values_are_those_of_the_cpu(self):
        done = self.run_it(HERE / "inside.py", sim="--sim=a100,devices=2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("kernel `theirs` refused", done.stderr)

    def test_collectives_give_every_rank_its_values_and_training_those_of_one_process(self):
        for world in (1, 2, 4):
            done = self.run_it(HERE / "collectives.py", world, sim="--sim=a100,devices=4")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_values_hold_under_limits(self):
        # 256 MiB each.
        done = self.run_it("-c", LIMITED, options=["--mem=2GiB", "--quota=0.5:0.5"])
        count, total, megabytes = done.stdout.split()[:3]
        self.assertEqual((int(count), float(total), int(megabytes)), (8, 28.0, 2048), done.stderr)
        self.assertEqual(done.stdout.split()[3], "100.0")

    def test_a_kernel_without_values_is_an_error_with_its_name_ahead_of_the_first_operator(self):
        done = self.run_it("-c", AHEAD)
        self.assertRegex(done.stdout, "^801\nkernel `theirs` has no values on a simulated GPU and was refused", done.stderr)

    def test_nothing_is_read_after_an_operator_of_a_replay_has_failed(self):
        reads = ("out[0].item()", "out.cpu()", "out + 1", "torch.cuda.synchronize()")
        for order in (reads, reads[::-1]):
            done = self.run_it("-c", FAILED, *order)
            first, *rest = done.stdout.splitlines()
            self.assertEqual(first, "[0.0, 0.0]", done.stderr)
            self.assertEqual(len(rest), len(reads), done.stdout + done.stderr)
            for line in rest:
                self.assertRegex(line, "Error .*(illegal memory access|host work failed in the replay)")
            self.assertIn("index out of range", done.stderr)

    def test_a_share_of_time_holds_for_operators_of_a_profiles_length(self):
        profile = self.place / "profile.toml"
        profile.write_text('base = "a100"\n[[kernel]]\nname = "aten_mm"\nduration_ns = 2000000\n')
        done = self.run_it("-c", SHARED, sim=f"--sim={profile}", options=["--quota=0.25:0.25"])
        seconds, total = map(float, done.stdout.split())
        # 0.6 s of work at a quarter of the time; a tenth for the share's first turn.
        self.assertGreater(seconds, 0.6 / 0.25 * 0.9, done.stderr)
        self.assertEqual(total, 32)

    def test_another_driver_is_refused(self):
        text = "import sys; sys.path.insert(0, sys.argv[1]); import torch, gshare_sim; gshare_sim.install()"
        done = subprocess.run([sys.executable, "-c", text, HERE.parent], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "libcuda.so.1|simulated driver")


if __name__ == "__main__":
    unittest.main()
