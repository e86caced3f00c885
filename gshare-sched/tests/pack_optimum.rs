//! A set placed at once, against optima: 80 instances of four mixes, n = 20 and 40, seeds 1 to 10. The optima were
//! found once with OR-Tools CP-SAT by `benches/scripts/optimum.py`; those of half/40 by a packing that meets the dual
//! feasible bound, but for seeds 5, 6 and 9, which are open: there the bound stands in, so the test is stricter.

use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer as _};

#[derive(Debug, Clone, Copy)]
enum Mix {
    Profile,
    Light,
    Fine,
    Half,
}

const OPTIMA: [(Mix, u32, [usize; 10]); 8] = [
    (Mix::Profile, 20, [5, 5, 6, 6, 9, 9, 7, 7, 6, 8]),
    (Mix::Profile, 40, [11, 10, 13, 13, 13, 16, 15, 13, 12, 13]),
    (Mix::Light, 20, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
    (Mix::Light, 40, [3, 3, 3, 4, 3, 4, 3, 3, 4, 3]),
    (Mix::Fine, 20, [7, 5, 5, 9, 7, 3, 5, 5, 8, 7]),
    (Mix::Fine, 40, [13, 11, 9, 14, 16, 10, 11, 9, 14, 10]),
    (Mix::Half, 20, [2, 2, 1, 2, 2, 2, 2, 2, 2, 2]),
    (Mix::Half, 40, [3, 3, 3, 3, 2, 3, 3, 3, 3, 3]),
];

/// `SplitMix64`, as the script and the benches have it.
fn below(state: &mut u64, bound: u64) -> u16 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    u16::try_from((z ^ (z >> 31)) % bound).unwrap()
}

fn draw(mix: Mix, state: &mut u64) -> (u16, u16) {
    match mix {
        Mix::Profile => {
            let quota = [20, 40, 60, 80, 100][usize::from(below(state, 5))];
            (quota, [6, 12, 24, 50, 60, 80, 100][usize::from(below(state, 7))])
        }
        Mix::Light => {
            let quota = [20, 40, 60][usize::from(below(state, 3))];
            (quota, [6, 6, 6, 6, 12, 12, 12, 12, 24, 24, 24, 50][usize::from(below(state, 12))])
        }
        Mix::Fine => {
            let quota = below(state, 100) + 1;
            (quota, below(state, 100) + 1)
        }
        Mix::Half => {
            let quota = below(state, 50) + 1;
            (quota, below(state, 50) + 1)
        }
    }
}

#[test]
fn sets_are_within_five_per_cent_of_the_optimum() {
    let (mut ours, mut best) = (0, 0);
    for (mix, count, optima) in OPTIMA {
        for (seed, optimum) in (1u64..).zip(optima) {
            let mut state = seed;
            let demands: Vec<Demand> = (0..count)
                .map(|_| {
                    let (quota, sm) = draw(mix, &mut state);
                    Demand::new(Quota::from_percent(quota).unwrap(), SmShare::from_percent(sm).unwrap())
                })
                .collect();
            let mut pool = MaxRects::new(MaxRectsConfig::default());
            for gpu in 0..count {
                pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::ZERO)).unwrap();
            }
            pool.place_all(&demands, &mut Vec::new()).unwrap();
            let bins = pool.open_gpus() as usize;
            assert!(optimum <= bins, "{mix:?} {count} seed {seed}: {optimum} {bins}");
            ours += bins;
            best += optimum;
        }
    }
    println!("{ours} bins, optimum {best}");
    assert!(ours * 100 <= best * 105, "{ours} bins, optimum {best}");
}
