#!/usr/bin/env python3
"""A PyTorch (CPU) model that two processes serve from the store: the same outputs as from the file, the weights once in memory.

    gshare-modelstore/python/examples/torch_two_processes.sh      # installs PyTorch into a directory of its own, builds, runs this

Memory is what a process does not share (Private_* of /proc/self/smaps_rollup), after the same forward pass, beside a process
that loaded the same file by itself. Prints one JSON object.
"""

import argparse
import gc
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

HIDDEN, LAYERS = 2048, 12


def build():
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU()]
    return torch.nn.Sequential(*layers)


def empty():
    import torch

    with torch.device("meta"):
        return build()


def private_bytes() -> int:
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def write_safetensors(path: str, tensors) -> int:
    """A safetensors file of float32 tensors, so that this needs no further package."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().numpy().tobytes())
    return at


def read_safetensors(path: str):
    import torch

    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        start = file.tell()
        tensors = {}
        for name, about in header.items():
            begin, end = about["data_offsets"]
            file.seek(start + begin)
            flat = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.float32)
            tensors[name] = flat.reshape(about["shape"])
    return tensors


def serve(kind: str, where: str) -> None:
    """A process that serves the model: waits until all are up, then says what came out and what it takes."""
    import torch

    torch.set_num_threads(1)
    model = empty()
    before = private_bytes()
    if kind == "store":
        import gshare_store

        shared = gshare_store.connect(where).get("mlp")
        model.load_state_dict(shared.state_dict(), assign=True)
    else:
        model.load_state_dict(read_safetensors(where), assign=True)
    with torch.no_grad():
        out = model.eval()(torch.linspace(-1, 1, 4 * HIDDEN).reshape(4, HIDDEN))
    gc.collect()
    print("READY", flush=True)
    sys.stdin.readline()
    result = {
        "source": kind,
        "private_bytes": private_bytes(),
        "private_before_bytes": before,
        "output_sha256": hashlib.sha256(out.numpy().tobytes()).hexdigest(),
    }
    print(json.dumps(result), flush=True)
    # Memory that only one process maps counts as its own: no process may leave before all have looked.
    sys.stdin.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "WHERE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve)
    gshare = os.environ.get("GSHARE_COMMAND", "gshare")
    with tempfile.TemporaryDirectory() as directory:
        path, socket = os.path.join(directory, "mlp.safetensors"), os.path.join(directory, "store.sock")
        weights = write_safetensors(path, build().state_dict())
        store = subprocess.Popen([gshare, "store", "serve", "--socket", socket, "--host", "2GiB"], stderr=subprocess.DEVNULL)
        try:
            while not os.path.exists(socket):
                time.sleep(0.01)
            subprocess.run([gshare, "store", "put", "mlp", path, "--access", "public", "--socket", socket], check=True,
                           stdout=subprocess.DEVNULL)
            places = [("file", path), ("store", socket), ("store", socket)]
            command = [sys.executable, __file__, "--serve"]
            processes = [
                subprocess.Popen(command + list(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for place in places
            ]
            for process in processes:
                assert process.stdout.readline() == "READY\n"
            rows = []
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
                rows.append(json.loads(process.stdout.readline()))
            for process in processes:
                process.communicate("\n")
        finally:
            store.kill()
            store.wait()
    file, second = rows[0], rows[2]
    result = {
        "weights_bytes": weights,
        "identical_outputs": len({row["output_sha256"] for row in rows}) == 1,
        "second_process_lower_by_bytes": file["private_bytes"] - second["private_bytes"],
        "processes": rows,
    }
    print(json.dumps(result, indent=2))
    if not result["identical_outputs"]:
        sys.exit("outputs differ")


if __name__ == "__main__":
    main()
