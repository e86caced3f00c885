"""Allocates until the limit and reports what it sees."""

import json

import torch

blocks, oom = [], False
try:
    while len(blocks) < 4096:
        blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    oom = True
free, total = torch.cuda.mem_get_info()
print(json.dumps({"oom": oom, "allocated": len(blocks) * (64 << 20), "free": free, "total": total}))
