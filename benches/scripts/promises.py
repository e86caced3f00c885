#!/usr/bin/env python3
"""Promises of `gshare up` on real processes and simulated GPUs, as a JSON line for each result.

    python3 benches/scripts/promises.py GSHARE-OPENFAAS GPU_FUNCTION beside|turns|parking|classes|stages ...

- `beside`: functions of 1 to 60 ms of GPU time, each with an SLO of 5 to 10 times that, measured alone and beside a trainer that keeps
  the GPU busy: refusals, and each point's p95 beside the trainer by its p95 alone, the least of three measurements.
- `turns`: three functions of 9 GiB on two GPUs of 16 GiB, with a start of 3 s and two requests a second each: late requests, and parkings a
  minute, with memory moved and with processes ended.
- `parking`: ten functions of 60 % of a GPU each, with a start of 3 s, called with Zipf's frequencies, with their memory moved to host memory and back, and with
  their processes ended and started, their weights given or from the model store: latency, and the load before an answer by the time of the
  copies on the simulated link (`load_by_copy`). A fourth argument gives the seconds of calls, 240 without it.
- `classes`: a function beside a trainer with classes by its wish, and with one class for both: latency, and steps of the trainer.
- `stages`: a pipeline of two stages which hands 1 MiB on in shared memory, and in the body of a request: latency, and CPU time.
"""

import atexit
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HOST, FUNCTION = sys.argv[1:3]
POINT = {"sm_basis_points": 2500, "quota_basis_points": 2000, "batch": 1, "throughput_milli_rps": 20000, "p50_ns": 13000000}
POINTS = {"points": [{**POINT, "p95_ns": 28000000}]}


class Host:
    def __init__(self, *boards):
        self.folder = tempfile.TemporaryDirectory()
        command = [HOST, "--listen", "127.0.0.1:0", "--state", self.folder.name + "/state", *boards]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        atexit.register(self.child.kill)
        line = self.child.stdout.readline()
        self.address = line.split("http://")[1].split()[0]

    def file(self, name, value):
        path = f"{self.folder.name}/{name}"
        with open(path, "w") as file:
            json.dump(value, file)
        return path

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address, timeout=120)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def deploy(self, name, annotations, program=FUNCTION, **variables):
        variables = {key: str(value) for key, value in variables.items()}
        body = {"service": name, "image": "x", "envProcess": program, "annotations": annotations, "envVars": variables}
        status, said = self.call("POST", "/system/functions", body)
        assert status == 202, (name, status, said)

    def delete(self, name):
        self.call("DELETE", "/system/functions", {"functionName": name})
        within(lambda: self.call("GET", f"/system/function/{name}")[0] == 404)

    def ask(self, name):
        """A request's latency in ms, infinite for a failure, and the load that it waited for."""
        sent, connection = time.monotonic(), http.client.HTTPConnection(self.address, timeout=120)
        connection.request("GET", f"/function/{name}")
        answer = connection.getresponse()
        answer.read()
        connection.close()
        load = re.search(r"load;dur=([\d.]+)", answer.getheader("Server-Timing", ""))
        took = (time.monotonic() - sent) * 1e3
        return took if answer.status == 200 else float("inf"), float(load[1]) if load else None

    def status(self, name):
        return json.loads(self.call("GET", f"/system/function/{name}")[1])["gshare"]

    def metric(self, name, function):
        wanted = f'{name}{{function_name="{function}"}} '
        lines = self.call("GET", "/metrics")[1].splitlines()
        return next(float(line[len(wanted):]) for line in lines if line.startswith(wanted))

    def trainer(self):
        self.deploy("train", {"gshare/workload": "training", "fastgshare/gpu_mem": "1GiB"}, STEPS=1000000, KERNELS=1)
        within(lambda: any(one["life"] == "ready" for one in self.status("train")["instances"]))

    def load(self, names, rate, seconds):
        """Requests at a fixed rate to each function: their latencies in ms; a failed one counts as infinite."""
        took, threads, begun = {name: [] for name in names}, [], time.monotonic()

        def ask(name):
            sent = time.monotonic()
            status, _ = self.call("GET", f"/function/{name}")
            took[name].append((time.monotonic() - sent) * 1e3 if status == 200 else float("inf"))

        for number in range(int(rate * seconds)):
            for name in names:
                threads.append(threading.Thread(target=ask, args=(name,)))
                threads[-1].start()
            time.sleep(max(0, begun + (number + 1) / rate - time.monotonic()))
        for thread in threads:
            thread.join()
        return {name: sorted(all) for name, all in took.items()}

    def end(self):
        self.child.kill()
        self.child.wait()


def within(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def say(**row):
    print(json.dumps({**row, "machine_load": round(os.getloadavg()[0], 1)}), flush=True)


def at(sorted_values, percent):
    return round(sorted_values[(len(sorted_values) - 1) * percent // 100], 2) if sorted_values else None


def measured(host, name, micros, slo_ms):
    """The points of a function, how disturbed they were, and why it is refused; and how long all of that took."""
    kernels = max(1, micros // 2000)
    begun = time.monotonic()
    host.deploy(name, {"gshare/slo": f"{slo_ms}ms"}, KERNELS=kernels, KERNEL_US=micros // kernels)
    within(lambda: host.status(name).get("profile") or host.status(name).get("problem"))
    took, status = time.monotonic() - begun, host.status(name)
    host.delete(name)
    points = (status.get("profile") or {"points": []})["points"]
    by_setting = {(one["sm_basis_points"], one["quota_basis_points"]): one["p95_ns"] / 1e6 for one in points}
    return by_setting, status.get("others_bp"), status.get("problem"), took


def beside():
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 20
    functions = [(number, round(1000 * 60 ** (number / max(1, count - 1)))) for number in range(count)]
    host, ratios = Host("--sim=v100"), []
    alone = {}
    for trained in (False, False, False, True):
        if trained:
            host.trainer()
        for number, micros in functions:
            slo = max(1, round(micros * (5 + number * 7 % 6) / 1000))
            points, others, problem, took = measured(host, f"f{number}", micros, slo)
            row = {"gpu_ms": micros / 1e3, "slo_ms": slo, "trainer": trained, "others_bp": others, "refused": problem}
            if trained:
                row["p95_by_alone"] = {f"{sm}x{quota}": round(p95 / alone[number][sm, quota], 3)
                                       for (sm, quota), p95 in points.items() if (sm, quota) in alone[number]}
                ratios += row["p95_by_alone"].values()
            else:
                known = alone.setdefault(number, {})
                alone[number] = {**known, **{at: min(p95, known.get(at, p95)) for at, p95 in points.items()}}
            say(**row, p95_ms={f"{sm}x{quota}": round(p95, 2) for (sm, quota), p95 in points.items()}, seconds=round(took, 1))
    near = sum(0.85 <= ratio <= 1.15 for ratio in ratios)
    say(points=len(ratios), within_15_percent=near, least=min(ratios), most=max(ratios))
    host.end()


def turns():
    for parks in ("true", "false"):
        turns_of(parks)


def turns_of(parks):
    host, seconds, names = Host("--sim=v100,devices=2"), 60, ["a", "b", "c"]
    profile = host.file("points.json", POINTS)
    for name in names:
        wishes = {"gshare/slo": "6s", "fastgshare/gpu_mem": "9GiB", "gshare/profile": profile, "gshare/park": parks}
        host.deploy(name, wishes, WEIGHTS_MIB=96, START_MS=3000)
        host.call("GET", f"/function/{name}")
    parked = lambda: sum(host.metric("gshare_instances_parked", name) for name in names)
    before = parked()
    took = sorted(sum(host.load(names, 2, seconds).values(), []))
    say(parks=parks, requests=len(took), late=sum(one > 6000 for one in took), p50_ms=at(took, 50), p95_ms=at(took, 95),
        p99_ms=at(took, 99), longest_ms=at(took, 100), parkings_a_minute=(parked() - before) * 60 / seconds)
    host.end()


# A small GPU with a slow link: this machine takes a tenth of the link's time to copy the same bytes, so that it adds little.
LINK = 150_000_000
SMALL = f'base = "v100"\nmemory_bytes = {256 << 20}\ncontext_bytes = {4 << 20}\nhost_bandwidth = {LINK}\n'


def safetensors(path, megabytes):
    header = json.dumps({"w": {"dtype": "U8", "shape": [megabytes << 20], "data_offsets": [0, megabytes << 20]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (megabytes << 20))
    return path


def parking():
    count, mib, seconds = 10, 96, int(sys.argv[4]) if len(sys.argv) > 4 else 240
    draw = random.Random(1)
    weights = [1 / (number + 1) for number in range(count)]
    calls, now = [], 0.0
    while now < seconds:
        now += draw.expovariate(0.4)
        calls.append((now, draw.choices(range(count), weights)[0]))
    for way in ("parked", "ended", "ended, weights from the store"):
        with tempfile.TemporaryDirectory() as folder:
            board = pathlib.Path(folder, "small.toml")
            board.write_text(SMALL)
            host, took, loads = Host(f"--sim={board}"), [], []
            profile = host.file("points.json", POINTS)
            for number in range(count):
                wishes = {"gshare/slo": "20s", "fastgshare/gpu_mem": "154MiB", "gshare/profile": profile}
                if way == "ended":
                    wishes["gshare/park"] = "false"
                if way.endswith("store"):
                    wishes["gshare/model"] = safetensors(f"{folder}/{number}.safetensors", mib)
                    wishes["fastgshare/gpu_mem"] = "58MiB"
                host.deploy(f"f{number}", wishes, WEIGHTS_MIB=mib, KERNELS=5, START_MS=3000)
                host.ask(f"f{number}")
            starts = sum(host.metric("gshare_instance_starts", f"f{number}") for number in range(count))

            def ask(number):
                took.append(host.ask(f"f{number}"))

            begun, threads = time.monotonic(), []
            for due, number in calls:
                time.sleep(max(0, begun + due - time.monotonic()))
                threads.append(threading.Thread(target=ask, args=(number,)))
                threads[-1].start()
            for thread in threads:
                thread.join()
            latencies = sorted(ms for ms, _ in took)
            copy = mib * 2**20 / LINK * 1e3
            loads = sorted(load / copy for _, load in took if load)
            say(way=way, requests=len(took), late=sum(ms > 20_000 for ms in latencies), p50_ms=at(latencies, 50), p95_ms=at(latencies, 95),
                p99_ms=at(latencies, 99), loads=len(loads), load_by_copy_p50=at(loads, 50), load_by_copy_p95=at(loads, 95),
                starts=sum(host.metric("gshare_instance_starts", f"f{number}") for number in range(count)) - starts)
            host.end()


def classes():
    for rate, follows in [(20, True), (20, False), (40, True), (40, False)] * 2:
        host = Host("--sim=v100")
        one_class = {} if follows else {"gshare/class": "best-effort"}
        host.trainer()
        share = {"fastgshare/gpu_quota_request": "0.3", "fastgshare/gpu_quota_limit": "0.6", "fastgshare/gpu_mem": "1GiB"}
        host.deploy("vision", {"gshare/slo": "100ms", "gshare/profile": "none", **share, **one_class}, KERNELS=5)
        host.call("GET", "/function/vision")
        used = lambda: host.metric("gshare_function_gpu_seconds", "train")
        before, begun = used(), time.monotonic()
        took = host.load(["vision"], rate, 20)["vision"]
        trained = (used() - before) / (time.monotonic() - begun)
        say(requests_a_second=rate, classes_by_wish=follows, p50_ms=at(took, 50), p95_ms=at(took, 95), trainer_part_of_gpu=round(trained, 3))
        host.end()


def stages():
    on = lambda name, ms: {"slice": name, "time_ns": ms * 10**6, "memory_bytes": 6 << 30}
    component = lambda name: {"name": name, "profiles": [on("1g.10gb", 40), on("2g.20gb", 22)]}
    dag = {"name": "two", "components": [component("detect"), component("classify")],
           "edges": [{"from": "detect", "to": "classify", "bytes": 1 << 20}]}
    for shared in (True, False) * 2:
        host = Host("--sim=a100,mig=1g.10gb+1g.10gb")
        program = FUNCTION if shared else f"env -u GSHARE_BETWEEN {FUNCTION}"
        annotations = {"gshare/workload": "pipeline", "gshare/dag": host.file("dag.json", dag), "gshare/slo": "500ms"}
        host.deploy("pipe", annotations, program, KERNELS=1, FILE_KIB=1024)
        _, body = host.call("GET", "/function/pipe")
        assert ("file_bytes" in body) == shared, body[:300]
        ticks = lambda: sum(map(int, open(f"/proc/{host.child.pid}/stat").read().rsplit(") ", 1)[1].split()[11:13]))
        before = ticks()
        took = host.load(["pipe"], 2, 20)["pipe"]
        cpu = (ticks() - before) * 1e3 / os.sysconf("SC_CLK_TCK") / len(took)
        say(shared_memory=shared, p50_ms=at(took, 50), p95_ms=at(took, 95), mean_ms=round(statistics.mean(took), 2),
            host_cpu_ms_a_request=round(cpu, 2))
        host.end()


for name in sys.argv[3:4] or ["beside"]:
    {"beside": beside, "turns": turns, "parking": parking, "classes": classes, "stages": stages}[name]()
