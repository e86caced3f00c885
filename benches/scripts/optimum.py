"""Optimal bins of the 80 small instances that `gshare-sched/tests/pack_optimum.rs` compares the batch packer with.

Needs OR-Tools (`pip install ortools`, Apache-2.0). Prints one Rust line per mix and size. An instance is `count` draws
of a mix from a SplitMix64 seed, as in `benches/src/mixes.rs`; seeds 1 to 10, 20 and 40 items.

Model: item i is in bin b (only b <= i, items by decreasing area); per bin no two rectangles overlap, and the area and
the heights over any vertical line fit; count up from the area bound to the first number that fits.
"""

import sys

from ortools.sat.python import cp_model

MASK = (1 << 64) - 1


class SplitMix64:
    def __init__(self, seed):
        self.state = seed

    def below(self, bound):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) % bound


def draw(mix, rng):
    if mix == "profile":
        return [20, 40, 60, 80, 100][rng.below(5)], [6, 12, 24, 50, 60, 80, 100][rng.below(7)]
    if mix == "light":
        quota = [20, 40, 60][rng.below(3)]
        return quota, [6, 6, 6, 6, 12, 12, 12, 12, 24, 24, 24, 50][rng.below(12)]
    most = 100 if mix == "fine" else 50
    return rng.below(most) + 1, rng.below(most) + 1


def fits(items, height, bins, seconds):
    """Whether the items fit `bins` bins; None when the time ran out."""
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") if b <= i else None for b in range(bins)] for i in range(len(items))]
    places = []
    for w, h in items:
        places.append((model.new_int_var(0, 100 - w, ""), model.new_int_var(0, height - h, "")))
    for i in range(len(items)):
        model.add_exactly_one(v for v in inside[i] if v is not None)
        for j in range(i):
            if items[i][0] + items[j][0] > 100 and items[i][1] + items[j][1] > height:
                for b in range(bins):
                    if inside[i][b] is not None and inside[j][b] is not None:
                        model.add_bool_or(inside[i][b].negated(), inside[j][b].negated())
    for b in range(bins):
        xs, ys, demands = [], [], []
        for i, (w, h) in enumerate(items):
            v = inside[i][b]
            if v is None:
                continue
            x, y = places[i]
            xs.append(model.new_optional_fixed_size_interval_var(x, w, v, ""))
            ys.append(model.new_optional_fixed_size_interval_var(y, h, v, ""))
            demands.append((w, h))
        model.add_no_overlap_2d(xs, ys)
        model.add_cumulative(xs, [h for _, h in demands], height)
        model.add_cumulative(ys, [w for w, _ in demands], 100)
        model.add(
            sum(w * h * inside[i][b] for i, (w, h) in enumerate(items) if inside[i][b] is not None) <= 100 * height
        )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    return {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}.get(status)


def optimum(mix, items):
    height = 100
    if mix == "light":
        # 6, 12, 24 and 50 % stack exactly as 1, 2, 4 and 8 sixteenths do, and the area bound is tight on those.
        height = 16
        items = [(w, {6: 1, 12: 2, 24: 4, 50: 8}[h]) for w, h in items]
    items = sorted(items, key=lambda item: -item[0] * item[1])
    bins = -(-sum(w * h for w, h in items) // (100 * height))
    while True:
        answer = fits(items, height, bins, 120)
        if answer is None:
            sys.exit(f"undecided: {bins} bins for {items}")
        if answer:
            return bins
        bins += 1


for mix in sys.argv[1:] or ["profile", "light", "fine", "half"]:
    for count in [20, 40]:
        best = []
        for seed in range(1, 11):
            rng = SplitMix64(seed)
            best.append(optimum(mix, [draw(mix, rng) for _ in range(count)]))
        print(f'(Mix::{mix.capitalize()}, {count}, {best}),', flush=True)
