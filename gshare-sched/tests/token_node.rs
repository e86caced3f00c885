//! Whole nodes around the token engine, each from one seed: 2 to 64 clients on up to 4 GPUs that come, leave, are killed,
//! hang and change, with messages and kernels that take their time. `cargo run --release -p gshare-bench --bin node-sim`
//! runs a thousand of them.

use gshare_core::TokenScheduler;
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::node;
use gshare_sim::token::Terms;

fn run(seed: u64) -> node::NodeReport {
    let config = MultiTokenConfig::default();
    let overtime = config.slack.saturating_add(config.grace);
    let terms = Terms::multi_token(config.window, config.max_token, overtime, config.max_debt);
    let scheduler: Box<dyn TokenScheduler> = Box::new(MultiToken::new(config).expect("the default is sound"));
    node::run(seed, scheduler, terms).unwrap()
}

#[test]
fn the_device_sees_the_shares_that_were_promised_to_one_point_over_ten_windows() {
    let mut shares = node::ShareReport::EMPTY;
    (0..24).for_each(|seed| shares.add(&run(seed).shares));
    println!("{shares:#?}");
    for errors in [shares.capped, shares.side_by_side, shares.elastic] {
        assert!(errors.spans > 500, "the promise was put to the test");
    }
}

#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 1_000_003] {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first, second);
        assert!(first.calls > 100);
    }
    assert_ne!(run(3).log_hash, run(4).log_hash);
}
