"""The package on the simulated driver. `gshare`, `gshare-openfaas` and their libraries are on PATH."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import gshare

HERE = pathlib.Path(__file__).resolve().parent
# Allocates 32 and 128 MiB in the first device, and prints both results of the driver.
ALLOCATE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def allocated():
    code = cuda.cuInit(0)
    if code:
        return code, code
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
    return tuple(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mebibytes << 20)) for mebibytes in (32, 128))
"""
PROGRAM = [sys.executable, "-c", f"{ALLOCATE}print(*allocated())"]
LIMITED, NO_DEVICE = "0 2\n", 100


def allocate(queue):
    """For a child of multiprocessing, which reads this file again."""
    names = {}
    exec(ALLOCATE, names)
    queue.put(names["allocated"]())


class Shares(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        # A private daemon and a device of this test's own.
        before = dict(os.environ)
        self.addCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        os.environ |= {"XDG_RUNTIME_DIR": place.name, "TMPDIR": place.name, "GSHARE_IDLE_EXIT": "1s"}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])

    def script(self, text, *arguments, **options):
        file = self.place / "script.py"
        file.write_text(text)
        return subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True, timeout=60, **options)

    def test_run_limits_a_program_and_gives_its_result(self):
        done = gshare.run(PROGRAM, quota="30%:80%", mem="64MiB", sim=True, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, LIMITED)
        done = gshare.run([sys.executable, "-c", "raise SystemExit(7)"], sim=True, capture_output=True)
        self.assertEqual(done.returncode, 7)

    def test_pytest_starts_again_on_the_simulated_gpu_that_its_option_names(self):
        (self.place / "test_it.py").write_text(
            "import ctypes, os\n"
            "def test_device():\n"
            "    cuda, name = ctypes.CDLL('libcuda.so.1'), ctypes.create_string_buffer(64)\n"
            "    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetName(name, 64, 0) == 0\n"
            "    assert b'H100' in name.value and os.environ['GSHARE_SIM_COMPUTE'] == '1'\n"
        )
        pytest = [sys.executable, "-m", "pytest", "-p", "gshare.pytest_plugin", "-p", "no:cacheprovider", self.place / "test_it.py"]
        done = subprocess.run([*pytest, "--gpu-sim=h100"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("1 passed", done.stdout)
        done = subprocess.run([*pytest, "--gpu-sim=h1000"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("v100, a100, h100", done.stderr)
        self.assertIn("1 failed", subprocess.run(pytest, capture_output=True, text=True).stdout, "without the option")

    def test_programs_started_in_a_block_are_limited_together(self):
        before = dict(os.environ)
        with gshare.share(quota="30%", mem="64MiB", sim=True):
            self.assertEqual(subprocess.check_output(PROGRAM, text=True), LIMITED)
            # As `preexec_fn`, which forks in another way.
            self.assertEqual(subprocess.check_output(PROGRAM, text=True, preexec_fn=os.getpid), LIMITED)
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                child = context.Process(target=allocate, args=(queue,))
                child.start()
                self.assertEqual(queue.get(timeout=60), (0, 2), method)
                child.join()
            runs = [subprocess.check_output(["printenv", "GSHARE_RUN"], text=True) for _ in range(2)]
            self.assertEqual(runs[0], runs[1], "one run, so one share")
            with self.assertRaisesRegex(gshare.ShareError, "leave that block first"), gshare.share(sim=True):
                pass
            self.assertFalse(gshare.is_limited())
        self.assertEqual(dict(os.environ), before)
        self.assertEqual(list(self.place.glob("gshare-sim-[0-9]*")), [], "the block's driver goes with it")

    def test_a_fork_in_a_block_gets_no_gpu_instead_of_no_limit(self):
        done = self.script(
            f"import gshare, multiprocessing, os\n{ALLOCATE}\nwith gshare.share(mem='64MiB', sim=True):\n"
            "    os.environ['GSHARE_SIM_LOADED'] = '1'\n"
            "    child = multiprocessing.get_context('fork').Process(target=lambda: print(*allocated(), flush=True))\n"
            "    child.start(); child.join()\n",
            env=os.environ | {"LD_LIBRARY_PATH": str(self.driver())},
        )
        self.assertEqual(done.stdout, f"{NO_DEVICE} {NO_DEVICE}\n", done.stderr)
        self.assertIn("forked inside share()", done.stderr)

    def driver(self):
        """A folder with the simulated driver, for a program outside of `gshare run`."""
        show = "import os; print(os.path.realpath(os.environ['LD_LIBRARY_PATH'].split(':')[0] + '/libcuda.so.1'))"
        done = gshare.run([sys.executable, "-c", show], sim=True, capture_output=True, text=True, check=True)
        folder = self.place / "driver"
        folder.mkdir()
        (folder / "libcuda.so.1").symlink_to(done.stdout.strip())
        return folder

    def test_a_refusal_is_the_commands_sentence(self):
        with self.assertRaisesRegex(gshare.Refused, "400"), gshare.share(mem="400GiB", sim=True):
            self.fail("the device is smaller")
        with self.assertRaisesRegex(gshare.Refused, "quota"), gshare.share(quota="150%", sim=True):
            self.fail("more than the whole")
        with self.assertRaisesRegex(gshare.Refused, "1 to 100"), gshare.share(service_class="slo-sensitive:0", sim=True):
            self.fail("no tolerance")
        with self.assertRaisesRegex(TypeError, "memory: unknown; need quota, mem"), gshare.share(memory="1GiB"):
            self.fail("an unknown option")

    def test_a_program_limits_itself_before_it_loads_cuda(self):
        begin = "import gshare, sys\nprint('begun', flush=True)\ngshare.limit(mem='64MiB', sim=True)\n"
        done = self.script(f"{begin}{ALLOCATE}print(*allocated(), *sys.argv[1:])\n", "an argument")
        self.assertEqual(done.stdout, f"begun\nbegun\n{LIMITED.strip()} an argument\n", done.stderr)
        # A share from outside is kept.
        done = gshare.run([sys.executable, self.place / "script.py"], mem="256MiB", sim=True, capture_output=True, text=True)
        self.assertEqual(done.stdout, "begun\n0 0\n")

    def test_a_program_cannot_limit_itself_too_late_or_without_a_file(self):
        (self.place / "torch.py").write_text("")
        done = self.script("import gshare, torch\ngshare.limit(mem='1GiB')\n")
        self.assertIn("CannotLimit: limit(): torch is loaded already", done.stderr)
        done = subprocess.run([sys.executable, "-"], input="import gshare; gshare.limit()", capture_output=True, text=True)
        self.assertIn("CannotLimit: limit(): a prompt", done.stderr)
        done = self.script("import gshare\ngshare.limit()\n", env=os.environ | {"GSHARE_STARTED_AGAIN": "1"})
        self.assertIn("may be static", done.stderr)

    def test_a_missing_command_is_named(self):
        os.environ["PATH"] = str(self.place)
        with self.assertRaisesRegex(gshare.NotInstalled, "install the wheel"):
            gshare.run(["true"])


class Functions(unittest.TestCase):
    def test_a_function_is_deployed_called_listed_and_deleted(self):
        with tempfile.TemporaryDirectory() as state, subprocess.Popen(
            ["gshare-openfaas", "--sim", "--listen=127.0.0.1:0", f"--state={state}"], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                self.talk(gshare.Host(process.stdout.readline().split()[1]))
            finally:
                process.terminate()

    def talk(self, host):
        host.deploy("f", "gshare-openfaas --gpu-function", quota="20%:40%", mem="1GiB", env={"KERNELS": "1"})
        found = host.wait("f")
        self.assertEqual((found.name, found.state, found.available, found.problem), ("f", "serving", 1, None))
        share = found.details["gshare"]["instances"][0]["parts"][0]["share"]
        self.assertEqual(share["time"], {"request": 2000, "limit": 4000})
        self.assertGreaterEqual(json.loads(host.invoke("f"))["gpu_ms"], 2)
        self.assertEqual(host.invoke("f", b"text", path="echo"), b"text")
        host.scale("f", 2)
        self.assertEqual([function.name for function in host.functions()], ["f"])
        self.assertEqual(host.function("f").answered, 2)
        host.deploy("f", "gshare-openfaas --gpu-function", quota="10%", env={"KERNELS": "1"}, update=True)
        host.delete("f")
        for status, call in [
            (404, lambda: host.function("f")),
            (503, lambda: host.invoke("f")),
            (400, lambda: host.deploy("g", "true", annotations={"gshare/slow": "1"})),
            (404, lambda: host.deploy("g", "true", update=True)),
        ]:
            with self.assertRaises(gshare.HostError) as caught:
                call()
            self.assertEqual(caught.exception.status, status, caught.exception)
        with self.assertRaisesRegex(gshare.HostError, "no answer"):
            gshare.Host("http://127.0.0.1:1").functions()


if __name__ == "__main__":
    unittest.main()
