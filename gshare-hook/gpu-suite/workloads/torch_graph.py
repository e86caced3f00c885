"""Captures a forward pass as a CUDA graph and replays it."""

import time

import torch
from report import report

torch.manual_seed(7)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda().eval()
inputs = torch.randn(64, 1024, device="cuda")
side = torch.cuda.Stream()
with torch.no_grad():
    with torch.cuda.stream(side):
        for _ in range(3):
            model(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model(inputs)
graph.replay()
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(5000):
    graph.replay()
torch.cuda.synchronize()
report(outputs.cpu().numpy().tobytes(), time.perf_counter() - start)
