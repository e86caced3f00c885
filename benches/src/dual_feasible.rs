//! How few bins a known set of rectangles could take: a bound that no packing passes.
//!
//! The bound is by dual-feasible functions: functions `f` on widths and `g` on heights that keep the sum of any set that fits a
//! bin at most one, so that the sum of `f(w) g(h)` over all items, rounded up, is a bound. Taken over all pairs of: the identity;
//! "drop below e, round up above 1 - e"; and `u_k` (Fekete and Schepers, Mathematical Programming 91, 2001).
//!
//! Worked example, in per cent: five items of 60 x 60. Their area is 1.8 bins; but no two share a bin, and with e = 41
//! the second function makes each item a whole bin: the bound is 5.
//!
//! It costs `O(n)` for each of some thousand pairs.

use gshare_core::{Quota, SmShare};

/// A bin: width and height.
type Size = (Quota, SmShare);

/// A bound that costs little: area, and items of more than half a bin both ways.
fn quick_bound(bin: Size, items: &[Size]) -> usize {
    let whole = u64::from(bin.0.get()) * u64::from(bin.1.get());
    let area: u64 = items.iter().map(|(w, h)| u64::from(w.get()) * u64::from(h.get())).sum();
    let large = items.iter().filter(|(w, h)| w.get() > bin.0.get() / 2 && h.get() > bin.1.get() / 2).count();
    usize::try_from(area.div_ceil(whole.max(1))).unwrap_or(usize::MAX).max(large)
}

/// No packing of `items` into bins of size `bin` takes fewer bins than this.
pub fn lower_bound(bin: Size, items: &[Size]) -> usize {
    let widths: Vec<u64> = items.iter().map(|(w, _)| u64::from(w.get())).collect();
    let heights: Vec<u64> = items.iter().map(|(_, h)| u64::from(h.get())).collect();
    let on_widths = dual_feasible(u64::from(bin.0.get()), &widths);
    let on_heights = dual_feasible(u64::from(bin.1.get()), &heights);
    let mut best = quick_bound(bin, items);
    for (f, f_whole) in &on_widths {
        for (g, g_whole) in &on_heights {
            let sum: u64 = f.iter().zip(g).map(|(f, g)| f * g).sum();
            best = best.max(usize::try_from(sum.div_ceil(f_whole * g_whole)).unwrap_or(usize::MAX));
        }
    }
    best
}

/// The values of each dual feasible function for each size, with the value of a whole bin.
fn dual_feasible(whole: u64, sizes: &[u64]) -> Vec<(Vec<u64>, u64)> {
    let mut functions = vec![(sizes.to_vec(), whole)];
    // "Drop below e" changes only where e passes a size, "round up above whole - e" where whole - e does.
    let mut limits: Vec<u64> =
        sizes.iter().flat_map(|size| [size + 1, whole - size + 1]).filter(|e| *e <= whole / 2).collect();
    limits.sort_unstable();
    limits.dedup();
    let step = limits.len().div_ceil(50).max(1);
    for e in limits.into_iter().step_by(step) {
        let values = sizes.iter().map(|size| match *size {
            size if size > whole - e => whole,
            size if size < e => 0,
            size => size,
        });
        functions.push((values.collect(), whole));
    }
    for k in 1..=12 {
        let values = sizes
            .iter()
            .map(|size| if (k + 1) * size % whole == 0 { k * size } else { (k + 1) * size / whole * whole });
        functions.push((values.collect(), k * whole));
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mixes::Mix;
    use crate::peers::{Ours, Pool as _};
    use gshare_sched::pack::MaxRectsConfig;

    #[test]
    fn the_worked_example_of_the_module() {
        let of = (Quota::from_percent(60).unwrap(), SmShare::from_percent(60).unwrap());
        assert_eq!(lower_bound((Quota::WHOLE, SmShare::WHOLE), &[of; 5]), 5);
    }

    #[test]
    fn no_packing_takes_fewer_bins_than_the_bound() {
        for mix in Mix::PERCENT {
            for seed in 1..=10 {
                let set = mix.demands(seed, 40);
                let mut pool = Ours::new(40, MaxRectsConfig::default());
                set.iter().for_each(|(w, h)| assert!(pool.place(*w, *h).is_some()));
                let size = |(w, h): &(u16, u16)| (Quota::new(*w).unwrap(), SmShare::new(*h).unwrap());
                let bound =
                    lower_bound((Quota::WHOLE, SmShare::WHOLE), &set.iter().map(size).collect::<Vec<_>>());
                assert!((1..=pool.used()).contains(&bound), "{} {seed}: {bound}", mix.name());
            }
        }
    }
}
