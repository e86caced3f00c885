//! `node-sim`: whole nodes around the token engine, each from one seed. Stops at the first seed that shows something
//! wrong and prints it with a picture; `--first SEED --seeds 1` runs that one again.

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use gshare_core::TokenScheduler;
use gshare_sched::token::{MultiToken, MultiTokenConfig, SlotScheduler};
use gshare_sim::node::{self, NodeReport, ShareReport};
use gshare_sim::token::Terms;
use std::time::Instant;

/// Runs whole-node simulations of the token engine.
#[derive(Debug, Parser)]
struct Options {
    /// Whose decisions.
    #[arg(long, value_enum, default_value_t = Policy::MultiToken)]
    policy: Policy,
    /// How many seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Largest error of a share over ten windows, in basis points.
    #[arg(long, default_value_t = node::ERROR_MAX)]
    error_max: u64,
    /// Go on after a seed that shows something wrong, and list them all.
    #[arg(long)]
    keep_going: bool,
    /// One line per seed.
    #[arg(long)]
    verbose: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Policy {
    MultiToken,
    Slots,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let config = MultiTokenConfig::default();
    let overtime = config.slack.saturating_add(config.grace);
    // A slot is given in one piece.
    let longest = match options.policy {
        Policy::MultiToken => config.max_token,
        Policy::Slots => config.window,
    };
    let terms = Terms::multi_token(config.window, longest, overtime, config.max_debt);
    let run = |seed| -> Result<NodeReport> {
        let scheduler: Box<dyn TokenScheduler> = match options.policy {
            Policy::MultiToken => Box::new(MultiToken::new(config.clone())?),
            Policy::Slots => Box::new(SlotScheduler::new(config.clone())?),
        };
        Ok(node::run_within(seed, scheduler, terms, options.error_max)?)
    };

    let started = Instant::now();
    let (mut shares, mut total) = (ShareReport::EMPTY, Total::default());
    let last = options.first.checked_add(options.seeds).context("--first and --seeds are too large")?;
    for seed in options.first..last {
        match run(seed) {
            Ok(report) => {
                if options.verbose {
                    let worst = report.shares.all().worst;
                    println!(
                        "seed {seed}: {} clients, {} calls, worst {worst} bp",
                        report.clients, report.calls
                    );
                }
                shares.add(&report.shares);
                total.add(&report);
            }
            Err(error) if options.keep_going => {
                total.failed += 1;
                println!("{}", error.to_string().lines().next().unwrap_or_default());
            }
            Err(error) => {
                eprintln!("{error}");
                eprintln!("again: node-sim --first {seed} --seeds 1 --error-max {}", options.error_max);
                std::process::exit(1);
            }
        }
    }

    println!(
        "{} seeds (from {}) in {:.1} s: {} clients, {} scheduler calls, {} kernels, {} stale messages refused",
        options.seeds,
        options.first,
        started.elapsed().as_secs_f64(),
        total.clients,
        total.calls,
        total.kernels,
        total.refused,
    );
    for (name, errors) in
        [("capped", shares.capped), ("side by side", shares.side_by_side), ("elastic", shares.elastic)]
    {
        println!(
            "{name:>12}: {} spans of {} windows, worst share error {} basis points",
            errors.spans,
            node::SPAN,
            errors.worst
        );
    }
    println!("an elastic GPU delivered at least {} % of what its clients may take", shares.delivered_percent);
    anyhow::ensure!(total.failed == 0, "{} of {} seeds show something wrong", total.failed, options.seeds);
    Ok(())
}

#[derive(Debug, Default)]
struct Total {
    clients: u64,
    calls: u64,
    kernels: u64,
    refused: u64,
    failed: u64,
}

impl Total {
    fn add(&mut self, report: &NodeReport) {
        self.clients += report.clients;
        self.calls += report.calls;
        self.kernels += report.kernels;
        self.refused += report.refused;
    }
}
