//! The token engines under any history: refused calls change nothing, SMs are never oversold, no limit is passed, and old faults stay
//! mended. The oracle is the contract (`gshare_sim::token::check`), which knows no rule of an engine.

use super::paced::{Pace, Paced};
use gshare_core::{ClientId, Duration, Quota, QuotaRange, Share, SmShare, Timestamp};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::Rng;
use gshare_sim::token::drive::Driver;
use gshare_sim::token::ops::{TokenOp, World};
use gshare_sim::token::{Terms, check};
use proptest::prelude::*;

const WORLD: World = World { slots: 8, gpus: 2 };

/// Both engines, each under all checkers that hold for any client.
fn driver(config: &MultiTokenConfig) -> Driver {
    let engine = Box::new(MultiToken::new(config.clone()).expect("sound"));
    // A slot is given in one piece.
    let terms =
        Terms::multi_token(config.window, config.window, (config.slack, config.grace), config.max_debt);
    Driver::new(engine, terms, check::always())
}

/// Lengths from windows without grace to long graces; shallow and deep looks behind a reservation.
fn configs() -> impl Strategy<Value = MultiTokenConfig> {
    (0usize..4, 0u32..6).prop_map(|(kind, backfill_depth)| {
        let mut config = MultiTokenConfig::default();
        config.backfill_depth = backfill_depth;
        match kind {
            0 => {}
            1 => config.window = Duration::from_millis(25),
            2 => {
                config.window = Duration::from_nanos(7_000_001);
                config.max_token = Duration::from_nanos(3_000_003);
                config.grace = Duration::from_millis(20);
            }
            _ => {
                config.slack = Duration::ZERO;
                config.grace = Duration::ZERO;
                config.min_token = Duration::from_nanos(1);
            }
        }
        config
    })
}

fn ops() -> impl Strategy<Value = TokenOp> {
    any::<u64>().prop_map(|seed| TokenOp::random(&mut Rng::new(seed)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn any_history_keeps_the_contract(config in configs(), ops in prop::collection::vec(ops(), 1..200)) {
        let mut driver = driver(&config);
        for op in &ops {
            op.apply(WORLD, &mut driver).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
        }
    }
}

/// Kernels up to most of a window, with any requests, limits and SMs.
#[test]
fn programs_with_long_kernels_keep_the_contract() {
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let mut config = MultiTokenConfig::default();
        config.grace = Duration::from_millis(rng.between(0, 100));
        let mut driver = driver(&config);
        let mut paced = Paced::new(&mut driver, Duration::from_micros(100));
        for slot in 0..u32::try_from(rng.between(2, 8)).unwrap() {
            let quota = |points| Quota::new(u16::try_from(points).unwrap()).unwrap();
            let request = rng.between(0, 4_000);
            let limit = rng.between(request.max(1), 10_000);
            let quota = QuotaRange::new(quota(request), quota(limit)).unwrap();
            let sm = SmShare::from_percent(u16::try_from(rng.between(1, 4)).unwrap() * 25).unwrap();
            let pace = Pace {
                kernel: Duration::from_micros(rng.between(10, 80_000)),
                pause: Duration::from_micros(rng.between(1, 1_000)),
            };
            let now = Timestamp::from_millis(u64::from(slot));
            paced.run(now).unwrap();
            paced.start(now, ClientId::new(slot, 0), Share { quota, sm }, pace).unwrap();
        }
        paced.run(Timestamp::from_millis(3_000)).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// Histories that fuzzing found once: `fuzz/regressions/token/*.json`, as `cargo fuzz fmt token FILE` prints them.
#[test]
fn histories_that_once_went_wrong_do_not_any_more() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/regressions/token");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let ops: Vec<TokenOp> = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        println!("{}", file.display());
        let mut driver = driver(&MultiTokenConfig::default());
        for op in &ops {
            op.apply(WORLD, &mut driver).unwrap();
        }
    }
}
