#!/usr/bin/env python3
"""Cost of a decision for a host with the token engine behind two pipes, as JSON lines (`gshare lab engine token`).

    python3 benches/scripts/filter_cost.py [PATH-OF-GSHARE]

Prints, in microseconds: a round trip (an event in, its orders out) beside the same bytes through `cat`, the cost of
pipes and two changes of process alone; and the time of an event without a wait for the filter, the cost of
reading, deciding and writing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

CLIENTS, ROUNDS, RUNS = 64, 20_000, 5
MS = 1_000_000


def line(now, event, **fields):
    return (json.dumps({"now_ns": now, "event": {"event": event, **fields}}, separators=(",", ":")) + "\n").encode()


class Pipes:
    def __init__(self, command):
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.to, self.back = self.child.stdin.fileno(), self.child.stdout.fileno()

    def ask(self, text):
        os.write(self.to, text)
        answer = os.read(self.back, 65536)
        while not answer.endswith(b"\n"):
            answer += os.read(self.back, 65536)
        return answer

    def end(self):
        self.child.stdin.close()
        self.child.wait()


def median(values):
    return sorted(values)[len(values) // 2]


def joins():
    share = {"quota": {"request": 100, "limit": 10000}, "sm": 100}
    return [line(0, "client_joined", client=client, gpu=0, share=share) for client in range(CLIENTS)]


def conversation(gshare):
    """Clients which ask in turn and return each token after a millisecond: the lines, and their round trips in us."""
    engine = Pipes([gshare, "lab", "engine", "token"])
    lines, times, now, used = joins(), [], 0, [0] * CLIENTS
    for text in lines:
        assert b"error" not in engine.ask(text)
    for n in range(ROUNDS // 2):
        now += MS // 10
        text = line(now, "used", client=n % CLIENTS, used_ns=used[n % CLIENTS], state="wants")
        lines.append(text)
        begun = time.perf_counter_ns()
        answer = engine.ask(text)
        times.append(time.perf_counter_ns() - begun)
        granted = [order for order in json.loads(answer)["actions"] if order["action"] == "allow"]
        now += MS
        for order in granted:
            used[order["client"]] += MS
            text = line(now, "used", client=order["client"], used_ns=used[order["client"]], state="idle")
            lines.append(text)
            begun = time.perf_counter_ns()
            answer = engine.ask(text)
            times.append(time.perf_counter_ns() - begun)
            assert b"error" not in answer, answer
    engine.end()
    return lines, [took / 1e3 for took in times]


def main():
    gshare = sys.argv[1] if len(sys.argv) > 1 else "gshare"
    trips, floors, streams = [], [], []
    for _ in range(RUNS):
        lines, times = conversation(gshare)
        trips.append((median(times), sorted(times)[len(times) * 99 // 100]))
        cat = Pipes(["cat"])
        times = []
        for text in lines[CLIENTS:]:
            begun = time.perf_counter_ns()
            cat.ask(text)
            times.append((time.perf_counter_ns() - begun) / 1e3)
        cat.end()
        floors.append(median(times))
        with tempfile.TemporaryFile() as file:
            took = []
            for part in (lines[:CLIENTS], lines):
                file.seek(0)
                file.truncate()
                file.writelines(part)
                file.flush()
                file.seek(0)
                begun = time.perf_counter_ns()
                subprocess.run([gshare, "lab", "engine", "token"], stdin=file, stdout=subprocess.DEVNULL, check=True)
                took.append(time.perf_counter_ns() - begun)
            streams.append((took[1] - took[0]) / 1e3 / (len(lines) - CLIENTS))
    print(json.dumps({
        "clients": CLIENTS, "events": len(lines) - CLIENTS,
        "round_trip_p50_us": round(min(p50 for p50, _ in trips), 2), "round_trip_p99_us": round(min(p99 for _, p99 in trips), 2),
        "cat_p50_us": round(min(floors), 2), "event_us": round(min(streams), 2),
    }))


if __name__ == "__main__":
    main()
