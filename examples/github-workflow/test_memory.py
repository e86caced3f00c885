"""What a training step does with memory, tested without a GPU: `gshare run --sim --mem 2GiB -- python3 test_memory.py`.

Nothing here looks at a value that a kernel computed: the simulated device computes nothing, and counts every byte.
"""

import gc
import unittest

import torch

MIB = 1 << 20
BUDGET = 600 * MIB


def model():
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(8)]
    return torch.nn.Sequential(*layers).cuda()


def step(network, optimizer, batch):
    optimizer.zero_grad(set_to_none=True)
    network(torch.zeros(batch, 1024, device="cuda")).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()


def largest_batch(network, optimizer, batch):
    """Halves the batch until a step fits, as a trainer does that adapts to its GPU."""
    while True:
        try:
            step(network, optimizer, batch)
            return batch
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            batch //= 2


class Memory(unittest.TestCase):
    def setUp(self):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def test_the_device_has_what_the_limit_says(self):
        self.assertEqual(torch.cuda.mem_get_info()[1], 2048 * MIB)

    def test_a_step_of_64_keeps_within_the_budget(self):
        network = model()
        step(network, torch.optim.AdamW(network.parameters()), 64)
        self.assertLess(torch.cuda.max_memory_reserved(), BUDGET)

    def test_a_batch_that_is_too_large_is_halved_until_it_fits(self):
        network = model()
        batch = largest_batch(network, torch.optim.SGD(network.parameters()), 1 << 20)
        self.assertGreater(batch, 1 << 10)
        self.assertLess(batch, 1 << 20)

    def test_nothing_is_left_when_the_model_is_gone(self):
        before = torch.cuda.memory_allocated()
        network = model()
        step(network, torch.optim.AdamW(network.parameters()), 64)
        del network
        gc.collect()
        # cuBLAS keeps a workspace for each stream; a parameter that were left would be 4 MiB.
        self.assertLess(torch.cuda.memory_allocated() - before, 36 * MIB)


if __name__ == "__main__":
    unittest.main()
