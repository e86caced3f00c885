//! nvshare's rule, one holder of a GPU at a time, as a token policy of one's own: it is checked by the public suite, and a
//! daemon takes it by `Daemon::builder(config).engine(...)`.
//!
//! `cargo run -p gshare-examples --bin one_holder`

use gshare_core::{Duration, TokenScheduler};
use gshare_sched::token::{Leases, MultiTokenConfig, Turn};
use gshare_sim::conformance::{Conformance, token_scheduler};
use gshare_sim::token::{Terms, ops::World};

/// The longest time of a turn while others wait. nvshare's default is 30 s, since a change of holder moves memory there.
const TURN: Duration = Duration::from_millis(100);

/// The longest waiter is next once the GPU has no holder; a holder goes on while nobody else waits.
fn one_holder(gpu: &mut Turn<'_>) {
    let (waiting, holders) = (gpu.waiting(), gpu.holders());
    if let Some(next) = waiting.first()
        && (holders.is_empty() || (holders == [*next] && waiting.len() == 1))
    {
        gpu.grant(*next, TURN);
    }
}

fn main() -> anyhow::Result<()> {
    let world = World { slots: 8, gpus: 2 };
    let settings = MultiTokenConfig::default().with_max_clients(world.slots).with_max_gpus(world.gpus);
    let (window, waits, debt) = (settings.window, (settings.slack, settings.grace), settings.max_debt);
    let make = || -> Box<dyn TokenScheduler> {
        Box::new(Leases::new(settings.clone(), one_holder).expect("the settings are sound"))
    };
    let mut suite = Conformance::new(Terms::multi_token(window, window, waits, debt), world);
    // The rule knows no requests, and nobody holds beside another.
    (suite.meets_requests, suite.bounds_waits, suite.holds_together) = (false, false, false);
    let report = token_scheduler(&make, &suite)?;
    println!("one_holder keeps the contract of TokenScheduler: {} calls", report.calls);
    for (claim, tested) in &report.tested {
        println!("{tested:>8} x {claim}");
    }
    Ok(())
}
