"""torch.distributed on simulated GPUs: every rank of one world. Run by test_gshare_sim.py under `gshare run --sim --compute`.

    python3 collectives.py WORLD
"""

import datetime
import os
import socket
import sys
import unittest

import torch
import torch.distributed as dist
from inside import losses
from torch.nn import functional

GPU = "cuda"


class OfARank(unittest.TestCase):
    def setUp(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks = range(self.world)

    def mine(self, offset=0.0, **options):
        """1, 2, 3 and so on by rank."""
        return torch.full((6,), self.rank + 1 + offset, device=GPU, **options)

    def test_names_are_nccls(self):
        self.assertEqual(dist.get_backend(), "nccl")
        self.assertEqual(torch.cuda.current_device(), self.rank)

    def test_reductions_of_every_kind_and_type(self):
        numbers = [rank + 1 for rank in self.ranks]
        expected = {"SUM": sum(numbers), "MAX": self.world, "MIN": 1, "AVG": sum(numbers) / self.world, "PRODUCT": 1}
        for number in numbers:
            expected["PRODUCT"] *= number
        for name, value in expected.items():
            x = self.mine()
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            self.assertEqual(x.tolist(), [value] * 6, name)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8):
            x = self.mine(dtype=dtype)
            dist.all_reduce(x)
            self.assertEqual(x.tolist(), [sum(numbers)] * 6, dtype)
        x = self.mine()
        dist.reduce(x, 0)
        if not self.rank:
            self.assertEqual(x.tolist(), [sum(numbers)] * 6)
        several = [self.mine(), self.mine(10.0)]
        with dist._coalescing_manager():
            for each in several:
                dist.all_reduce(each)
        self.assertEqual([each[0].item() for each in several], [sum(numbers), sum(numbers) + 10 * self.world])

    def test_bytes_go_where_they_belong(self):
        last = self.world - 1
        x = self.mine()
        dist.broadcast(x, last)
        self.assertEqual(x.tolist(), [self.world] * 6)
        parts = [torch.empty(6, device=GPU) for _ in self.ranks]
        dist.all_gather(parts, self.mine())
        self.assertEqual([part[0].item() for part in parts], [rank + 1 for rank in self.ranks])
        whole = torch.empty(6 * self.world, device=GPU)
        dist.all_gather_into_tensor(whole, self.mine())
        self.assertEqual(whole.reshape(self.world, 6)[:, 5].tolist(), [rank + 1 for rank in self.ranks])
        stacked = torch.empty(self.world, 2, 3, device=GPU)
        dist.all_gather_into_tensor(stacked.view(-1), self.mine().reshape(2, 3))
        self.assertEqual(stacked[:, 1, 2].tolist(), [rank + 1 for rank in self.ranks])
        part = torch.empty(2, device=GPU)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * self.world, device=GPU))
        self.assertEqual(part.tolist(), [self.world * 2 * self.rank, self.world * (2 * self.rank + 1)])
        dist.reduce_scatter(part, [torch.full((2,), float(rank), device=GPU) for rank in self.ranks])
        self.assertEqual(part.tolist(), [self.world * self.rank] * 2)
        taken, step = torch.empty(12, device=GPU), 12 // self.world
        dist.all_to_all_single(taken, torch.arange(12.0, device=GPU) + 100 * self.rank)
        self.assertEqual(taken[::step].tolist(), [100 * rank + step * self.rank for rank in self.ranks])
        outs = [torch.empty(1, device=GPU) for _ in self.ranks]
        dist.all_to_all(outs, [torch.full((1,), 10.0 * self.rank + to, device=GPU) for to in self.ranks])
        self.assertEqual([out.item() for out in outs], [10 * rank + self.rank for rank in self.ranks])
        x = torch.empty(6, device=GPU)
        dist.scatter(x, [torch.full((6,), float(rank), device=GPU) for rank in self.ranks] if self.rank == 0 else None, 0)
        self.assertEqual(x.tolist(), [self.rank] * 6)
        dist.gather(self.mine(), parts if self.rank == 0 else None, 0)
        objects = [None] * self.world
        dist.all_gather_object(objects, {"of": self.rank})
        self.assertEqual(objects, [{"of": rank} for rank in self.ranks])
        held = ["theirs"] if self.rank == 0 else [None]
        dist.broadcast_object_list(held, 0)
        self.assertEqual(held, ["theirs"])
        dist.barrier()
        dist.barrier(device_ids=[self.rank])

    def test_a_ring_of_sends(self):
        if self.world == 1:
            return
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        x = torch.empty(1 << 20, device=GPU)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.full((1 << 20,), float(self.rank), device=GPU), after),
            dist.P2POp(dist.irecv, x, before),
        ])  # fmt: skip
        for work in works:
            work.wait()
        self.assertEqual((x[0].item(), x[-1].item()), (before, before))
        if self.rank < 2:
            if self.rank:
                dist.recv(x, 0)
                self.assertEqual(x[7].item(), 5)
            else:
                dist.send(torch.full((1 << 20,), 5.0, device=GPU), 1)

    def test_a_work_is_done_at_its_wait(self):
        total = self.world * (self.world + 1) / 2
        x = self.mine()
        work = dist.all_reduce(x, async_op=True)
        y = torch.ones(100, device=GPU).sum()
        work.wait()
        self.assertTrue(work.is_completed())
        self.assertEqual((x[0].item(), y.item()), (total, 100))
        future = dist.all_reduce(x, async_op=True).get_future()
        self.assertEqual(future.wait()[0].data_ptr(), x.data_ptr())

    def test_a_captured_collective_runs_at_each_replay(self):
        x, graph = torch.ones(6, device=GPU), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.mul_(2)
            dist.all_reduce(x)
        self.assertEqual(x[0].item(), 1)
        for turn in (1, 2):
            graph.replay()
            self.assertEqual(x[0].item(), (2 * self.world) ** turn)

    def test_groups_of_some_ranks_and_meshes(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        group = dist.new_group(list(range((self.world + 1) // 2)))
        x = self.mine()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(x, group=group)
            self.assertEqual(x[0].item(), sum(range(1, (self.world + 1) // 2 + 1)))
        mesh = init_device_mesh(GPU, (self.world,), mesh_dim_names=("data",))
        self.assertEqual(mesh.get_group("data").size(), self.world)
        torch.manual_seed(1)
        a, b = torch.randn(8, 8), torch.randn(8, 8)
        product = distribute_tensor(a.to(GPU), mesh, [Shard(0)]) @ distribute_tensor(b.to(GPU), mesh, [Shard(0)])
        torch.testing.assert_close(product.full_tensor().cpu(), a @ b)

    def training(self, wrap, batch=12):
        """Losses and gradients of five steps: this rank's part of each batch, and the whole batch in one process."""
        seen = []
        for parts, rank, of in ((1, 0, lambda model: model), (self.world, self.rank, wrap)):
            torch.manual_seed(5)
            layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
            plain = torch.nn.Sequential(*layers).to(GPU)
            model, generator = of(plain), torch.Generator().manual_seed(1)
            optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-3), []
            for _ in range(5):
                inputs, labels = torch.randn(batch, 3, 8, 8, generator=generator), torch.randint(0, 10, (batch,), generator=generator)
                optimizer.zero_grad()
                mine = slice(rank * batch // parts, (rank + 1) * batch // parts)
                loss = functional.cross_entropy(model(inputs[mine].to(GPU)), labels[mine].to(GPU))
                loss.backward()
                optimizer.step()
                loss = loss.detach()
                if parts > 1:
                    dist.all_reduce(loss, dist.ReduceOp.AVG)
                values.append(loss.cpu())
            grads = [each.grad for each in model.parameters()]
            seen.append((values, [each.full_tensor().cpu() if hasattr(each, "full_tensor") else each.cpu() for each in grads]))
        return seen

    def equal_but_for_the_order_of_sums(self, seen):
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)
        if self.world == 1:
            self.assertEqual(seen[0][0], seen[1][0])
        self.assertGreater(max(each.abs().max().item() for each in seen[0][1]), 1e-3)

    def test_ddp_gives_the_losses_and_gradients_of_one_process(self):
        wrap = torch.nn.parallel.DistributedDataParallel
        for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True, "static_graph": True}):
            self.equal_but_for_the_order_of_sums(self.training(lambda model: wrap(model, device_ids=[self.rank], **options)))

    def test_ddp_with_the_same_batch_everywhere_gives_the_numbers_of_one_process(self):
        alone = losses(GPU)
        both = losses(GPU, lambda model: torch.nn.parallel.DistributedDataParallel(model, device_ids=[self.rank]))
        if self.world == 3:
            torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-6)
        else:
            # A sum of equal gradients over a power of two has no rounding.
            self.assertEqual(both, alone)

    def test_fsdp_gives_the_losses_and_gradients_of_one_process(self):
        from torch.distributed.fsdp import fully_shard

        self.equal_but_for_the_order_of_sums(self.training(fully_shard))

    def test_a_peer_that_never_comes_is_an_error(self):
        short = dist.new_group(timeout=datetime.timedelta(seconds=2))
        dist.all_reduce(self.mine(), group=short)
        if self.rank == 0 and self.world > 1:
            with self.assertRaisesRegex(RuntimeError, "Timed out"):
                dist.all_reduce(self.mine(), group=short)
            with self.assertRaises(RuntimeError):
                dist.all_reduce(self.mine(), group=short, async_op=True).get_future().wait()
        dist.barrier()

    def test_what_nccl_or_gloo_lacks_is_refused_by_name(self):
        with self.assertRaisesRegex(Exception, "recv_any_source_"):
            dist.recv(self.mine())
        with self.assertRaisesRegex(Exception, "PREMUL_SUM"):
            dist.all_reduce(self.mine(), dist._make_nccl_premul_sum(2.0))
        with self.assertRaisesRegex(RuntimeError, "No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(3))


def run(rank, world):
    torch.cuda.set_device(rank)
    # With a device, NCCL's groups of some ranks are parts of the first.
    device = torch.device(GPU, rank) if world == 4 else None
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60), device_id=device)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(OfARank)
    outcome = unittest.TextTestRunner(stream=sys.stderr, verbosity=2 if rank == 0 else 1).run(suite)
    dist.destroy_process_group()
    if not outcome.wasSuccessful() or not outcome.testsRun:
        sys.exit(1)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.multiprocessing.spawn(run, (int(sys.argv[1]),), nprocs=int(sys.argv[1]))
