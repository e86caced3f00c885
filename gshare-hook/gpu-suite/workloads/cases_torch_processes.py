"""Cases of PyTorch with several processes: loader workers, tensors that another process shares, NCCL."""

import hashlib
import os
import tempfile

import report
import torch
import torch.multiprocessing as processes
from report import case

JOIN_SECONDS = 90


def load(method):
    """Batches of two workers, through pinned memory, onto the device."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.zeros(1, device="cuda")
    data = TensorDataset(torch.arange(256, dtype=torch.float32).reshape(64, 4))
    loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=True, multiprocessing_context=method)
    back = torch.cat([batch.cuda(non_blocking=True).cpu() for (batch,) in loader])
    return {"copied": torch.equal(back, data.tensors[0]), "batches": len(loader)}


@case
def loader_fork():
    return load("fork")


@case
def loader_spawn():
    return load("spawn")


def _refused(queue):
    try:
        torch.zeros(1, device="cuda")
        queue.put("nothing")
    except RuntimeError as error:
        queue.put(str(error).splitlines()[0][:60])


@case
def after_fork():
    """CUDA in a child that was forked after CUDA was initialised is refused in PyTorch's own words."""
    torch.zeros(1, device="cuda")
    context = processes.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_refused, args=(queue,))
    child.start()
    words = queue.get()
    child.join(JOIN_SECONDS)
    return {"words": words, "exit": child.exitcode}


def _reader(tensor, queue, done):
    queue.put((tensor.cpu().sum().item(), list(tensor.shape), str(tensor.device)))
    done.wait(JOIN_SECONDS)


@case
def ipc():
    """A tensor opened by another process by CUDA IPC: it reads the copied bytes."""
    context = processes.get_context("spawn")
    tensor = torch.arange(1000, dtype=torch.float32).cuda()
    queue, done = context.SimpleQueue(), context.Event()
    child = context.Process(target=_reader, args=(tensor, queue, done))
    child.start()
    total, shape, device = queue.get()
    done.set()
    child.join(JOIN_SECONDS)
    assert child.exitcode == 0, f"the reader ended with {child.exitcode}"
    return {"read": total, "shape": shape, "device": device}


def _sums(rank, world):
    x = torch.full((1 << 16,), float(rank + 1), device="cuda")
    torch.distributed.all_reduce(x)
    gathered = [torch.empty_like(x) for _ in range(world)]
    torch.distributed.all_gather(gathered, x)
    torch.distributed.broadcast(x, 0)
    torch.distributed.barrier()
    torch.cuda.synchronize()
    # A sum that kernels compute: a GPU gives world (world + 1) / 2.
    return x[0].item()


def _trained(rank, _):
    """Losses of this rank's part of each batch, and the gradients, which all ranks share."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank])
    optimizer, losses, generator = torch.optim.AdamW(model.parameters()), [], torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=generator).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = b"".join(each.grad.cpu().numpy().tobytes() for each in model.parameters())
    return losses, hashlib.sha256(gradients).hexdigest()


def _rank(rank, world, work, meeting, queue):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
    queue.put((rank, torch.distributed.get_world_size(), work(rank, world)))
    torch.distributed.destroy_process_group()


def nccl(world, work):
    context = processes.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        children = [context.Process(target=_rank, args=(rank, world, work, meeting, queue)) for rank in range(world)]
        for child in children:
            child.start()
        for child in children:
            child.join(JOIN_SECONDS)
        for child in children:
            if child.is_alive():
                child.kill()
        assert all(child.exitcode == 0 for child in children), f"ranks ended with {[c.exitcode for c in children]}"
    answers = sorted(queue.get() for _ in children)
    return {"ranks": [answer[:2] for answer in answers], "values": repr([answer[2] for answer in answers]).encode()}


@case
def nccl_1():
    return nccl(1, _sums)


@case
def nccl_2():
    return nccl(2, _sums)


@case
def ddp_2():
    return nccl(2, _trained)


if __name__ == "__main__":
    report.main()
