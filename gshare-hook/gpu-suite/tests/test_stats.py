"""The judgements of the suite, on samples with a known verdict."""

import unittest

from gpusuite import stats
from gpusuite.errors import Missed, Noisy


class Intervals(unittest.TestCase):
    def test_ranks_give_at_least_95_per_cent(self):
        for count, rank in [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6)]:
            seen = stats.estimate(range(count))
            self.assertEqual((seen.low, seen.high), (rank - 1, count - rank), count)

    def test_five_samples_have_no_interval(self):
        with self.assertRaisesRegex(Noisy, "5 samples"):
            stats.estimate([1.0] * 5)

    def test_one_outlier_of_nine_does_not_move_the_interval(self):
        self.assertEqual(stats.estimate([1, 2, 3, 4, 5, 6, 7, 8, 1e9]).high, 8)


class Losses(unittest.TestCase):
    def judge(self, samples, bar=0.01):
        stats.check_at_most("loss", stats.estimate(samples), bar)

    def test_a_small_loss_passes(self):
        self.judge([0.001, 0.002, 0.0, -0.001, 0.003, 0.002])

    def test_a_great_loss_is_missed(self):
        with self.assertRaises(Missed):
            self.judge([0.05, 0.06, 0.055, 0.05, 0.052, 0.06])

    def test_hooked_runs_that_are_three_times_as_fast_are_refused(self):
        with self.assertRaisesRegex(Noisy, "not to be trusted"):
            self.judge([-2.09] * 6)

    def test_a_wide_interval_below_the_bar_is_refused(self):
        with self.assertRaisesRegex(Noisy, "too wide"):
            self.judge([-0.5, -0.2, 0.0, -0.1, 0.005, -0.3])

    def test_an_interval_around_the_bar_decides_nothing(self):
        with self.assertRaisesRegex(Noisy, "undecided"):
            self.judge([0.006, 0.008, 0.01, 0.012, 0.014, 0.007])

    def test_losses_of_pairs(self):
        self.assertEqual(stats.pair_losses([1.0, 1.0], [2.0, 1.0]), [0.5, 0.0])


class Shares(unittest.TestCase):
    def judge(self, samples):
        stats.check_near("share", stats.estimate(samples), 0.4, 0.02)

    def test_within(self):
        self.judge([0.39, 0.4, 0.41, 0.405, 0.395, 0.4])

    def test_outside(self):
        with self.assertRaises(Missed):
            self.judge([0.3] * 6)

    def test_across_the_edge(self):
        with self.assertRaises(Noisy):
            self.judge([0.37, 0.4, 0.4, 0.4, 0.4, 0.4])

    def test_a_restless_baseline_is_refused(self):
        with self.assertRaisesRegex(Noisy, "baseline"):
            stats.check_baseline(stats.estimate([1, 2, 3, 4, 5, 6]), 0.02)
        stats.check_baseline(stats.estimate([100.0, 100.5, 101, 100, 100, 100]), 0.02)


class Floors(unittest.TestCase):
    def test_verdicts(self):
        stats.check_at_least("speed", stats.estimate([0.99] * 6), 0.98)
        with self.assertRaises(Missed):
            stats.check_at_least("speed", stats.estimate([0.5] * 6), 0.98)
        with self.assertRaises(Noisy):
            stats.check_at_least("speed", stats.estimate([0.5, 0.99, 0.99, 0.99, 0.99, 0.99]), 0.98)


if __name__ == "__main__":
    unittest.main()
