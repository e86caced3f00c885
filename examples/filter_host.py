#!/usr/bin/env python3
"""A host in another language: the token engine as a filter, `gshare lab engine token`, over two pipes.

Three clients share GPU 0 for one second of virtual time. A client that holds a token uses all of it and asks again.

    python3 examples/filter_host.py [PATH-OF-GSHARE]
"""

import heapq
import json
import subprocess
import sys

MS = 1_000_000
SHARES = {"alice": (2000, 2000), "bob": (3000, 3000), "carol": (5000, 10000)}  # request, limit in 1/10 000


class Engine:
    """Events go in as lines, orders come out as lines: one for one."""

    def __init__(self, gshare):
        self.filter = subprocess.Popen(
            [gshare, "lab", "engine", "token"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.deadline = None

    def handle(self, now, event, **fields):
        self.filter.stdin.write(json.dumps({"now_ns": now, "event": {"event": event, **fields}}) + "\n")
        answer = json.loads(self.filter.stdout.readline())
        if "error" in answer:
            raise ValueError(f"{event}: {answer['error']}")
        self.deadline = answer["next_deadline_ns"]
        return answer["actions"]


def main():
    engine = Engine(sys.argv[1] if len(sys.argv) > 1 else "gshare")
    used = dict.fromkeys(SHARES, 0)
    names, returns, orders = list(SHARES), [], []
    for client, (request, limit) in enumerate(SHARES.values()):
        share = {"quota": {"request": request, "limit": limit}, "sm": 10000}
        engine.handle(0, "client_joined", client=client, gpu=0, share=share)
        orders += engine.handle(0, "used", client=client, used_ns=0, state="wants")
    now, end = 0, 1000 * MS
    while True:
        for order in orders:
            if order["action"] == "allow":
                left = order["allowed_ns"] - used[names[order["client"]]]
                heapq.heappush(returns, (now + left, order["client"], order))
        due = [at for at in (returns[0][0] if returns else None, engine.deadline) if at is not None]
        if not due or min(due) >= end:
            break
        now = min(due)
        if returns and returns[0][0] == now:
            order = heapq.heappop(returns)[2]
            client = order["client"]
            used[names[client]] = order["allowed_ns"]
            orders = engine.handle(now, "used", client=client, used_ns=order["allowed_ns"], state="wants")
        else:
            orders = engine.handle(now, "deadline_reached")
    print(json.dumps({name: round(time / end, 3) for name, time in used.items()}))


if __name__ == "__main__":
    main()
