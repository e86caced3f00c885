"""The shim under real PyTorch, on CPU tensors: what programs get is the same, lies in the store once, and is theirs to write.

    GSHARE_COMMAND=target/debug/gshare GSHARE_STORE_LIBRARY=target/debug/libgshare_store.so PYTHON test_torch.py

needs PyTorch and safetensors in that interpreter.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from serving import GSHARE, serve

HERE = pathlib.Path(__file__).resolve().parent

# Loads each file as an unmodified program does, and prints what it got, or what was raised; then, told by lines on standard input,
# writes to the first tensor in place and prints its sum.
PROGRAM = """
import json, sys, torch, safetensors.torch

def tell(value):
    if isinstance(value, torch.Tensor):
        about = [type(value).__name__, str(value.dtype), str(value.layout), list(value.shape), str(value.device), value.requires_grad]
        if value.is_meta:
            return about
        dense = value.detach().to_dense()
        # Bits and not values.
        raw = dense.contiguous().view(-1).view(torch.uint8) if dense.numel() else dense
        return [*about, list(dense.stride()), bytes(raw[:4096].tolist()).hex(), int(raw.to(torch.int64).sum())]
    if isinstance(value, dict):
        about = {key: tell(item) for key, item in vars(value).items()} if type(value) is not dict else {}
        return [type(value).__name__, [[key, tell(item)] for key, item in value.items()], about]
    return repr(value)

def get(path, arguments):
    load = safetensors.torch.load_file if path.endswith(".safetensors") else torch.load
    try:
        return load(path, **eval(arguments))
    except Exception as error:
        return [type(error).__name__, str(error)]

kept, told = [], []
for path, arguments in json.loads(sys.argv[1]):
    value = get(path, arguments)
    kept.append(value)
    shared = {}
    if isinstance(value, dict):
        for name, tensor in value.items():
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
                shared.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    # A safetensors file is one storage to the library.
    told.append([tell(value), sorted(shared.values()) if path.endswith(".pt") else None])
print(json.dumps(told), flush=True)
for line in sys.stdin:
    first = next(iter(kept[0].values()))
    if line == "write\\n":
        first.fill_(7)
    print(float(first.double().sum()), flush=True)
"""


def save(directory: pathlib.Path) -> list:
    """Files, with the arguments that each is loaded with, and whether the store is to serve it."""
    import safetensors.torch
    import torch

    torch.manual_seed(1)
    state = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.Flatten(), torch.nn.Linear(1024, 512)).state_dict()
    rows = []

    def add(name, value, served, *arguments, write=torch.save):
        path = str(directory / name)
        write(value, path)
        rows.extend((path, text, served) for text in arguments)

    add("state.pt", state, True, "{}", "{'map_location': 'cpu'}", "{'map_location': torch.device('cpu'), 'weights_only': True}",
        "{'weights_only': False}")
    rows += [(str(directory / "state.pt"), text, False) for text in (
        "{'mmap': True}", "{'map_location': lambda storage, place: storage}", "{'map_location': {'cpu': 'cpu'}}",
        "{'map_location': 'cuda:99'}", "{'map_location': 'cpu:0'}", "{'map_location': 'meta'}", "{'encoding': 'latin1'}",
        "{'pickle_module': __import__('pickle'), 'weights_only': False}", "{'nonsense': 1}")]
    add("legacy.pt", state, True, "{}", write=lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False))
    add("checkpoint.pt", {"model": state, "epoch": 3, "loss": 0.25, "name": None, "best": True}, True, "{}")
    base = torch.arange(1 << 19, dtype=torch.float32)
    add("views.pt", collections.OrderedDict(
        whole=base, tied=base.view(base.shape), part=base[100:200], turned=base[:600].view(20, 30).t(), none=torch.zeros(0, 3),
        scalar=torch.tensor(2.5), last=torch.rand(4, 8, 8, 8).to(memory_format=torch.channels_last)), True, "{}")
    types = {str(kind): torch.ones(1 << 17).to(kind) for kind in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float64, torch.int64,
        torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)}
    add("types.pt", types, True, "{}")
    big = torch.rand(1 << 18)
    add("small.pt", {"w": torch.ones(3)}, False, "{}")
    add("parameter.pt", {"w": torch.nn.Parameter(big)}, False, "{}")
    add("gradient.pt", {"w": big.clone().requires_grad_()}, False, "{}")
    add("sparse.pt", {"w": torch.sparse_coo_tensor(
        torch.arange(1 << 17)[None], torch.ones(1 << 17), (1 << 20,))}, False, "{}")
    add("module.pt", torch.nn.Linear(1024, 512), False, "{}", "{'weights_only': False}")
    add("listed.pt", {"w": [big]}, False, "{}")
    add("numbered.pt", {1: big}, False, "{}")
    twice = big.clone()
    add("twice.pt", {"a": twice, "b": twice}, False, "{}")
    (directory / "broken.pt").write_bytes((directory / "state.pt").read_bytes()[: -(1 << 20)])
    rows += [(str(directory / "broken.pt"), "{}", False), (str(directory / "missing.pt"), "{}", False)]
    add("model.safetensors", {"z": big, "a": torch.ones(5, 7, dtype=torch.bfloat16), "none": torch.zeros(0, 2),
                              "eight": torch.ones(9).to(torch.float8_e4m3fn)}, True, "{}", "{'device': 'cpu'}",
        write=safetensors.torch.save_file)
    rows += [(str(directory / "model.safetensors"), text, False) for text in ("{'device': 'meta'}", "{'nonsense': 1}")]
    (directory / "cut.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-1])
    rows += [(str(directory / "cut.safetensors"), "{}", False), (str(directory / "missing.safetensors"), "{}", False)]
    return rows


class TorchTest(unittest.TestCase):
    def setUp(self) -> None:
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.path = pathlib.Path(self.dir.name)
        self.socket = str(self.path / "store.sock")
        self.server = serve(self, self.socket, "--host", "256MiB")

    def stat(self) -> dict:
        output = subprocess.run([GSHARE, "store", "stat", "--json", "--socket", self.socket], check=True, capture_output=True)
        return json.loads(output.stdout)

    def start(self, rows: list, shim: bool = True) -> subprocess.Popen:
        environment = os.environ | {"XDG_CACHE_HOME": str(self.path / "cache"), "GSHARE_STORE": self.socket, "GSHARE_SHIM_LOG": "1",
                                    "PYTHONPATH": str(HERE.parent) if shim else ""}
        with open(self.path / "log", "wb") as log:
            return subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([row[:2] for row in rows])],
                                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def results(self, rows: list, shim: bool) -> list:
        output, _ = self.start(rows, shim).communicate("")
        self.assertTrue(output, (self.path / "log").read_text())
        return json.loads(output)

    def test_everything_is_loaded_as_without_the_shim(self) -> None:
        rows = save(self.path)
        bare = self.results(rows, shim=False)
        self.assertEqual((self.path / "log").read_text(), "")
        for round in ("converted", "found"):
            shimmed = self.results(rows, shim=True)
            log = [line for line in (self.path / "log").read_text().splitlines() if line.startswith("gshare: ")]
            self.assertEqual(len(log), len(rows), log)
            for row, one, other, said in zip(rows, bare, shimmed, log):
                with self.subTest(round, file=pathlib.Path(row[0]).name, arguments=row[1], log=said):
                    self.assertEqual(one, other)
                    self.assertEqual(said.endswith("was served from the store"), row[2])
        cache = self.path / "cache/gshare/weights"
        self.assertEqual(cache.stat().st_mode & 0o777, 0o700)
        self.assertEqual({file.stat().st_mode & 0o777 for file in cache.iterdir()}, {0o600})

    def test_two_processes_have_one_copy_and_none_sees_what_the_other_writes(self) -> None:
        import torch

        for name, write in (("w.pt", torch.save), ("w.safetensors", None)):
            with self.subTest(name):
                path, size = self.path / name, 32 << 20
                if write is None:
                    from safetensors.torch import save_file as write
                write({"w": torch.ones(size // 4)}, str(path))
                before = self.stat()
                processes = [self.start([(str(path), "{}")]) for _ in range(2)]
                try:
                    told = [json.loads(process.stdout.readline()) for process in processes]
                    self.assertEqual(told[0], told[1])
                    stat = self.stat()
                    self.assertEqual(stat["loads"] - before["loads"], 1)
                    self.assertEqual(stat["host"]["references"], 2)
                    self.assertEqual(stat["host"]["committed_bytes"] - before["host"]["committed_bytes"], size)

                    def ask(process, what):
                        process.stdin.write(what + "\n")
                        process.stdin.flush()
                        return float(process.stdout.readline())

                    self.assertEqual(ask(processes[0], "write"), 7 * size / 4)
                    self.assertEqual(ask(processes[1], "sum"), size / 4)
                    third = self.start([(str(path), "{}")])
                    self.assertEqual(json.loads(third.stdout.readline()), told[0])
                    third.communicate("")
                finally:
                    for process in processes:
                        process.communicate("")

    def test_a_child_that_was_forked_gives_back_nothing(self) -> None:
        import torch

        path = str(self.path / "w.pt")
        torch.save({"w": torch.ones(1 << 20)}, path)
        program = ("import torch, os, sys\nw = torch.load(sys.argv[1])\nif os.fork() == 0:\n    del w\n    sys.exit()\nos.wait()\n"
                   "print(flush=True)\nsys.stdin.read()")
        environment = os.environ | {"XDG_CACHE_HOME": self.dir.name, "GSHARE_STORE": self.socket, "PYTHONPATH": str(HERE.parent)}
        process = subprocess.Popen([sys.executable, "-c", program, path], env=environment, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.assertTrue(process.stdout.readline())
        self.assertEqual(self.stat()["host"]["references"], 1)

    def test_a_file_that_changed_is_read_again_and_its_old_version_leaves(self) -> None:
        import torch

        path = str(self.path / "w.pt")
        for value in (1, 2):
            torch.save({"w": torch.full((1 << 20,), float(value))}, path)
            ((kind, pairs, _), _), = self.results([(path, "{}")], shim=True)
            self.assertEqual(kind, "dict")
            self.assertEqual(pairs[0][1][-2][:8], torch.tensor(float(value)).view(torch.int32).item().to_bytes(4, "little").hex())
        listed = subprocess.run([GSHARE, "store", "ls", "--json", "--socket", self.socket], check=True, capture_output=True)
        self.assertEqual(len(json.loads(listed.stdout)["models"]), 1)
        files = [file.name for file in (self.path / "cache/gshare/weights").iterdir()]
        self.assertEqual(sorted(name.rsplit(".")[-1] for name in files), ["names", "safetensors"])

    def test_without_a_store_or_with_a_full_one_all_is_as_ever(self) -> None:
        import torch

        path = str(self.path / "w.pt")
        torch.save({"w": torch.ones(300 << 18)}, path)
        rows = [(path, "{}")]
        bare = self.results(rows, shim=False)
        self.assertEqual(self.results(rows, shim=True), bare)
        self.assertIn("goes without the store", (self.path / "log").read_text())
        self.server.kill()
        self.server.wait()
        self.assertEqual(self.results(rows, shim=True), bare)


if __name__ == "__main__":
    unittest.main()
