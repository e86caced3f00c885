"""The shim on NumPy, which stands in for PyTorch: what is served from the store and what is not, and what it costs others.

    GSHARE_COMMAND=target/debug/gshare GSHARE_STORE_LIBRARY=target/debug/libgshare_store.so python3 test_shim.py

What PyTorch itself gets is in test_torch.py.
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import numpy
from serving import GSHARE, serve

PACKAGE = pathlib.Path(__file__).resolve().parent.parent

# As much of PyTorch as the shim asks for. Its own `load` says what it was given.
TORCH = """
import types
import numpy
from numpy import frombuffer
uint8, float32 = numpy.dtype("uint8"), numpy.dtype("float32")

class device:
    def __init__(self, text):
        if text not in ("cpu", "cuda", "meta"):
            raise RuntimeError(f"no device {text}")
        self.type, self.index = text, None
    def __eq__(self, other):
        return self.type == other.type

class Tensor:
    def __init__(self):
        self.device = device("cpu")

def empty(shape, dtype=None):
    return Tensor() if dtype is None else numpy.empty(shape, dtype)

cuda = types.SimpleNamespace(is_available=lambda: False)

def load(f, map_location=None, pickle_module=None, *, weights_only=None, mmap=None, **more):
    "The real one."
    if f == "raise":
        raise ValueError("as ever")
    return ["real", str(f), str(map_location), weights_only, mmap, more]

serialization = types.SimpleNamespace(load=load)
"""
SAFETENSORS = """
import contextlib, json, os, struct
import numpy, torch

@contextlib.contextmanager
def safe_open(filename, framework, device):
    with open(filename, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    class Opened:
        def keys(self):
            return list(header)
    yield Opened()

def load_file(filename, device="cpu"):
    return ["real", os.fspath(filename), device]
"""


def safetensors(path: pathlib.Path, value: float) -> None:
    """Two tensors: `w` of 2 MiB, and `none`."""
    w = numpy.full((1 << 9, 1 << 10), value, dtype="float32")
    header = {"w": {"dtype": "F32", "shape": list(w.shape), "data_offsets": [0, w.nbytes]},
              "none": {"dtype": "U8", "shape": [0, 3], "data_offsets": [w.nbytes, w.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + w.tobytes())


class ShimTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.modules, self.socket = self.path / "modules", str(self.path / "store.sock")
        (self.modules / "safetensors").mkdir(parents=True)
        (self.modules / "torch.py").write_text(TORCH)
        (self.modules / "safetensors/__init__.py").touch()
        (self.modules / "safetensors/torch.py").write_text(SAFETENSORS)
        self.environment = os.environ | {
            "PYTHONPATH": f"{PACKAGE}:{self.modules}", "XDG_CACHE_HOME": str(self.path / "cache"), "GSHARE_STORE": self.socket,
            "GSHARE_SHIM_LOG": "1"}

    def serve(self) -> None:
        serve(self, self.socket, "--host", "64MiB")

    def python(self, program: str, *arguments: str, command: tuple = ()) -> tuple:
        """What a program prints as JSON, and what it says on standard error."""
        done = subprocess.run([*command, sys.executable, "-c", program, *arguments], env=self.environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout), done.stderr

    def test_a_program_without_torch_pays_nothing(self) -> None:
        program = "import json, sys; print(json.dumps(sorted(sys.modules)))"
        shimmed, _ = self.python(program)
        self.environment["PYTHONPATH"] = ""
        bare, _ = self.python(program)
        self.assertLessEqual(set(shimmed) - set(bare), {"sitecustomize"})

    def test_a_sitecustomize_that_was_there_before_is_run(self) -> None:
        (self.modules / "sitecustomize.py").write_text("import sys\nsys.path.append('/added')\nseen = sys.path[:]\n")
        seen, _ = self.python("import json, sys, sitecustomize as s; print(json.dumps([s.__file__, s.seen, sys.path]))")
        self.assertEqual(seen[0], str(self.modules / "sitecustomize.py"))
        self.assertNotIn(str(PACKAGE), seen[1])
        self.assertEqual(seen[2][1:3], [str(PACKAGE), str(self.modules)])
        self.assertEqual(seen[2][-1], "/added")
        (self.modules / "sitecustomize.py").write_text("import no_such_module\n")
        done = subprocess.run([sys.executable, "-c", "import torch; print(torch.load.gshare_shim)"], env=self.environment,
                              capture_output=True, text=True)
        self.assertIn("no_such_module", done.stderr)
        self.assertEqual(done.stdout, "True\n")

    def test_the_modules_are_what_they_were_but_for_one_function(self) -> None:
        found, _ = self.python(
            "import json, torch, safetensors.torch, importlib.util\n"
            "importlib.reload(torch)\n"
            "print(json.dumps([torch.load.__name__, torch.load.__doc__, torch.serialization.load is torch.load,\n"
            "    hasattr(torch.load.__wrapped__, 'gshare_shim'), 'exec_module' in vars(torch.__loader__),\n"
            "    type(torch.__spec__.loader).__name__, importlib.util.find_spec('torch').name]))")
        self.assertEqual(found, ["load", "The real one.", True, False, False, "SourceFileLoader", "torch"])

    def test_what_is_not_the_stores_goes_to_the_real_function_as_it_is(self) -> None:
        self.serve()
        (self.path / "big.pt").write_bytes(bytes(2 << 20))
        calls = ["'missing'", "'big.pt', mmap=True", "'big.pt', 'meta'", "'big.pt', 'cuda'", "'big.pt', 'nonsense'", "'big.pt', int",
                 "'big.pt', {}", "'big.pt', encoding='latin1'", "'big.pt', pickle_module=json", "'big.pt', weights_only=7", "b'big.pt'",
                 "open('big.pt', 'rb')", "'.'", "f='big.pt', map_location='cpu'"]
        found, log = self.python(
            f"import json, os, torch\nos.chdir({str(self.path)!r})\nreal = torch.load.__wrapped__\n"
            + "print(json.dumps([" + ", ".join(f"[load({call}) for load in (torch.load, real)]" for call in calls) + "]))")
        for call, (shimmed, bare) in zip(calls, found):
            with self.subTest(call):
                self.assertEqual(shimmed[0], "real")
                self.assertEqual(shimmed[2:] if "open" in call else shimmed, bare[2:] if "open" in call else bare)
        self.assertEqual(log.count("goes without the store"), len(calls), log)
        raised, _ = self.python(
            "import json, torch\n"
            "def get(*a, **k):\n"
            "    try: torch.load(*a, **k)\n"
            "    except Exception as error: return [type(error).__name__, str(error), str(error.__context__)]\n"
            "print(json.dumps([get('raise'), get(), get('f', weights_only=True, pickle_module=None, f=1)]))")
        self.assertEqual(raised[0], ["ValueError", "as ever", "None"])
        self.assertEqual([row[0] for row in raised[1:]], ["TypeError"] * 2)

    LOAD = ("import json, sys, torch, numpy\nfrom safetensors.torch import load_file\nw = load_file(sys.argv[1])\n"
            "if isinstance(w, list):\n    print(json.dumps(w))\n    sys.exit()\n"
            "found = [[name, str(array.dtype), array.shape, float(array.sum()), array.flags.writeable] for name, array in w.items()]\n"
            "w['w'][:] = 9\nagain = load_file(sys.argv[1])['w'].sum()\nprint(json.dumps([found, float(w['w'].sum()), float(again)]))")

    def stat(self) -> dict:
        command = [GSHARE, "store", "stat", "--json", "--socket", self.socket]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def test_a_safetensors_file_is_served_from_the_store_once_for_all_and_ones_own_to_write(self) -> None:
        self.serve()
        path = self.path / "m.safetensors"
        for loads, value in ((1, 1.0), (1, 1.0), (2, 2.0)):
            if loads != self.stat()["loads"]:
                safetensors(path, value)
            found, log = self.python(self.LOAD, str(path))
            total = value * (1 << 19)
            expected = [["w", "float32", [1 << 9, 1 << 10], total, True], ["none", "uint8", [0, 3], 0.0, True]]
            self.assertEqual(found, [expected, 9.0 * (1 << 19), total])
            self.assertEqual(log.count("served from the store"), 2, log)
            self.assertEqual(self.stat()["loads"], loads)
        models = subprocess.run([GSHARE, "store", "ls", "--json", "--socket", self.socket], check=True, capture_output=True)
        self.assertEqual(len(json.loads(models.stdout)["models"]), 1, "the old version is forgotten")

    def test_without_a_store_or_a_cache_of_ones_own_the_real_function_answers(self) -> None:
        path = self.path / "m.safetensors"
        safetensors(path, 1.0)
        bare = ["real", str(path), "cpu"]
        self.assertEqual(self.python(self.LOAD, str(path))[0], bare)
        self.serve()
        cache = self.path / "cache/gshare/weights"
        cache.mkdir(parents=True, exist_ok=True)
        cache.chmod(0o755)
        found, log = self.python(self.LOAD, str(path))
        self.assertEqual(found, bare)
        self.assertIn("0700", log)
        cache.chmod(0o700)
        self.environment["GSHARE_STORE_LIBRARY"] = "/nothing.so"
        self.assertEqual(self.python(self.LOAD, str(path))[0], bare)

    def test_the_command_brings_the_shim_along(self) -> None:
        self.serve()
        path = self.path / "m.safetensors"
        safetensors(path, 3.0)
        self.environment |= {"PYTHONPATH": str(self.modules), "GSHARE_SIM_DEVICE": str(self.path / "device"),
                             "XDG_RUNTIME_DIR": str(self.path), "GSHARE_IDLE_EXIT": "1s"}
        del self.environment["GSHARE_STORE"]
        command = (GSHARE, "run", "--sim=tiny", f"--shim={self.socket}", "--")
        found, log = self.python(self.LOAD, str(path), command=command)
        self.assertEqual(found[2], 3.0 * (1 << 19))
        self.assertEqual(log.count("served from the store"), 2, log)


if __name__ == "__main__":
    unittest.main()
