"""Intervals of medians, and verdicts over intervals.

An interval is a distribution-free confidence interval of the median: the k-th smallest to the k-th largest of n samples, with
the largest k whose coverage by the binomial distribution is at least 95 % (n = 6 to 8: k = 1; 9 to 11: k = 2). No outlier of
a busy host moves it far, and nothing is assumed about the shape of the noise. Source: any text on order statistics, for
example David and Nagaraja, Order Statistics, section 7.1.
"""

import dataclasses
import math
import statistics

from .errors import Missed, Noisy

COVERAGE = 0.95
FEWEST = 6


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median with the bounds of its interval, in the unit of the samples."""

    median: float
    low: float
    high: float
    count: int

    @property
    def half_width(self):
        return (self.high - self.low) / 2

    def text(self, scale=1.0, digits=1, sign=""):
        def show(value):
            return f"{value * scale:{sign}.{digits}f}"

        return f"{show(self.median)} [{show(self.low)}, {show(self.high)}]"

    def json(self):
        return dataclasses.asdict(self)


def estimate(samples):
    """The median of at least six samples with its interval; `Noisy` for fewer samples, which have no interval."""
    samples = sorted(samples)
    count = len(samples)
    if count < FEWEST:
        raise Noisy(f"{count} samples: an interval takes {FEWEST}")
    rank = 1
    while 1 - 2 * _at_most(rank, count) >= COVERAGE:
        rank += 1
    return Estimate(statistics.median(samples), samples[rank - 1], samples[count - rank], count)


def _at_most(successes, trials):
    return sum(math.comb(trials, k) for k in range(successes + 1)) / 2**trials


def check_near(name, seen, target, tolerance):
    """Two-sided: the whole interval lies within `tolerance` of `target`, else `Missed` (wholly outside) or `Noisy`."""
    low, high = target - tolerance, target + tolerance
    if low <= seen.low and seen.high <= high:
        return
    text = f"{name}: {seen.text(digits=4)} instead of {target:g} +- {tolerance:g}"
    if seen.high < low or seen.low > high:
        raise Missed(text)
    raise Noisy(f"undecided, {text}")


def check_at_most(name, seen, bar):
    """One-sided, for a loss that cannot be negative: `seen` is at most `bar`.

    An interval wider than two bars, or wholly below minus the bar, makes the baseline doubtful.
    """
    text = f"{name}: {seen.text(100, 2, '+')} % against a bar of {bar * 100:g} %"
    if seen.low > bar:
        raise Missed(text)
    if seen.high < -bar:
        raise Noisy(f"hooked faster than bare by more than the bar, so the baseline is not to be trusted: {text}")
    if seen.half_width > bar:
        raise Noisy(f"interval too wide: {text}")
    if seen.high > bar:
        raise Noisy(f"undecided, {text}")


def check_at_least(name, seen, bar):
    """One-sided: the whole interval is at least `bar`."""
    if seen.low >= bar:
        return
    text = f"{name}: {seen.text(digits=3)} against a bar of {bar:g}"
    raise (Missed(text) if seen.high < bar else Noisy(f"undecided, {text}"))


def check_baseline(seen, tolerance):
    """A baseline for divisions is known to within `tolerance` of itself."""
    relative = seen.half_width / seen.median if seen.median > 0 else math.inf
    if relative > tolerance:
        raise Noisy(f"baseline known to +- {relative * 100:.1f} % only, {tolerance * 100:g} % allowed: {seen.text(digits=4)}")


def pair_losses(bare, hooked):
    """Loss of throughput of each pair of runs, from their times: 0 where both are equal, negative where hooked was faster."""
    return [1 - a / b for a, b in zip(bare, hooked, strict=True)]
