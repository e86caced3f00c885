//! `node-sim`: whole nodes in virtual time, each from one seed: the daemon's engine, a meter in every process, and devices. The
//! program runs on all CPUs, stops at the first seed that shows something wrong and prints it with its story.
//! `--first SEED --seeds 1` runs only this seed again.

use anyhow::{Context, Result};
use clap::Parser;
use gshare_bench::replay::progress::Progress;
use gshare_bench::seeds::{cpus, in_order};
use gshare_sim::node::{self, Figures, NodeReport, Setup, ShareReport};
use std::ops::ControlFlow;
use std::time::Instant;

/// Runs whole-node simulations.
#[derive(Debug, Parser)]
struct Options {
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
    /// One line per seed, with the hash of its log.
    #[arg(long)]
    verbose: bool,
    /// Run each seed twice and compare the hashes of the logs.
    #[arg(long)]
    replay: bool,
    /// Print the last lines of the log of each seed.
    #[arg(long)]
    log: bool,
}

/// The engines as the daemon sets them up unless it is told otherwise.
fn setup(error_max: u64) -> Setup {
    Setup { error_max, ..Setup::daemon() }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let setup = setup(options.error_max);
    println!("driven: {}", node::driven().join(", "));
    let started = Instant::now();
    let mut total = Total::default();
    let last = options.first.checked_add(options.seeds).context("--first and --seeds are too large")?;
    let progress = Progress::new(usize::try_from(options.seeds)?);
    let take = |seed, (lines, result): (Vec<String>, Result<NodeReport, String>)| {
        lines.iter().for_each(|line| println!("{line}"));
        match result {
            Ok(report) => {
                if options.verbose {
                    let worst = report.shares.all().worst;
                    println!(
                        "seed {seed}: {} processes, {} kernels, worst error {worst} bp, worst wait {} % of its bound, log {:016x}",
                        report.processes,
                        report.figures.kernels,
                        report.figures.worst_wait_percent,
                        report.log_hash
                    );
                }
                total.add(&report);
            }
            Err(error) if options.keep_going => {
                total.failed += 1;
                println!("{}", error.lines().next().unwrap_or_default());
            }
            Err(error) => return ControlFlow::Break((seed, error)),
        }
        progress.done();
        ControlFlow::Continue(())
    };
    let stopped = in_order(cpus(), options.first..last, |seed| run(seed, &setup, &options), take);
    if let ControlFlow::Break((seed, error)) = stopped {
        eprintln!("{error}");
        eprintln!("again: node-sim --first {seed} --seeds 1 --error-max {}", options.error_max);
        std::process::exit(1);
    }
    total.print(&options, started.elapsed().as_secs_f64());
    anyhow::ensure!(total.failed == 0, "{} of {} seeds show something wrong", total.failed, options.seeds);
    Ok(())
}

/// Lines of the seed's log, if these are wanted, and its report.
fn run(seed: u64, setup: &Setup, options: &Options) -> (Vec<String>, Result<NodeReport, String>) {
    let (report, lines) =
        if options.log { node::story(seed, setup) } else { (node::run(seed, setup), Vec::new()) };
    let replayed = |report: NodeReport| {
        if options.replay {
            let again = node::run(seed, setup).map_err(|failure| failure.to_string())?;
            if again != report {
                return Err(format!(
                    "seed {seed} does not replay: {:016x}, then {:016x}",
                    report.log_hash, again.log_hash
                ));
            }
        }
        Ok(report)
    };
    (lines, report.map_err(|failure| failure.to_string()).and_then(replayed))
}

#[derive(Debug)]
struct Total {
    shares: ShareReport,
    figures: Figures,
    processes: u64,
    calls: u64,
    refused: u64,
    failed: u64,
}

impl Default for Total {
    fn default() -> Self {
        let (shares, figures) = (ShareReport::EMPTY, Figures::default());
        Self { shares, figures, processes: 0, calls: 0, refused: 0, failed: 0 }
    }
}

impl Total {
    fn add(&mut self, report: &NodeReport) {
        self.shares.add(&report.shares);
        self.figures.add(&report.figures);
        self.processes += report.processes;
        self.calls += report.calls;
        self.refused += report.refused;
    }

    fn print(&self, options: &Options, seconds: f64) {
        let Self { shares, figures, .. } = self;
        println!(
            "{} seeds (from {}) in {seconds:.1} s: {} processes, {} kernels, {} frames, {} scheduler calls, {} stale or refused",
            options.seeds,
            options.first,
            self.processes,
            figures.kernels,
            figures.frames,
            self.calls,
            self.refused,
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
        println!(
            "an elastic device delivered at least {} % of the time open to its clients",
            shares.delivered_percent
        );
        println!(
            "memory: {} allocations, an instance held at most {} % of its limit",
            figures.allocations, figures.worst_memory_percent
        );
        println!("waits: {}, the longest was {} % of its bound", figures.waits, figures.worst_wait_percent);
        println!("{} leases, none returned twice; {} answers", figures.leases, figures.answers);
        let accounts = figures.accounts;
        println!(
            "accounts: {} compared, {} frames doubled; of {} ends in good order {} were charged the device's time to the nanosecond, none less but for the spread of its kernels",
            accounts.compared, figures.doubled, accounts.ended, accounts.exact
        );
        println!("{} times attached again, at most {} charged twice", accounts.again, accounts.worst_again);
    }
}
