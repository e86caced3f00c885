"""Trains a small network for a fixed number of steps, deterministically."""

import argparse
import time

import torch
from report import report
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(7)
torch.use_deterministic_algorithms(True, warn_only=True)
model = torch.nn.Sequential(
    torch.nn.Linear(1024, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10)
).cuda()
step_model = torch.compile(model) if args.compile else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(7)
data = TensorDataset(
    torch.randn(4096, 1024, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
)
loader = DataLoader(data, batch_size=256, num_workers=args.workers, pin_memory=True)


def epoch():
    for inputs, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(step_model(inputs.cuda(non_blocking=True)), labels.cuda())
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()


epoch()
start = time.perf_counter()
for _ in range(10):
    epoch()
seconds = time.perf_counter() - start
report(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()), seconds)
