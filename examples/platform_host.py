#!/usr/bin/env python3
"""A host in another language: `gshare lab engine platform` decides, over two pipes, and this program starts the processes.

A process here is `cat`, and a request a line that it answers; the clock is the host's own, so that every run prints the same.

    python3 examples/platform_host.py [PATH-OF-GSHARE]
"""

import heapq
import itertools
import json
import subprocess
import sys

MS = 1_000_000
POINT = {"sm_basis_points": 2400, "quota_basis_points": 4000, "batch": 1, "throughput_milli_rps": 27_000, "p50_ns": 10 * MS, "p95_ns": 10 * MS}
FUNCTION = {
    "work": {"inference": {"profile": {"points": [POINT]}}},
    "slo_ns": 200 * MS,
    "min_instances": 1,
    "max_instances": 16,
    "memory_bytes": 2 << 30,
    "load_disk_ns": 300 * MS,
    "load_host_ns": 300 * MS,
}


class Host:
    def __init__(self, gshare):
        command = [gshare, "lab", "engine", "platform"]
        self.engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.now, self.deadline, self.ahead, self.order = 0, None, [], itertools.count()
        self.processes, self.sent, self.answered = {}, 0, 0

    def later(self, after, event, **fields):
        heapq.heappush(self.ahead, (self.now + after, next(self.order), event, fields))

    def tell(self, event, **fields):
        """One event in, its orders out."""
        self.engine.stdin.write(json.dumps({"now_ns": self.now, "event": {"event": event, **fields}}) + "\n")
        answer = json.loads(self.engine.stdout.readline())
        if "error" in answer:
            raise ValueError(f"{event}: {answer['error']}")
        self.deadline = answer["next_deadline_ns"]
        for order in answer["actions"]:
            self.obey(order)

    def obey(self, order):
        instance = order.get("instance")
        if order["action"] == "start":
            self.processes[instance] = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            self.later(300 * MS, "instance", instance=instance, report="ready")
        elif order["action"] == "stop":
            process = self.processes.pop(instance)
            process.kill()
            process.wait()
            self.later(0, "instance", instance=instance, report="gone")
        elif order["action"] == "dispatch":
            process = self.processes[instance]
            process.stdin.write(f"request {order['request']}\n")
            assert process.stdout.readline() == f"request {order['request']}\n"
            self.answered += 1
            self.later(36 * MS, "request_done", request=order["request"], took_ns=36 * MS)

    def run(self, until):
        while True:
            due = [at for at in (self.ahead[0][0] if self.ahead else None, self.deadline) if at is not None]
            if not due or min(due) > until:
                self.now = until
                return
            self.now = min(due)
            if self.deadline == self.now:
                self.tell("deadline_reached")
                continue
            _, _, event, fields = heapq.heappop(self.ahead)
            self.sent += event == "request_arrived"
            self.tell(event, **fields)


host = Host(sys.argv[1] if len(sys.argv) > 1 else "gshare")
for gpu in range(2):
    host.tell("device_found", gpu=gpu, spec={"node": 0, "kind": 0, "memory_bytes": 16 << 30})
host.tell("function_deployed", function=0, spec=FUNCTION)
requests = itertools.count()
print("load/s  processes  sent  answered")
for load in (20, 60, 110, 20):
    begun, sent, answered = host.now, host.sent, host.answered
    for number in range(3 * load):
        host.later(1000 * MS * number // load, "request_arrived", request=next(requests), function=0)
    host.run(begun + 3000 * MS)
    print(f"{load:6}  {len(host.processes):9}  {host.sent - sent:4}  {host.answered - answered:8}")
host.engine.kill()
for process in host.processes.values():
    process.kill()
