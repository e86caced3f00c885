"""FluidFaaS functions in Python: models as components, run as stages of a pipeline by `gshare up`.

    import gshare_ffs as FFS

    class Deblur(FFS.Module):            # torch.nn.Module with another base class
        def forward(self, x): ...

    class Enhance(FFS.FFaaS):
        def defDAG(self, x):
            a = Deblur.reg(self, x)
            return SuperResolution.reg(self, a)

    def handler_run(event, context):     # the deployment's `envProcess` calls it
        Enhance(event, context, FFS.RUN).run()

    def handler_build(event, context):   # before it is deployed
        return Enhance(event, context, FFS.BUILD_DAG).profile(example, slice=event["slice"], onto=event["onto"])

The two entry points are those of FluidFaaS, Figure 7. The second runs once on each slice (`CUDA_VISIBLE_DEVICES` names it): it times the
components there and sees the bytes between them, and its answer is the file of `gshare/dag`. In RUN mode the process is one stage: it
serves HTTP on `$PORT` and runs the components named in `$GSHARE_COMPONENTS`, or all of them where nothing is named. A request's body is a JSON
list of the inputs and its answer is JSON; `decode` and `encode` may say otherwise. Between stages values travel as JSON, or with torch as
`torch.save` writes them. Neither form can run code in the stage that reads it. Values of 64 KiB and more go through a file in shared memory,
in the folder `$GSHARE_BETWEEN`: the answer has the file's name in the header `Gshare-File`, and so has the request to the next stage, which
removes the file."""

import http.server
import io
import json
import mmap
import os
import pickle
import sys
import tempfile
import threading
import time

try:
    import torch
    from torch.nn import Module as _Base
except ImportError:
    torch, _Base = None, object

RUN, BUILD_DAG = "RUN", "BUILDDAG"
FILE = "Gshare-File"
LEAST_IN_FILE = 64 << 10

__all__ = ["RUN", "BUILD_DAG", "Module", "FFaaS"]


def _pack(values):
    if torch is None:
        return json.dumps(values).encode()
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def _unpack(body):
    if torch is None:
        return json.loads(bytes(body))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.load(io.BytesIO(body), map_location=device, weights_only=True)


def _in_file(body):
    """Puts a long body for the next stage into a file, and returns the shorter body with the headers that name the file."""
    folder = os.environ.get("GSHARE_BETWEEN")
    if not folder or len(body) < LEAST_IN_FILE:
        return body, {}
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(body)
    return b"", {FILE: os.path.basename(file.name)}


def _of_file(name):
    """The body that the stage before has put into a file. It stays mapped for as long as it is used."""
    path = os.path.join(os.environ["GSHARE_BETWEEN"], os.path.basename(name))
    with open(path, "rb") as file:
        os.unlink(path)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Value:
    """What a component makes, or an input of the function: a name until the function runs."""

    def __init__(self, name):
        self.name = name


class Module(_Base):
    """A component. With torch it is a `torch.nn.Module`; without, any class that has `forward`."""

    if torch is None:

        def __call__(self, *inputs):
            return self.forward(*inputs)

    @classmethod
    def reg(cls, function, *inputs, **settings):
        """Adds the component to the function's DAG; answers with what it makes. `settings` go to its constructor."""
        return function._register(cls, inputs, settings)


class FFaaS:
    """A function. Subclasses define `defDAG(self, *inputs)` by `reg` and return the answer's value."""

    def __init__(self, event, context, mode):
        if mode not in (RUN, BUILD_DAG):
            raise ValueError(f"mode is {mode!r}: need RUN or BUILD_DAG")
        self.event, self.context, self.mode = event, context, mode
        self.components = {}
        arguments = type(self).defDAG.__code__
        names = arguments.co_varnames[1 : arguments.co_argcount]
        self.inputs = [Value(name) for name in names]
        self.answer = self.defDAG(*self.inputs)
        if not isinstance(self.answer, Value):
            raise TypeError("defDAG returns what `reg` of its last component gave")

    def _register(self, cls, inputs, settings):
        for value in inputs:
            if not isinstance(value, Value):
                raise TypeError(f"{cls.__name__}: inputs are inputs of the function or what `reg` gave")
        name = cls.__name__ if cls.__name__ not in self.components else f"{cls.__name__}_{len(self.components)}"
        self.components[name] = (cls, [value.name for value in inputs], settings)
        return Value(name)

    def _load(self, names):
        device = "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
        loaded = {}
        for name in names:
            cls, inputs, settings = self.components[name]
            model = cls(**settings)
            loaded[name] = model.to(device).eval() if torch is not None else model
        return loaded

    def _compute(self, loaded, values):
        # Components were registered after what they need.
        for name in (name for name in self.components if name in loaded):
            values[name] = loaded[name](*(values[need] for need in self.components[name][1]))

    def decode(self, body):
        """The inputs in the body of a request."""
        return json.loads(body)

    def encode(self, answer):
        """The body of the answer."""
        return json.dumps(answer).encode()

    def run(self):
        """Is the stage that its environment says, until it is killed."""
        mine = os.environ.get("GSHARE_COMPONENTS")
        mine = set(mine.split(",")) if mine else set(self.components)
        unknown = sorted(mine - set(self.components))
        if unknown:
            raise KeyError(f"GSHARE_COMPONENTS: no component {unknown[0]!r} in the DAG")
        first = os.environ.get("GSHARE_STAGE", "0") == "0"
        loaded, turn = self._load(mine), threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body leave in one packet: the second of two would wait for an acknowledgement.
            wbufsize = -1

            def do_POST(handler):
                length = handler.headers.get("Content-Length")
                if length is None:
                    handler.close_connection = True
                    return handler.say(411, b"need a Content-Length")
                body = handler.rfile.read(int(length))
                try:
                    file = handler.headers.get(FILE)
                    if file is not None and not first:
                        body = _of_file(file)
                    with turn:
                        answer, last = self._one(body, loaded, first)
                    answer, headers = (answer, {}) if last else _in_file(answer)
                except Exception as error:  # The function's own: it fails this request, not the stage.
                    return handler.say(500, f"{type(error).__name__}: {error}"[:500].encode())
                handler.say(200, answer, headers)

            def say(handler, status, body, headers={}):
                handler.send_response(status)
                for key, value in headers.items():
                    handler.send_header(key, value)
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_):
                pass

        # A stage is ready when it listens: its components are loaded by now.
        http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()

    def _one(self, body, loaded, first):
        """The answer to a request, or the values for later stages and the components that have run; and whether it is the answer."""
        names = [value.name for value in self.inputs]
        ran, values = ([], dict(zip(names, self.decode(body)))) if first else _unpack(body)
        self._compute(loaded, values)
        ran = {*ran, *loaded}
        later = [needs for name, (_, needs, _) in self.components.items() if name not in ran]
        if not later:
            return self.encode(values[self.answer.name]), True
        wanted = {self.answer.name}.union(*later)
        return _pack([sorted(ran), {name: value for name, value in values.items() if name in wanted}]), False

    def profile(self, *example, slice, batch=1, repeat=5, onto=None):
        """Times each component on an example, in this process, and answers with the DAG that `gshare lab partition` and `gshare/dag`
        read: with a profile for `slice`, beside the profiles of `onto`, which is such an answer from other slices. A component that
        fails here gets no profile for the slice."""
        known = {one["name"]: one["profiles"] for one in (onto or {}).get("components", [])}
        size = {edge["from"]: edge["bytes"] for edge in (onto or {}).get("edges", [])}
        values = dict(zip((value.name for value in self.inputs), example))
        cuda = torch is not None and torch.cuda.is_available()
        components = []
        for name in self.components:
            others = [one for one in known.get(name, []) if (one["slice"], one["batch"]) != (slice, batch)]
            components.append({"name": name, "profiles": others})
            loaded, times = None, []
            try:
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                loaded = self._load([name])
                for _ in range(repeat):
                    begun = time.perf_counter_ns()
                    self._compute(loaded, values)
                    if cuda:
                        torch.cuda.synchronize()
                    times.append(time.perf_counter_ns() - begun)
            except Exception as error:  # Such as: the slice has too little memory for it.
                print(f"{name} on {slice}, batch {batch}: no profile: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            memory = torch.cuda.max_memory_allocated() if cuda else 0
            time_ns = max(sorted(times)[len(times) // 2], 1)
            size[name] = len(pickle.dumps(values[name], protocol=5))
            others.append({"slice": slice, "batch": batch, "time_ns": time_ns, "memory_bytes": memory})
        edges = [
            {"from": need, "to": name, "bytes": size.get(need, 0)}
            for name, (_, inputs, _) in self.components.items()
            for need in dict.fromkeys(inputs)
            if need in self.components
        ]
        return {"name": type(self).__name__, "components": components, "edges": edges}
