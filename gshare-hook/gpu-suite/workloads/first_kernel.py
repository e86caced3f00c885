"""A process that imports a framework, runs one kernel and waits for it: `first_kernel.py torch|driver`."""

import sys

if sys.argv[1] == "torch":
    import torch

    torch.ones(1024, device="cuda").add_(1)
    torch.cuda.synchronize()
else:
    import device

    launch, mark = device.Driver().spinner()
    launch()
    mark()()
