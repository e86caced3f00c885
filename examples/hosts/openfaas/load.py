#!/usr/bin/env python3
"""Starts the OpenFaaS host on a simulated GPU, deploys a function and loads it: late and lost requests, replicas over time,
and what the proxy adds to a call.

    cargo build -p gshare-openfaas -p gshare-hook -p gshare-fake-cuda
    python3 examples/hosts/openfaas/load.py target/debug [--given] [--no-slack] [RATE:SECONDS...]

The function is deployed with an SLO of 69 ms, and measured; with --given it is given a share, 40 to 80 % of the time and 24 % of
the SMs. With --no-slack, too, the limit of that is 40 %.
"""
import json, os, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path

PROGRAMS = Path(sys.argv[1]).resolve()
SLACK = "--no-slack" not in sys.argv
PHASES = [phase for phase in sys.argv[2:] if not phase.startswith("--")] or ["30:15", "110:20", "20:25"]
SHARES = {"fastgshare/gpu_quota_request": "0.4", "fastgshare/gpu_quota_limit": "0.8" if SLACK else "0.4", "fastgshare/gpu_sm_partition": "24",
          "gshare/requests_per_second": "27"}


if "--given" not in sys.argv:
    SHARES = {"gshare/slo": "69ms"}


def deploy(url, name, **more):
    body = {"service": name, "image": str(PROGRAMS / "gpu_function"), **more}
    urllib.request.urlopen(url + "/system/functions", json.dumps(body).encode()).close()
    while json.load(urllib.request.urlopen(f"{url}/system/function/{name}"))["availableReplicas"] < 1:
        time.sleep(0.05)


with tempfile.TemporaryDirectory() as state:
    command = [PROGRAMS / "gshare-openfaas", "--listen", "127.0.0.1:0", "--sim=v100,devices=2", "--state", state]
    provider = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    direct = subprocess.Popen([PROGRAMS / "gpu_function"], stdout=subprocess.PIPE, env={**os.environ, "PORT": "9077", "KERNELS": "0"})
    try:
        url = provider.stdout.readline().split()[1]
        deploy(url, "resnet", annotations=SHARES)
        deploy(url, "plain", envVars={"KERNELS": "0"}, annotations={"gshare/profile": "none"})
        direct.stdout.readline()
        load = PROGRAMS / "openfaas_load"
        subprocess.run([load, url, "/function/resnet", *PHASES], check=True)
        subprocess.run([load, "overhead", url, "/function/plain/echo", "http://127.0.0.1:9077", "/echo"], check=True)
    finally:
        for child in (provider, direct):
            child.kill()
            child.wait()
