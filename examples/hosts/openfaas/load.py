#!/usr/bin/env python3
"""Starts the OpenFaaS host on a simulated GPU, deploys a function and loads it: late and lost requests, replicas over time,
and what the proxy adds to a call.

    cargo build -p gshare-openfaas -p gshare-hook -p gshare-fake-cuda
    python3 examples/hosts/openfaas/load.py target/debug [--no-slack] [RATE:SECONDS...]

With --no-slack the limit of a replica's GPU time is what it requests, 40 %, and not 80 %.
"""
import json, os, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path

PROGRAMS = Path(sys.argv[1]).resolve()
SLACK = "--no-slack" not in sys.argv
PHASES = [phase for phase in sys.argv[2:] if phase != "--no-slack"] or ["30:15", "110:20", "20:25"]
SHARES = {"fastgshare/gpu_quota_request": "0.4", "fastgshare/gpu_quota_limit": "0.8" if SLACK else "0.4", "fastgshare/gpu_sm_partition": "24",
          "gshare/requests_per_second": "27"}


def deploy(url, name, **more):
    body = {"service": name, "image": str(PROGRAMS / "gpu_function"), **more}
    urllib.request.urlopen(url + "/system/functions", json.dumps(body).encode()).close()
    while json.load(urllib.request.urlopen(f"{url}/system/function/{name}"))["availableReplicas"] < 1:
        time.sleep(0.05)


with tempfile.TemporaryDirectory() as state:
    command = [PROGRAMS / "gshare-openfaas", "--listen", "127.0.0.1:0", "--sim", "--state", state]
    provider = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    direct = subprocess.Popen([PROGRAMS / "gpu_function"], stdout=subprocess.PIPE, env={**os.environ, "PORT": "9077", "KERNELS": "0"})
    try:
        url = provider.stdout.readline().split()[1]
        deploy(url, "resnet", annotations=SHARES)
        deploy(url, "plain", envVars={"KERNELS": "0"})
        direct.stdout.readline()
        load = PROGRAMS / "openfaas_load"
        subprocess.run([load, url, "/function/resnet", *PHASES], check=True)
        subprocess.run([load, "overhead", url, "/function/plain/echo", "http://127.0.0.1:9077", "/echo"], check=True)
    finally:
        for child in (provider, direct):
            child.kill()
            child.wait()
