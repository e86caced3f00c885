//! Shares that can be promised together on one GPU: four tests, from sound to hopeful.
//!
//! | test | a set passes when | promise |
//! |---|---|---|
//! | [`rectangles`] | an arrangement of rectangles was found | slots of fixed time and SMs ([`SlotTable`]) |
//! | [`cumulative`] | contiguous cyclic slots were found, SMs anywhere | the same slots, without SM intervals |
//! | [`fractional`] | slots cut in pieces suffice | every quota, if the dispatcher follows the pieces |
//! | [`area_oversubscribed`] | the areas sum to at most one GPU | **none**: two wide placements may exclude each other |
//!
//! Each set that passes one line passes the next. MPS reserves no particular SMs (its percentage is a cap), so the
//! second is as sound as the first. The third is exact: no schedule at all serves a set that it refuses.
//!
//! # The fractional test
//! A *mix* is a set of placements whose SMs fit together. Choose how long each mix runs, so that each placement runs
//! for its quota in all, and the total is at most one window: a linear program whose columns (mixes) are found as
//! needed, the best next one by a knapsack over the SMs (column generation; Gilmore and Gomory, Operations Research 9,
//! 1961).
//!
//! Floating point only proposes. An answer is checked in integers before it is given: a schedule, in millionths of a
//! basis point, by adding it up; a refusal by prices in integers such that no mix is worth more than the price of its
//! time (a knapsack in integers) while the quotas together are worth more than a window. An answer that neither check
//! proves is [`Verdict::Undecided`], and must be taken as a refusal.
//!
//! Worked example, in per cent: 60 x 60, 60 x 50, 60 x 40 (quota x SMs). The first two never run together. Rectangles
//! need 120 for them. Mixes: {60, 40} and {50, 40}: 60 + 60 > 100, refused: with price 1 for the first two and 0 for
//! the third no mix is worth more than 1, and the quotas are worth 120.
//!
//! # Cost
//! Some tens of knapsacks of (placements x 10 000 / g) steps, g the common divisor of the SM shares.

use gshare_core::{Quota, SmShare};

use super::SlotTable;
use super::geometry::Rect;
use super::rearrange::Arranger;

/// Demand of one client on a GPU: share of time, share of SMs.
pub type Want = (Quota, SmShare);

/// The answer of [`fractional`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// All quotas can be kept, in this way: each mix (indices into the set) runs for that many millionths of
    /// a basis point of each window. Every quota is kept to within as many millionths of a basis point as there are mixes.
    Admitted(Vec<(Vec<usize>, u64)>),
    /// No schedule keeps all quotas.
    Refused,
    /// Neither was proved. To be taken as a refusal.
    Undecided,
}

/// Whether an arrangement of rectangles was found. Sound; may refuse a set that fits (it tries twelve arrangements).
pub fn rectangles(wants: &[Want]) -> bool {
    let items = wants.iter().map(|(q, sm)| Rect::new(0, 0, q.get(), sm.get()));
    Arranger::default().arrange(Rect::new(0, 0, WINDOW, WINDOW), items)
}

/// Whether one contiguous slot each was found, wrapping round the window, such that the SMs never add up to more than
/// the whole. Sound; may refuse a set that fits.
pub fn cumulative(wants: &[Want]) -> bool {
    let wants: Vec<(usize, Quota, SmShare)> =
        wants.iter().enumerate().map(|(index, (quota, sm))| (index, *quota, *sm)).collect();
    SlotTable::arrange(&wants).is_some()
}

/// Whether the areas (quota times SMs) sum to at most one GPU. Necessary, and a guarantee of nothing: this is
/// oversubscription, and a set that only passes this test will miss quotas.
pub fn area_oversubscribed(wants: &[Want]) -> bool {
    let area: u64 = wants.iter().map(|(q, sm)| u64::from(q.get()) * u64::from(sm.get())).sum();
    area <= u64::from(WINDOW) * u64::from(WINDOW)
}

/// Whether any schedule at all, with slots in pieces, serves the set; exact but for [`Verdict::Undecided`].
pub fn fractional(wants: &[Want]) -> Verdict {
    let wants: Vec<Want> = wants.to_vec();
    if wants.iter().any(|(q, sm)| q.is_zero() || sm.is_zero()) {
        return Verdict::Undecided;
    }
    let count = wants.len();
    let knapsack = Knapsack::new(&wants);
    // The basis: `columns` are mixes, `inverse` is the inverse of their matrix, `amounts` how long each runs.
    let mut columns: Vec<Vec<usize>> = (0..count).map(|index| vec![index]).collect();
    let mut inverse: Vec<Vec<f64>> =
        (0..count).map(|i| (0..count).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    let mut amounts: Vec<f64> = wants.iter().map(|(q, _)| f64::from(q.get())).collect();
    let mut prices = vec![1.0; count];
    for _ in 0..MAX_PIVOTS {
        for (j, price) in prices.iter_mut().enumerate() {
            *price = inverse.iter().map(|row| row[j]).sum();
        }
        let mix = knapsack.best(&prices);
        let worth: f64 = mix.iter().map(|index| prices[*index]).sum();
        if worth <= 1.0 + 1e-9 {
            break;
        }
        let direction: Vec<f64> =
            inverse.iter().map(|row| mix.iter().map(|index| row[*index]).sum()).collect();
        let leaving = (0..count)
            .filter(|row| direction[*row] > 1e-9)
            .min_by(|a, b| (amounts[*a] / direction[*a]).total_cmp(&(amounts[*b] / direction[*b])));
        let Some(leaving) = leaving else { break };
        let step = amounts[leaving] / direction[leaving];
        let pivot: Vec<f64> = inverse[leaving].iter().map(|value| value / direction[leaving]).collect();
        for row in 0..count {
            if row != leaving {
                amounts[row] = (amounts[row] - step * direction[row]).max(0.0);
                for (value, pivot) in inverse[row].iter_mut().zip(&pivot) {
                    *value -= direction[row] * pivot;
                }
            }
        }
        amounts[leaving] = step;
        inverse[leaving] = pivot;
        columns[leaving] = mix;
    }
    prove(&wants, &knapsack, &columns, &amounts, &prices)
}

const WINDOW: u16 = 10_000;
const MILLION: u64 = 1_000_000;
/// Far more than sets of one GPU need; a bound on the loop.
const MAX_PIVOTS: usize = 500;

/// Turns what floating point proposed into an answer that integers prove.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked in integers afterwards")]
fn prove(
    wants: &[Want],
    knapsack: &Knapsack,
    columns: &[Vec<usize>],
    amounts: &[f64],
    prices: &[f64],
) -> Verdict {
    let whole = u64::from(WINDOW) * MILLION;
    // Lengths rounded to the nearest; quotas then hold to within half a unit per mix.
    let schedule: Vec<(Vec<usize>, u64)> = columns
        .iter()
        .zip(amounts)
        .map(|(mix, amount)| (mix.clone(), (amount * 1e6).round() as u64))
        .filter(|(_, length)| *length > 0)
        .collect();
    let slack = schedule.len() as u64;
    let total: u64 = schedule.iter().map(|(_, length)| length).sum();
    let served = wants.iter().enumerate().all(|(index, (quota, _))| {
        let time: u64 =
            schedule.iter().filter(|(mix, _)| mix.contains(&index)).map(|(_, length)| length).sum();
        time + slack >= u64::from(quota.get()) * MILLION
    });
    let fits = schedule.iter().all(|(mix, _)| {
        let sm: u32 = mix.iter().map(|index| u32::from(wants[*index].1.get())).sum();
        sm <= u32::from(WINDOW)
    });
    // The part of the schedule beyond the window that rounding added is within the stated tolerance: shave it
    // off the longest mix.
    if served && fits && total <= whole + slack {
        let mut schedule = schedule;
        if let Some((_, longest)) = schedule.iter_mut().max_by_key(|(_, length)| *length) {
            *longest -= total.saturating_sub(whole);
        }
        return Verdict::Admitted(schedule);
    }
    // Prices in integers, rounded down, so that no mix is worth more than it was: refuse if the quotas are worth more
    // than the dearest mix over a whole window.
    let prices: Vec<u64> = prices.iter().map(|price| (price.max(0.0) * 1e6).floor() as u64).collect();
    let dearest = knapsack.best_integer(&prices);
    let worth: u128 = wants
        .iter()
        .zip(&prices)
        .map(|((quota, _), price)| u128::from(quota.get()) * u128::from(*price))
        .sum();
    if worth > u128::from(dearest) * u128::from(WINDOW) { Verdict::Refused } else { Verdict::Undecided }
}

/// The most valuable mix: a knapsack over SM shares, in units of their common divisor.
struct Knapsack {
    weights: Vec<usize>,
    capacity: usize,
}

impl Knapsack {
    fn new(wants: &[Want]) -> Self {
        let divisor = wants.iter().fold(0, |divisor, (_, sm)| gcd(divisor, sm.get())).max(1);
        Self {
            weights: wants.iter().map(|(_, sm)| usize::from(sm.get() / divisor)).collect(),
            capacity: usize::from(WINDOW / divisor),
        }
    }

    fn best(&self, prices: &[f64]) -> Vec<usize> {
        let width = self.capacity + 1;
        let mut value = vec![0.0f64; width];
        let mut taken = vec![false; width * self.weights.len()];
        for (index, (weight, price)) in self.weights.iter().zip(prices).enumerate() {
            if *price <= 0.0 {
                continue;
            }
            for room in (*weight..width).rev() {
                let with = value[room - weight] + price;
                if with > value[room] {
                    value[room] = with;
                    taken[index * width + room] = true;
                }
            }
        }
        let mut room = self.capacity;
        let mut mix = Vec::new();
        for index in (0..self.weights.len()).rev() {
            if taken[index * width + room] {
                mix.push(index);
                room -= self.weights[index];
            }
        }
        mix.reverse();
        mix
    }

    fn best_integer(&self, prices: &[u64]) -> u64 {
        let mut value = vec![0u64; self.capacity + 1];
        for (weight, price) in self.weights.iter().zip(prices) {
            for room in (*weight..value.len()).rev() {
                value[room] = value[room].max(value[room - weight] + price);
            }
        }
        value[self.capacity]
    }
}

fn gcd(a: u16, b: u16) -> u16 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn want(quota: u16, sm: u16) -> Want {
        (Quota::from_percent(quota).unwrap(), SmShare::from_percent(sm).unwrap())
    }

    #[test]
    fn the_worked_example_of_the_module_is_refused_with_a_proof() {
        let wants = [want(60, 60), want(60, 50), want(60, 40)];
        assert_eq!(fractional(&wants), Verdict::Refused);
        assert!(!cumulative(&wants));
        assert!(area_oversubscribed(&wants), "the area is 0.9 of a GPU: only oversubscription lets it in");
    }

    /// Three of 50 % of the time on 60 %, 50 %, 50 % of the SMs: the second and third run together.
    #[test]
    fn a_schedule_is_answered_with_its_mixes() {
        let wants = [want(50, 60), want(50, 50), want(50, 50)];
        let Verdict::Admitted(schedule) = fractional(&wants) else { panic!("it can be done") };
        let total: u64 = schedule.iter().map(|(_, length)| length).sum();
        assert_eq!(total, 10_000 * MILLION);
        assert!(schedule.iter().any(|(mix, _)| mix == &[1, 2]));
    }

    /// Five of 40 % on 50 %: in pieces two run at any time (5 x 40 / 2 = 100); no contiguous slots do.
    #[test]
    fn pieces_serve_what_contiguous_slots_cannot() {
        let wants = [want(40, 50); 5];
        assert!(matches!(fractional(&wants), Verdict::Admitted(_)));
        assert!(!rectangles(&wants));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        /// Each test implies the next, and every schedule keeps what it says.
        #[test]
        fn the_tests_are_ordered(sides in prop::collection::vec((1u16..=100, 1u16..=100), 1..9)) {
            let wants: Vec<Want> = sides.iter().map(|(quota, sm)| want(*quota, *sm)).collect();
            let verdict = fractional(&wants);
            prop_assert_ne!(&verdict, &Verdict::Undecided);
            let admitted = matches!(verdict, Verdict::Admitted(_));
            prop_assert!(!rectangles(&wants) || cumulative(&wants));
            prop_assert!(!cumulative(&wants) || admitted);
            prop_assert!(!admitted || area_oversubscribed(&wants));
            if let Verdict::Admitted(schedule) = verdict {
                let total: u64 = schedule.iter().map(|(_, length)| length).sum();
                prop_assert!(total <= 10_000 * MILLION);
                for (index, (quota, _)) in wants.iter().enumerate() {
                    let time: u64 =
                        schedule.iter().filter(|(mix, _)| mix.contains(&index)).map(|(_, length)| length).sum();
                    prop_assert!(time + 2 * schedule.len() as u64 >= u64::from(quota.get()) * MILLION);
                }
                for (mix, _) in &schedule {
                    prop_assert!(mix.iter().map(|index| sides[*index].1).sum::<u16>() <= 100);
                }
            }
        }
    }
}
