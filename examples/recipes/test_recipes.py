"""Each recipe on the simulated driver. `gshare` and `gshare-openfaas` are on PATH.

A test says that it was skipped where its program is missing: podman-compose, nginx, promtool, systemd-analyze. Slurm and JupyterHub have
stand-ins that call the recipe as they would. So has Ray, and a real actor where Ray is installed.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
import unittest
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MONITORING = ROOT / "examples/kubernetes/monitoring"
sys.path[:0] = [str(ROOT / "gshare/python"), str(HERE / "ray"), str(ROOT / "gshare-hook/package")]
import gshare  # noqa: E402

# Allocates GiB in turn, until there is no more, and prints their number.
PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0)
context, memory, count = ctypes.c_void_p(), ctypes.c_uint64(), 0
if code == 0:
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
    while cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 30)) == 0:
        count += 1
print("no device" if code else count, flush=True)
"""
ALLOCATE = [sys.executable, "-c", PROGRAM]
METRIC = re.compile(r"\b(?:gshare|gateway|provider)_[a-z_]+")


def found():
    checks = json.loads(subprocess.check_output(["gshare", "doctor", "--json"]))["checks"]
    return {check["check"]: check["found"] for check in checks}


class Recipes(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place, self.files = pathlib.Path(place.name), found()
        driver = self.place / "driver"
        driver.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (driver / name).symlink_to(self.files["simulator"])
        self.socket = str(self.place / "gshare.sock")
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": str(driver),
            "GSHARE_SIM_DEVICE": str(self.place / "device"),
            "GSHARE_SOCKET": self.socket,
        }

    def needs(self, *programs):
        for name in programs:
            if not shutil.which(name):
                self.skipTest(f"{name} is missing")

    def start(self, *argv, **options):
        """A program until the end of the test."""
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        return process

    def daemon(self, config=""):
        file = self.place / "gshared.toml"
        file.write_text(config)
        process = self.start("gshare", "daemon", "--config", file, "--socket", self.socket, env=self.environment)
        while subprocess.run(["gshare", "status", "--socket", self.socket], capture_output=True).returncode:
            self.assertIsNone(process.poll(), "the daemon has ended")

    def host(self, *more):
        line = self.start("gshare-openfaas", "--set=host.no_gpu=true", "--listen=127.0.0.1:0", f"--state={self.place / 'state'}", *more).stdout.readline()
        return line.split()[1]

    def allocated(self, environment):
        return subprocess.check_output(ALLOCATE, env=self.environment | environment, text=True).strip()

    def test_a_slurm_job_gets_its_gres(self):
        programs = self.place / "bin"
        programs.mkdir()
        start = programs / "start"
        answer = 'echo "JobId=7 UserId=x(0) TresPerNode=$GRES Power="'
        daemon = f"gshare daemon --config /dev/null --socket {self.socket} --private 5s > {self.place}/log 2>&1 & sleep 1"
        for file, text in ((programs / "scontrol", f'[ "$*" = "show job 7 --oneliner" ] && {answer}'), (start, daemon)):
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)
        self.environment |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "GSHARE_SLURM_STATE": str(self.place / "slurm"),
            "GSHARE_HOOK": self.files["hook"],
            "GSHARE_START": str(start),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_UID": str(os.getuid()),
        }
        subprocess.run([HERE / "slurm/prolog.sh"], env=self.environment, check=True)
        jobs = {"gres:gshare:30,gres:gshare_mem:2": "2", "gres/gshare=30,gres/gshare_mem=3": "3", "gres:gpu:1": "no device"}
        for gres, wanted in jobs.items():
            script = subprocess.check_output([HERE / "slurm/task_prolog.sh"], env=self.environment | {"GRES": gres}, text=True)
            given = dict(line.removeprefix("export ").split("=", 1) for line in script.splitlines())
            self.assertEqual(self.allocated(given), wanted, script)
            if "GSHARE_RUN" in given:
                self.assertEqual(given["GSHARE_QUOTA"], "30%")
                self.assertEqual(given["GSHARE_RUN"], (self.place / "slurm/7").read_text().strip())
        self.assertEqual((self.place / "slurm/7").stat().st_mode & 0o777, 0o600)
        subprocess.run([HERE / "slurm/epilog.sh"], env=self.environment, check=True)
        self.assertFalse((self.place / "slurm/7").exists())

    def test_a_notebook_server_is_started_under_its_users_share(self):
        config = types.SimpleNamespace(Spawner=types.SimpleNamespace())
        exec((HERE / "jupyterhub/jupyterhub_config.py").read_text(), {"get_config": lambda: config})
        group = types.SimpleNamespace(name="teachers")
        self.daemon()
        for groups, wanted in (([], "4"), ([group], "16")):
            user = types.SimpleNamespace(name="ada", groups=groups)
            spawner = types.SimpleNamespace(user=user, name="", cmd=ALLOCATE)
            for _ in range(2):
                config.Spawner.pre_spawn_hook(spawner)
                self.assertEqual(subprocess.check_output(spawner.cmd, env=self.environment, text=True).strip(), wanted)
            self.assertEqual(spawner.cmd[:3], ["gshare", "run", "--name=hub-ada-default"])

    def test_a_ray_workers_environment_keeps_its_fraction(self):
        os.environ |= {"GSHARE_HOOK_LIBRARY": self.files["hook"], "GSHARE_SOCKET": self.socket}
        self.addCleanup(lambda: [os.environ.pop(name) for name in ("GSHARE_HOOK_LIBRARY", "GSHARE_SOCKET")])
        import gshare_ray

        self.daemon()
        options = gshare_ray.share(0.3, "2GiB")
        self.assertEqual(options["num_gpus"], 0.3)
        given = options["runtime_env"]["env_vars"]
        self.assertEqual((self.allocated(given), given["GSHARE_QUOTA"]), ("2", "30.00%"))
        # Without Ray the name is the recipe's folder.
        import ray

        if not hasattr(ray, "init"):
            return
        simulated = {key: self.environment[key] for key in ("LD_LIBRARY_PATH", "GSHARE_SIM_DEVICE")}
        ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, runtime_env={"env_vars": simulated})
        self.addCleanup(ray.shutdown)

        @ray.remote(**options)
        class Model:
            def allocate(self):
                return subprocess.check_output(ALLOCATE, text=True).strip(), "libgshare_hook" in open("/proc/self/maps").read()

        self.assertEqual(ray.get(Model.remote().allocate.remote()), ("2", True))

    def test_the_unit_is_one_of_systemd(self):
        self.needs("systemd-analyze")
        text = (HERE / "systemd/serve.service").read_text()
        start = re.search(r"^ExecStart=(.*)", text, re.MULTILINE)[1].replace("%%", "%").replace("%N", "serve")
        unit = self.place / "serve.service"
        unit.write_text(text.replace("/usr/bin/gshare", shutil.which("gshare")))
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        wrong = [line for line in done.stderr.splitlines() if "serve.service" in line and "gshared.service" not in line]
        self.assertEqual(wrong, [])
        self.daemon()
        argv = start.replace("/run/gshare/gshare.sock", self.socket).split()[1:]
        done = subprocess.run(["gshare", *argv[: argv.index("--") + 1], *ALLOCATE], env=self.environment, capture_output=True, text=True)
        self.assertEqual(done.stdout.strip(), "4", done.stderr)

    def test_rules_and_dashboard_ask_for_metrics_that_programs_write(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.daemon(f"metrics = '127.0.0.1:{port}'\n")
        host = gshare.Host(self.host())
        host.deploy("f", "gshare-openfaas --gpu-function", env={"KERNELS": "0"}, annotations={"gshare/profile": "none"})
        host.wait("f")
        host.invoke("f", path="headers")
        # The host publishes its figures once a second.
        time.sleep(1.5)
        written, page = set(), (ROOT / "docs/metrics.md").read_text()
        for address in (f"http://127.0.0.1:{port}", host.url):
            with urllib.request.urlopen(f"{address}/metrics") as answer:
                # Names as sampled, and families without a sample as declared.
                for line in answer.read().decode().splitlines():
                    kind = re.match(r"# TYPE (\S+) (\S+)", line)
                    suffix = "_total" if kind and kind[2] == "counter" and not kind[1].endswith("_total") else ""
                    written.add(kind[1] + suffix if kind else re.split(r"[{ ]", line)[0])
        board = json.loads((MONITORING / "host.json").read_text())
        queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        queries += re.findall(r"expr: (.*(?:\n {10}.*)*)", (MONITORING / "rules.yml").read_text())
        self.assertGreater(len(queries), 15)
        for query in queries:
            for name in METRIC.findall(query):
                self.assertIn(name, written, query)
                plain = re.sub(r"_(total|bucket)$", "", name)
                self.assertIn(f"`{plain}`", page, "docs/metrics.md")
        for panel in board["panels"]:
            self.assertTrue(panel["description"].endswith("."), panel["title"])

    def test_promtool_accepts_the_rules_and_sees_them_fire(self):
        self.needs("promtool")
        folder = HERE / "prometheus"
        subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["promtool", "test", "rules", "rules_test.yml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    def test_nginx_speaks_tls_for_the_host(self):
        self.needs("nginx", "openssl")
        credentials = self.place / "credentials"
        credentials.mkdir()
        (credentials / "basic-auth-user").write_text("admin")
        (credentials / "basic-auth-password").write_text("secret")
        url = self.host("--credentials", str(credentials))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        new = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        subprocess.run([*new.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=self.place, check=True, capture_output=True)
        server = (HERE / "tls/nginx.conf").read_text().replace("listen 443", f"listen 127.0.0.1:{port}")
        server = server.replace("/etc/gshare/tls", str(self.place)).replace("http://127.0.0.1:8080", url)
        paths = "".join(f"{name}_temp_path {self.place}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        around = f"daemon off; pid {self.place}/pid; error_log stderr; events {{}} http {{ access_log off; {paths} %s }}"
        (self.place / "nginx.conf").write_text(around % server)
        self.start("nginx", "-c", self.place / "nginx.conf", "-e", "stderr")
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        os.environ["SSL_CERT_FILE"] = str(self.place / "cert.pem")
        self.addCleanup(os.environ.pop, "SSL_CERT_FILE")
        host = gshare.Host(f"https://localhost:{port}", user="admin", password="secret")
        host.deploy("f", "gshare-openfaas --gpu-function", env={"KERNELS": "0"}, annotations={"gshare/profile": "none"})
        host.wait("f")
        self.assertEqual(host.invoke("f", b"x" * 200_000, path="echo"), b"x" * 200_000)
        with self.assertRaises(gshare.HostError) as caught:
            gshare.Host(f"https://localhost:{port}", user="admin", password="wrong").functions()
        self.assertEqual(caught.exception.status, 401)

    def test_containers_of_compose_get_their_shares(self):
        self.needs("podman", "podman-compose")
        import routes

        context = self.place / "context"
        context.mkdir()
        binary = shutil.which("gshare")
        libraries = [self.files["hook"], self.files["simulator"]]
        base = routes.own_base([binary, *libraries])
        for file in (binary, *libraries):
            shutil.copy(file, context)
        (context / "program.py").write_text(PROGRAM)
        driver = "/usr/local/lib/driver"
        (context / "Containerfile").write_text(
            f"FROM {base}\nCOPY gshare /usr/local/bin/\nCOPY libgshare_hook.so libfake_cuda.so /usr/local/lib/gshare/\nCOPY program.py /\n"
            f"COPY libfake_cuda.so {driver}/libcuda.so.1\nCOPY libfake_cuda.so {driver}/libnvidia-ml.so.1\n"
            f'ENV LD_LIBRARY_PATH={driver} GSHARE_SIM_DEVICE=/run/gshare/device\nENTRYPOINT ["gshare"]\n'
        )
        image = f"localhost/gshare-recipe:{os.getpid()}"
        subprocess.run(["podman", "build", "--quiet", "--network=host", "-t", image, context], check=True, stdout=subprocess.DEVNULL)
        self.addCleanup(subprocess.run, ["podman", "rmi", "--force", image], stdout=subprocess.DEVNULL)
        ran = subprocess.run(["podman", "run", "--rm", "--network=host", image, "--version"], capture_output=True, text=True)
        if ran.returncode:
            self.skipTest(f"podman runs no container: {ran.stderr}")
        text = (HERE / "compose/compose.yaml").read_text()
        # No GPU and no bridge here; the images of the programs are this one.
        text = text.replace('devices: ["nvidia.com/gpu=all"]', "network_mode: host").replace("ghcr.io/gshare/gshare:0.1.0", image)
        text = re.sub(r'command: \["python3", "\w+.py"\]', 'entrypoint: ["python3", "/program.py"]', text)
        (self.place / "compose.yaml").write_text(text)
        project = f"gshare-recipe-{os.getpid()}"
        compose = ["podman-compose", "--in-pod=false", "-p", project, "-f", str(self.place / "compose.yaml")]
        environment = os.environ | {"SERVE_IMAGE": image, "TRAIN_IMAGE": image}
        self.addCleanup(subprocess.run, [*compose, "down", "--volumes", "--timeout=1"], capture_output=True, env=environment)
        subprocess.run([*compose, "up", "--detach"], check=True, capture_output=True, env=environment, timeout=60)
        for service, wanted in (("serve", "4"), ("train", "16")):
            name = f"{project}_{service}_1"
            subprocess.run(["podman", "wait", name], check=True, stdout=subprocess.DEVNULL, timeout=60)
            logs = subprocess.run(["podman", "logs", name], capture_output=True, text=True)
            self.assertEqual(logs.stdout.strip(), wanted, logs.stderr)


if __name__ == "__main__":
    unittest.main()
