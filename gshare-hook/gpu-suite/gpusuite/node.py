"""The programs' machine, and a daemon with a device for the length of a row."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

from .errors import Failed, NotHere
from .programs import Program

SUITE = pathlib.Path(__file__).resolve().parent.parent
WORKLOADS = SUITE / "workloads"
PROFILES = next((SUITE.parent / "fake-cuda").glob("**/profiles"), SUITE)
# What `gshare run --compute` sets, for a program without the hook.
COMPUTE = {"PYTHONPATH": str(SUITE.parent / "fake-cuda/spec/python"), "GSHARE_SIM_COMPUTE": "1", "TRITON_INTERPRET": "1"}
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
LIBRARY_VARIABLES = {"GSHARE_HOOK_LIBRARY": "libgshare_hook.so", "GSHARE_SIM_LIBRARY": "libfake_cuda.so"}


@dataclasses.dataclass(frozen=True)
class Simulator:
    """The simulated device of `--sim`: a built-in profile and the CUDA version of its driver."""

    profile: str = "a100"
    driver: str = "13.2"

    def profile_text(self, kernel_us, keys):
        """The profile with other values of some keys, and one length in us for every kernel without a length in its name."""
        lines = [f'base = "{self.profile}"', *(f"{key} = {value}" for key, value in keys.items())]
        if kernel_us is not None:
            lines += ["[[kernel]]", 'name = "*"', f"duration_ns = {kernel_us * 1000}"]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The place of gshare, the value of `--sim` (`None`: the driver of this machine), and the driver's answers."""

    bin: pathlib.Path
    simulator: Simulator | None
    device: dict = dataclasses.field(default_factory=dict)

    @property
    def simulated(self):
        """Tells if the driver is the simulated one, by any way of reaching it."""
        return bool(self.device.get("simulated"))

    def built(self, file):
        """A library beside the command or in cargo's folder for tests, whichever is newer; None if both are missing."""
        places = [place for place in (self.bin / file, self.bin / "deps" / file) if place.exists()]
        return max(places, key=lambda place: place.stat().st_mtime, default=None)

    def libraries(self):
        """Variables that make the command take the same libraries as the suite."""
        found = {name: self.built(file) for name, file in LIBRARY_VARIABLES.items()}
        return {name: str(path) for name, path in found.items() if path}

    def node(self, **options):
        return Node(self, **options)


class Node:
    """A daemon of its own and, where simulated, a fresh device, for the length of a `with` block.

    `gpus` is how many the programs need. On a simulated device `kernel_us` sets the length of kernels, `driver` the version of
    the driver, and `keys` keys of the profile.
    """

    def __init__(self, machine, gpus=1, kernel_us=None, driver=None, **keys):
        self.machine, self.gpus, self.kernel_us, self.driver, self.keys = machine, gpus, kernel_us, driver, keys
        self.programs = []
        self.daemon = None

    def __enter__(self):
        count = self.machine.device.get("count", self.gpus)
        if self.machine.simulator is None and count < self.gpus:
            raise NotHere(f"needs {self.gpus} GPUs, there are {count}")
        if self.machine.simulator is None and "cut" in self.keys:
            raise NotHere("cuts a simulated GPU")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpu-suite-"))
        try:
            self.base = self._environment()
            self._start_daemon()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for program in self.programs:
            program.close()
        if self.daemon is not None:
            self.daemon.terminate()
            try:
                self.daemon.wait(10)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self):
        """The environment of every program, without the variables of gshare that the caller may have set."""
        simulator = self.machine.simulator
        # Without --sim the simulator may still be in the path of libraries, with the caller's settings.
        def keeps(name):
            return not name.startswith("GSHARE_") or (simulator is None and name.startswith("GSHARE_SIM_"))

        env = {name: value for name, value in os.environ.items() if keeps(name)}
        env |= self.machine.libraries()
        if simulator:
            links = self.folder / "driver"
            links.mkdir()
            for name in LIBRARIES:
                (links / name).symlink_to(self.machine.built("libfake_cuda.so"))
            profile = simulator.profile
            if self.kernel_us is not None or self.keys:
                profile = str(self.folder / "profile.toml")
                pathlib.Path(profile).write_text(simulator.profile_text(self.kernel_us, self.keys))
            env |= {
                "GSHARE_SIM_DEVICE": str(self.folder / "device"),
                "GSHARE_SIM_PROFILE": profile,
                "GSHARE_SIM_GPUS": str(self.gpus),
                "GSHARE_SIM_DRIVER_VERSION": self.driver or simulator.driver,
            }
        return env

    def _start_daemon(self):
        self.socket = self.folder / "gshare.sock"
        with open(self.folder / "daemon.log", "wb") as log:
            self.daemon = subprocess.Popen(
                [str(self.machine.bin / "gshare"), "daemon", "--config", "/dev/null", "--socket", str(self.socket)],
                env=self.base, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )
        end = time.monotonic() + 10
        while not self.socket.exists():
            if self.daemon.poll() is not None or time.monotonic() > end:
                raise Failed(f"the daemon does not start: {(self.folder / 'daemon.log').read_text()[-300:]}")
            time.sleep(0.01)

    def start(self, argv, hooked=None, env=None, name=None):
        """Starts a program bare (`hooked` is None) or under `gshare run` with these options."""
        environment = {**self.base, **(env or {})}
        argv = [str(word) for word in argv]
        name = name or f"{pathlib.Path(argv[1] if len(argv) > 1 else argv[0]).stem} {'bare' if hooked is None else 'hooked'}"
        if hooked is not None:
            sim = ["--sim"] if self.machine.simulator else []
            argv = [str(self.machine.bin / "gshare"), "run", "--socket", str(self.socket), *sim, *hooked, "--", *argv]
        elif self.machine.simulator:
            before = environment.get("LD_LIBRARY_PATH")
            driver = str(self.folder / "driver")
            environment["LD_LIBRARY_PATH"] = f"{driver}:{before}" if before else driver
        program = Program(argv, environment, name)
        self.programs.append(program)
        return program

    def workload(self, python, script, *options, **how):
        """Starts a script of `workloads/` with an interpreter."""
        return self.start([python, WORKLOADS / f"{script}.py", *options], **how)

    def gshare(self, *words, timeout=30):
        """The output of a command of gshare about this node's daemon; `Failed` with the command's error."""
        argv = [str(self.machine.bin / "gshare"), *words, "--socket", str(self.socket)]
        done = subprocess.run(argv, env=self.base, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise Failed(f"gshare {words[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def status(self):
        """`gshare status --json` of this node's daemon."""
        return json.loads(self.gshare("status", "--json"))

    def clients(self, name):
        """The clients of the instances of that name."""
        return [client for client in self.status()["clients"] if client["name"] == name]
