#!/usr/bin/env python3
"""Time of an operator on a simulated GPU that computes, beside the CPU's.

    gshare run --sim --compute -- python3 gshare-hook/fake-cuda/spec/python/tests/overhead.py

Operators of a few elements, so that both times are those of the call. The simulated time of a launch in its caller is part of the device's
(3 us with the profile a100; GSHARE_SIM_CALL_NS=0 takes it away).
"""

import argparse
import statistics
import time

import torch


def micros(call, calls, rounds=7):
    """Median over rounds; the device's work is waited for between rounds only."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begun) / calls * 1e6)
    return statistics.median(times[1:])


def operators(device):
    x, y = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)
    weight, bias = torch.randn(16, 16, device=device), torch.randn(16, device=device)
    image, filters = torch.randn(1, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
    functional = torch.nn.functional
    return {
        "add": lambda: x + y,
        "add_": lambda: x.add_(y),
        "mul by a number": lambda: x * 2.0,
        "relu": lambda: functional.relu(x),
        "sum": lambda: x.sum(1),
        "mm": lambda: x.mm(weight),
        "linear": lambda: functional.linear(x, weight, bias),
        "softmax": lambda: x.softmax(1),
        "layer_norm": lambda: functional.layer_norm(x, (16,)),
        "cat": lambda: torch.cat((x, y)),
        "conv2d": lambda: functional.conv2d(image, filters),
        "index_select": lambda: x.index_select(0, torch.zeros(2, dtype=torch.long, device=device)),
        "add, out=": lambda: torch.add(x, y, out=y),
    }


def step(device):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, labels = torch.randn(8, 16, device=device), torch.zeros(8, dtype=torch.long, device=device)

    def one():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round [default: 2000]")
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    here, there = operators("cpu"), operators("cuda")
    print("| operator | CPU, us | simulated GPU, us | difference, us |\n|---|---:|---:|---:|")
    for name in here:
        cpu, gpu = micros(here[name], calls), micros(there[name], calls)
        print(f"| {name} | {cpu:.1f} | {gpu:.1f} | {gpu - cpu:.1f} |")
    cpu, gpu = micros(step("cpu"), calls // 20), micros(step("cuda"), calls // 20)
    print(f"| a training step of 4 layers with AdamW | {cpu:.0f} | {gpu:.0f} | {gpu - cpu:.0f} |")


if __name__ == "__main__":
    main()
