"""Random numbers of the CUDA generator: its seed and offset decide, and each operator moves the offset on.

CUDA's numbers come from Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): thread t of a
kernel draws four words from the counter (offset / 4, t) with the seed as the key. PyTorch's kernels give element e of their output the
word e / threads of thread e mod threads, with as many threads as fit on the device. So `rand`, `randn`, `randint` and `bernoulli_(p)`
give the numbers of a real card with the same number of SMs; sines and logarithms of `randn` differ in their last bits. Other
distributions draw from a CPU generator that seed and offset determine.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_THREADS = 256
_LONG = torch.int64


def _multiply(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of products, in signed arithmetic of 64 bits: by halves."""
    low = words * (factor & 0xFFFF)
    high = words * (factor >> 16) + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & _WORD


def philox(seed: int, first: int, threads: int, calls: int) -> Tensor:
    """Words by call, place (0 to 3) and thread: what `calls` calls of each thread draw from counter `first` on."""
    counter = first + torch.arange(calls, dtype=_LONG).reshape(-1, 1)
    thread = torch.arange(threads, dtype=_LONG).reshape(1, -1)
    c0, c1, c2, c3 = torch.broadcast_tensors(counter & _WORD, counter >> 32, thread & _WORD, thread >> 32)
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=1)


class Source:
    """Generator and device of one call."""

    def __init__(self, generator: torch.Generator | None, device: int) -> None:
        torch.cuda.init()
        self.generator = generator if generator is not None else torch.cuda.default_generators[device]
        self.device = device

    def take(self, increment: int) -> tuple[int, int]:
        """Seed and offset; the offset moves on, in steps of four."""
        seed, offset = self.generator.initial_seed(), self.generator.get_offset()  # type: ignore[attr-defined]
        self.generator.set_offset(offset + (increment + 3) // 4 * 4)  # type: ignore[attr-defined]
        return seed & (1 << 64) - 1, offset

    def words(self, elements: int, at_once: int) -> Tensor:
        """Words for a kernel whose threads make `at_once` elements of a call: by call, place and thread."""
        device = torch.cuda.get_device_properties(self.device)
        most = device.multi_processor_count * (device.max_threads_per_multi_processor // _THREADS)
        threads = _THREADS * min(most, -(-elements // _THREADS))
        calls = (elements - 1) // (threads * at_once) + 1
        seed, offset = self.take(calls * 4)
        return philox(seed, offset // 4, threads, calls)


    def for_cpu(self) -> torch.Generator:
        """A generator of the host for one call."""
        seed, offset = self.take(4)
        # Any mixing serves that keeps pairs apart.
        return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + offset * 0xD1342543DE82EF95 + 1) & (1 << 63) - 1)


class Trial(Source):
    """For a run without effect: the generator stays as it is."""

    def take(self, increment: int) -> tuple[int, int]:
        return 0, 0


def _fill(to: Tensor, values: Tensor) -> Tensor:
    """Elements in the order of their addresses, as the kernels number them."""
    order = sorted(range(to.dim()), key=lambda i: -to.stride(i))
    view = to.permute(order)
    view.copy_(values.reshape(-1)[: to.numel()].reshape(view.shape))
    return to


def _unit(words: Tensor, is_double: bool) -> Tensor:
    """Numbers in (0, 1]: a word each in float32, or two in float64."""
    if is_double:
        return (words[:, 0::2] ^ words[:, 1::2] << 21).double() * 2.0**-53 + 2.0**-54
    # One rounding, as of a fused multiply and add.
    return (words.float().double() * 2.0**-32 + 2.0**-33).float()


def uniform_(self: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Source) -> Tensor:
    if low > high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    if not self.numel():
        return self
    is_double = self.dtype == torch.float64
    unit = _unit(generator.words(self.numel(), 2 if is_double else 4), is_double)
    first, last = (torch.tensor(end, dtype=self.dtype) for end in (low, high))
    span = (last - first).to(unit.dtype)
    values = (unit.double() * span.double() + first.double()).to(unit.dtype).to(self.dtype)
    return _fill(self, torch.where(values == last, first, values))


def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Source) -> Tensor:
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    if self.is_complex():
        normal_(torch.view_as_real(self), mean, std / math.sqrt(2), generator=generator)
        return self
    if not self.numel():
        return self
    is_double = self.dtype == torch.float64
    words = generator.words(self.numel(), 2 if is_double else 4)
    # Box and Muller: a pair of uniform numbers gives a pair of normal ones.
    unit = _unit(words, is_double)
    radius = torch.sqrt(-2 * torch.log(unit[:, 0::2]))
    angle = unit[:, 1::2].double() * (2 * math.pi)
    pair = torch.stack((torch.sin(angle).to(unit.dtype) * radius, torch.cos(angle).to(unit.dtype) * radius), dim=2)
    return _fill(self, (pair.reshape(pair.shape[0], -1, pair.shape[3]) * std + mean).to(self.dtype))


def _integers(self: Tensor, span: int, base: int, wide: bool, source: Source) -> Tensor:
    if not self.numel():
        return self
    words = source.words(self.numel(), 2 if wide else 4)
    words = _remainder(words[:, 0::2], words[:, 1::2], span) if wide else words % span
    return _fill(self, (words + base).to(self.dtype))


def _remainder(high: Tensor, low: Tensor, span: int) -> Tensor:
    """Of unsigned numbers in two words, in signed arithmetic."""
    if span & span - 1 == 0:
        return (high << 32 | low) & span - 1
    if span < 1 << 31:
        return (high % span * ((1 << 32) % span) + low) % span
    values = [(h << 32 | l) % span for h, l in zip(high.reshape(-1).tolist(), low.reshape(-1).tolist())]
    return torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=_LONG).reshape(high.shape)


def random_from(self: Tensor, low: int, high: int | None, *, generator: Source) -> Tensor:
    if high is None:
        top = 1 if self.dtype == torch.bool else 1 << _digits(self.dtype) if self.is_floating_point() else torch.iinfo(self.dtype).max
        span = top - low + 1
    else:
        if low >= high:
            raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
        span = high - low
    if span == 1 << 64:
        raise NotImplementedError("random_ over all 64 bits has no values on a simulated GPU")
    return _integers(self, span, low, span >= 1 << 28, generator)


def random_to(self: Tensor, high: int, *, generator: Source) -> Tensor:
    return random_from(self, 0, high, generator=generator)


def random_(self: Tensor, *, generator: Source) -> Tensor:
    if self.dtype == torch.bool:
        span = 2
    else:
        span = (1 << _digits(self.dtype)) + 1 if self.is_floating_point() else torch.iinfo(self.dtype).max + 1
    return _integers(self, span, 0, self.dtype in (torch.float64, torch.int64), generator)


def _digits(dtype: torch.dtype) -> int:
    return 1 - int(math.log2(torch.finfo(dtype).eps))


def bernoulli_(self: Tensor, p: float = 0.5, *, generator: Source) -> Tensor:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if not self.numel():
        return self
    is_double = self.dtype == torch.float64
    return _fill(self, _unit(generator.words(self.numel(), 2 if is_double else 4), is_double).double() < p)


def native_dropout(self: Tensor, p: float, train: bool | None, *, generator: Source) -> tuple[Tensor, Tensor]:
    if train is False or not p:
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    mask = bernoulli_(torch.empty_like(self, dtype=torch.float32), 1 - p, generator=generator).bool()
    return self * mask * (1 / (1 - p) if p < 1 else 0.0), mask


FORMS: dict[str, Callable[..., Any]] = {
    "uniform_": uniform_,
    "normal_": normal_,
    "random_": random_,
    "random_.from": random_from,
    "random_.to": random_to,
    "bernoulli_.float": bernoulli_,
    "native_dropout": native_dropout,
}
