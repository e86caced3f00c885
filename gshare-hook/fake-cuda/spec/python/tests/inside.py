"""Values of PyTorch's operators on the simulated GPU beside the CPU's. Run by test_gshare_sim.py under `gshare run --sim --compute`."""

import ctypes
import importlib.util
import multiprocessing
import threading
import unittest

import torch
from torch.nn import functional

HERE, GPU = "cpu", "cuda"
# Its operators live as long.
LIBRARY = torch.library.Library("theirs", "DEF")


def network():
    torch.manual_seed(5)
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    layers += [torch.nn.Linear(8 * 64, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*layers)


def losses(device, wrap=lambda model: model, **options):
    model = network().to(device)
    wrapped, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(5):
        inputs = torch.randn(4, 3, 16, 16, generator=generator).to(device)
        labels = torch.randint(0, 10, (4,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(wrapped(inputs), labels)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def scripted(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu() / (x + 3) - x


class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index)) ** 2


class Values(unittest.TestCase):
    def close(self, ours, theirs, **options):
        torch.testing.assert_close(ours.cpu(), theirs, **options)

    def test_training_gives_the_losses_of_the_cpu(self):
        theirs = losses(HERE)
        self.assertEqual(losses(GPU), theirs)
        self.assertEqual(losses(GPU, foreach=True), theirs)
        for ours, loss in zip(losses(GPU, fused=True), theirs):
            self.assertAlmostEqual(ours, loss, places=5)

    def test_graphs_of_torch_compile_give_the_losses_of_the_cpu(self):
        theirs = losses(HERE)
        for backend in ("eager", "aot_eager", "inductor"):
            torch._dynamo.reset()
            for ours, loss in zip(losses(GPU, lambda model: torch.compile(model, backend=backend)), theirs):
                self.assertAlmostEqual(ours, loss, places=5)

    def test_torchscript_runs_operators_where_it_would_fuse_them(self):
        fused = torch.jit.script(scripted)
        x = torch.arange(6.0, device=GPU)
        # Its second call would be of compiled code.
        for _ in range(4):
            self.close(fused(x), scripted(torch.arange(6.0)))

    def test_the_seed_gives_the_numbers_of_a_card(self):
        # Of torch.manual_seed(0) on NVIDIA cards.
        torch.manual_seed(0)
        self.close(torch.rand(6, device=GPU), torch.tensor([0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967]), rtol=0, atol=5e-5)
        torch.manual_seed(0)
        self.close(torch.randn(6, device=GPU), torch.tensor([-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797]), rtol=0, atol=5e-5)

    def test_random_operators_go_on_and_repeat_with_the_seed_and_leave_the_cpus_generator(self):
        draws = {
            "uniform_": lambda: torch.empty(3000, device=GPU).uniform_(2, 5),
            "double": lambda: torch.rand(3000, device=GPU, dtype=torch.float64),
            "randint": lambda: torch.randint(-5, 9, (3000,), device=GPU),
            "wide": lambda: torch.randint(0, 1 << 40, (3000,), device=GPU),
            "huge": lambda: torch.empty(3000, device=GPU, dtype=torch.int64).random_(),
            "bernoulli_": lambda: torch.empty(3000, device=GPU).bernoulli_(0.3),
            "dropout": lambda: functional.dropout(torch.ones(3000, device=GPU), 0.4),
            "exponential_": lambda: torch.empty(3000, device=GPU).exponential_(),
            "poisson": lambda: torch.poisson(torch.full((3000,), 4.0, device=GPU), torch.cuda.default_generators[0]),
            "multinomial": lambda: torch.multinomial(torch.ones(4, 9, device=GPU), 3),
            "randperm": lambda: torch.randperm(3000, device=GPU),
        }
        for name, draw in draws.items():
            torch.manual_seed(3)
            state = torch.get_rng_state()
            first, second = draw(), draw()
            torch.manual_seed(3)
            self.assertTrue(torch.equal(first, draw()), name)
            self.assertFalse(torch.equal(first, second), name)
            self.assertTrue(torch.equal(state, torch.get_rng_state()), name)
        generator = torch.Generator(GPU).manual_seed(3)
        self.assertFalse(torch.equal(torch.rand(9, device=GPU, generator=generator), torch.rand(9, device=GPU, generator=generator)))
        whole = draws["uniform_"]()
        self.assertTrue(2 <= whole.min().item() < 2.01 and 4.99 < whole.max().item() < 5)
        whole = draws["randint"]()
        self.assertEqual((whole.min().item(), whole.max().item()), (-5, 8))
        self.assertAlmostEqual(draws["bernoulli_"]().mean().item(), 0.3, delta=0.05)
        self.assertAlmostEqual(draws["wide"]().double().mean().item() / (1 << 40), 0.5, delta=0.05)

    def test_a_captured_graph_computes_at_each_replay_and_not_at_its_capture(self):
        model, inputs, count = network().to(GPU).eval(), torch.zeros(4, 3, 16, 16, device=GPU), torch.zeros(3, device=GPU)
        taken = torch.full((3,), 9.0, device=GPU)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.graph(graph):
                out = model(inputs)
                count.add_(1)
                torch.mul(count, 2, out=taken)
            self.assertEqual((count[0].item(), taken[0].item()), (0, 9))
            for turn in range(1, 4):
                inputs.fill_(turn)
                graph.replay()
                # Reads behind the replay, which runs on the driver's thread.
                self.close(model(inputs), out.cpu())
                self.assertEqual((count.tolist(), taken.tolist()), ([turn] * 3, [2 * turn] * 3))

        # As on a GPU: the host would have to wait for the number of elements.
        with self.assertRaisesRegex(RuntimeError, "during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.nonzero(count)

    def test_random_operators_of_a_graph_go_on_at_each_replay(self):
        x, graph = torch.ones(2000, device=GPU), torch.cuda.CUDAGraph()
        torch.manual_seed(4)
        with torch.cuda.graph(graph):
            dropped, drawn = functional.dropout(x, 0.25), torch.randn(2000, device=GPU)
        seen = []
        for seed in (4, None, 4):
            if seed is not None:
                torch.manual_seed(seed)
            graph.replay()
            seen.append((dropped.cpu(), drawn.cpu()))
        for first, second, again in zip(*seen):
            self.assertTrue(torch.equal(first, again))
            self.assertFalse(torch.equal(first, second))
        self.assertAlmostEqual(seen[0][0].mean().item(), 1, delta=0.1)
        torch.manual_seed(4)
        self.assertTrue(torch.equal(seen[0][0], functional.dropout(x, 0.25).cpu()), "as without a graph")

    def test_streams_events_and_threads_see_each_others_results(self):
        side, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.arange(1000.0, device=GPU)
        with torch.cuda.stream(side):
            y = x * 2
            event.record()
        event.wait()
        self.close(y + x, torch.arange(1000.0) * 3)
        seen = []
        worker = threading.Thread(target=lambda: seen.append((y + 1).sum().item()))
        worker.start()
        worker.join()
        self.assertEqual(seen, [1000 * 999 + 1000])

    def test_forms_that_write_to_their_arguments(self):
        x = torch.arange(6.0, device=GPU).reshape(2, 3)
        out = torch.empty(0, device=GPU)
        self.assertIs(torch.add(x, 1, out=out), out)
        self.close(out, torch.arange(1.0, 7).reshape(2, 3))
        into = torch.zeros(3, 2, device=GPU).t()
        torch.mul(x, 2, out=into)
        self.close(into, 2 * torch.arange(6.0).reshape(2, 3))
        values, places = torch.empty(0, device=GPU), torch.empty(0, dtype=torch.long, device=GPU)
        torch.sort(x, descending=True, out=(values, places))
        self.assertEqual((values[0].tolist(), places[0].tolist()), ([2, 1, 0], [2, 1, 0]))
        x[:, 1] = 7
        x.index_put_((torch.tensor([0]),), torch.tensor(5.0, device=GPU))
        self.assertEqual(x.tolist(), [[5, 5, 5], [3, 7, 5]])
        several = [torch.ones(2, device=GPU), torch.ones(3, device=GPU)]
        torch._foreach_add_(several, 2)
        self.assertEqual([each.tolist() for each in torch._foreach_sqrt(torch._foreach_mul(several, 3))], [[3, 3], [3, 3, 3]])
        z = torch.view_as_complex(torch.arange(4.0, device=GPU).reshape(2, 2))
        self.assertEqual((z.conj() * z).real.tolist(), [1, 13])
        self.assertEqual((2 ** torch.arange(3, device=GPU)).dtype, torch.int64)

    def test_copies_in_every_direction_and_layout(self):
        x = torch.arange(12).reshape(3, 4)
        there = x.t().to(GPU)
        self.close(there, x.t())
        self.close(there.to(torch.float16).t()[1:], x[1:].half())
        there[:, ::2].copy_(torch.zeros(4, 2))
        self.assertEqual(there.sum().item(), x[1].sum().item())
        pinned = x.pin_memory().to(GPU, non_blocking=True)
        self.assertEqual(pinned.sum().item(), 66)
        self.assertEqual(torch.nonzero(pinned > 9).tolist(), [[2, 2], [2, 3]])
        if torch.cuda.device_count() > 1:
            other = there.t().float().to("cuda:1")
            self.assertEqual((other * 2).sum().item(), there.sum().item() * 2)
            with self.assertRaisesRegex(RuntimeError, "two devices"):
                other + there.t()

    def test_recurrent_layers_and_every_way_of_attention(self):
        for kind in (torch.nn.LSTM, torch.nn.GRU):
            torch.manual_seed(1)
            here = kind(8, 16, 2, batch_first=True)
            there = kind(8, 16, 2, batch_first=True).to(GPU)
            there.load_state_dict(here.state_dict())
            inputs = torch.randn(3, 5, 8)
            pairs = [(layer, inputs.to(device, copy=True).requires_grad_()) for layer, device in ((here, HERE), (there, GPU))]
            outs = [layer(given)[0] for layer, given in pairs]
            for out in outs:
                out.square().sum().backward()
            self.close(outs[1], outs[0])
            self.close(pairs[1][1].grad, pairs[0][1].grad)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        plain = [torch.randn(2, 4, 32, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
        attend = functional.scaled_dot_product_attention
        theirs = attend(*plain, is_causal=True)
        grads = torch.autograd.grad(theirs.float().square().sum(), plain)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            given = [each.detach().to(GPU).requires_grad_() for each in plain]
            with sdpa_kernel(backend):
                out = attend(*given, is_causal=True)
            self.close(out, theirs, rtol=1e-2, atol=1e-2)
            for ours, grad in zip(torch.autograd.grad(out.float().square().sum(), given), grads):
                self.close(ours, grad, rtol=2e-2, atol=2e-2)

    def test_a_softmax_of_halves_may_be_one_of_floats(self):
        for of in (functional.softmax, functional.log_softmax):
            pairs = []
            for device in (HERE, GPU):
                x = torch.linspace(-3, 3, 12, dtype=torch.float16).reshape(3, 4).to(device).requires_grad_()
                out = of(x, 1, dtype=torch.float32)
                out.square().sum().backward()
                pairs.append((out.detach(), x.grad))
            for ours, theirs in zip(pairs[1], pairs[0]):
                self.close(ours, theirs)

    def test_a_type_that_the_cpu_lacks_is_computed_in_float32(self):
        x = torch.linspace(-3, 3, 64).half().reshape(1, 1, 4, 4, 4)
        ours = x.to(GPU).requires_grad_()
        theirs = x.float().requires_grad_()
        outs = [functional.avg_pool3d(given, 2) for given in (ours, theirs)]
        for out in outs:
            out.sum().backward()
        self.close(outs[0], outs[1].half(), rtol=0, atol=0)
        self.close(ours.grad, theirs.grad.half(), rtol=0, atol=0)

    def test_transforms_of_functions_and_loaders(self):
        x = torch.arange(6.0, device=GPU).reshape(2, 3)
        self.close(torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x), 3 * torch.arange(6.0).reshape(2, 3) ** 2)
        self.close(torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1], torch.cos(torch.arange(6.0).reshape(2, 3)))
        with torch.inference_mode():
            self.assertEqual((x + x).sum().item(), 30)
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            loader = torch.utils.data.DataLoader(Squares(), 4, num_workers=1, pin_memory=True, multiprocessing_context=context)
            self.assertEqual([batch.to(GPU).sum().item() for batch in loader], [14, 126])

    def test_tritons_kernels_run_by_its_interpreter(self):
        import kernels_triton

        x, out = torch.arange(1000.0, device=GPU), torch.zeros(1000, device=GPU)
        kernels_triton.double[(4,)](x, out, 1000, BLOCK=256)
        self.close(out, 2 * torch.arange(1000.0))
        with self.assertRaisesRegex(Exception, "no arithmetic of bfloat16"):
            kernels_triton.double[(4,)](x.bfloat16(), out, 1000, BLOCK=256)

    def test_a_profile_has_the_operators(self):
        from torch.profiler import ProfilerActivity, profile

        x = torch.ones(8, 8, device=GPU)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.assertEqual((x @ x).sum().item(), 512)
        self.assertIn("aten::mm", [event.key for event in seen.key_averages()])

    def test_an_operator_of_a_library_has_its_cpu_kernel_unless_python_has_written_one(self):
        LIBRARY.define("twice(Tensor x) -> Tensor")
        LIBRARY.impl("twice", lambda x: x * 3, "CPU")
        LIBRARY.impl("twice", lambda x: x * 2, "CUDA")
        self.assertEqual(torch.ops.theirs.twice(torch.ones(2, device=GPU)).tolist(), [2, 2])
        if importlib.util.find_spec("torchvision") is not None:
            from torchvision.ops import nms, roi_align

            boxes, scores = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [5, 5, 9, 9]]), torch.tensor([0.5, 0.9, 0.7])
            self.assertEqual(nms(boxes.to(GPU), scores.to(GPU), 0.5).tolist(), [1, 2])
            image = torch.arange(100.0).reshape(1, 1, 10, 10)
            pairs = [(image.to(device, copy=True).requires_grad_(), boxes.to(device)) for device in (HERE, GPU)]
            outs = [roi_align(given, [of], 2) for given, of in pairs]
            for out in outs:
                out.square().sum().backward()
            self.close(outs[1], outs[0])
            self.close(pairs[1][0].grad, pairs[0][0].grad)

    def test_memory_is_the_allocators(self):
        before = torch.cuda.memory_allocated()
        x = torch.ones(1 << 20, device=GPU)
        y = x + 1
        self.assertEqual(torch.cuda.memory_allocated() - before, 8 << 20)
        del x, y
        self.assertEqual(torch.cuda.memory_allocated(), before)

    def test_nothing_is_zero_in_silence(self):
        with self.assertRaisesRegex(RuntimeError, "found at least two devices, cuda:0 and cpu"):
            torch.ones(3, device=GPU) + torch.ones(3)
        with self.assertRaisesRegex(NotImplementedError, "aten::_cudnn_rnn_flatten_weight has no CPU kernel"):
            torch._cudnn_rnn_flatten_weight([torch.ones(4, 1, device=GPU)] * 2, 2, 1, 2, 1, 0, 1, False, False)
        with self.assertRaisesRegex(RuntimeError, "not implemented for 'UInt16'|not supported"):
            torch.ones(3, device=GPU, dtype=torch.uint16).softmax(0)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device=GPU)
        # PyTorch itself does not look at the error of this kernel.
        with self.assertRaisesRegex(NotImplementedError, "kernel `_ZN.*padding.*` has no values on a simulated GPU and was refused"):
            torch.nested.to_padded_tensor(nested, 0.0) + 1
        self.assertEqual((torch.ones(3, device=GPU) + 1).tolist(), [2, 2, 2])
        with self.assertRaisesRegex(RuntimeError, "CUDA error: operation not supported"):
            torch.nested.to_padded_tensor(nested, 0.0).cpu()
        self.assertEqual((torch.ones(3, device=GPU) * 3).tolist(), [3, 3, 3])
        # A CUDA extension, or any other library of the process.
        cuda = ctypes.CDLL("libcuda.so.1")
        module, function, none = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.assertEqual(cuda.cuModuleLoadData(ctypes.byref(module), b".version 8.0\n.visible .entry theirs() { ret; }\n"), 0)
        self.assertEqual(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"theirs"), 0)
        self.assertEqual(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, none, none, none), 801)
        # It does not look at the error, and the runtime library has none.
        with self.assertRaisesRegex(NotImplementedError, "kernel `theirs` has no values on a simulated GPU and was refused"):
            torch.ones(3, device=GPU)
        self.assertEqual((torch.ones(3, device=GPU) * 4).tolist(), [4, 4, 4])

    def test_a_refusal_is_settled_only_where_the_program_took_the_error(self):
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        library, kernel, none = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        text = b".version 8.0\n.visible .entry theirs() { ret; }\n"
        self.assertEqual(runtime.cudaLibraryLoadData(ctypes.byref(library), text, none, none, 0, none, none, 0), 0)
        self.assertEqual(runtime.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"theirs"), 0)

        def launch():
            self.assertEqual(runtime.cudaLaunchKernel(kernel, Dim3(1, 1, 1), Dim3(1, 1, 1), none, ctypes.c_size_t(0), none), 801)

        def elsewhere(act):
            worker = threading.Thread(target=act)
            worker.start()
            worker.join()

        def add():
            return (torch.ones(2, device=GPU) + 1).tolist()

        self.assertEqual(add(), [2, 2])
        # As PyTorch's own checks do.
        launch()
        self.assertEqual(runtime.cudaGetLastError(), 801)
        self.assertEqual(add(), [2, 2])
        for act in (launch, lambda: elsewhere(launch)):
            act()
            with self.assertRaisesRegex(NotImplementedError, "kernel `theirs` has no values on a simulated GPU and was refused"):
                add()
            self.assertEqual(add(), [2, 2])


if __name__ == "__main__":
    unittest.main()
