//! The program `replay`: runs a figure of a paper again. `replay --help` lists them.

use crate::replay::{self, Report};
use anyhow::{Context, Result, ensure};
use clap::{CommandFactory, Parser, Subcommand};
use gshare_sim::scenario::Own;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Debug, Parser)]
#[command(about = "Runs a figure of a paper again and prints it beside the paper's numbers", version)]
struct Cli {
    /// Print one JSON object, with `all` one per line: {"scenario", "seeds", "rows": [{"policy", ...}], "paper": [...]}
    #[arg(long, global = true)]
    json: bool,
    /// Print the rows as comma-separated values, the columns' names first
    #[arg(long, global = true, conflicts_with = "json")]
    csv: bool,
    #[command(subcommand)]
    wanted: Wanted,
}

#[derive(Debug, Subcommand)]
enum Wanted {
    /// Every replay below with its default flags, one after the other; how long each took is told on stderr
    All {
        /// Folder of published profiles; without it `dilu-table2`, which needs them, is left out
        #[arg(long, value_name = "DIR")]
        profiles: Option<PathBuf>,
    },
    #[command(flatten)]
    One(Scenario),
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// Dilu, table 2: trials until the best SM share and batch size are found, on given profiles
    DiluTable2(replay::dilu_table2::Args),
    /// Dilu, table 3: cold starts, SLO violations and GPU time on bursty, periodic and sporadic load
    DiluTable3(replay::dilu_table3::Args),
    /// FaST-GShare, section 5.4 and figure 11: eight pods, how many GPUs, in every order of arrival
    FastFig11(replay::fast_fig11::Args),
    /// FaST-GShare, sections 3.3.3 and 3.4.2: quotas met on GPUs packed to the brim, by queue and by slots
    FastSlots(replay::fast_slots::Args),
    /// GPU-enabled FaaS, figures 4 to 7: locality-aware request scheduling on 12 GPUs
    Lalb(replay::lalb::Args),
    /// Dilu, figure 20: GPUs in use at the peak of a large simulation
    DiluFig20(replay::dilu_fig20::Args),
    /// FaST-GShare, figure 12: load that climbs and falls under the heuristic scaler
    FastFig12(replay::fast_fig12::Args),
    /// FluidFaaS, section 7: pipelines over MIG slices, three workloads on three cuts of 16 A100-80
    ///
    /// A seed draws the bursts, the arrivals and the branches of a run, the same for every policy. The first table is of all seeds
    /// together: counts and times are added up, times of requests (P95, P99, longest, mean) averaged. Each further one has a policy of ours
    /// minus another policy seed by seed (on a trace: window by window), in percent of the other: mean ± its standard error (the mean of ever
    /// more seeds would be within about two of them 19 times in 20), and "better", "worse", or "level" where it is within two standard
    /// errors of 0. The first of them is ours beside the paper's keeper on our order of the queue. Below a table is in how many cells ours
    /// is not worse by the first one, without tolerance. The runs are spread over the CPUs; the output does not depend on their number.
    /// With `--json` these tables are `compared`: [{`policy`, `with`, `cells`: [{`workload`, ..., `p95_ms`: {`mean_percent`,
    /// `standard_error_percent`, `verdict`}}], `not_worse`: {`p95_ms`: ...}, `verdicts`: {`better`: ...}}].
    Fluidfaas(replay::fluidfaas::Args),
}

/// Reads the command line and carries it out. Policies of the program's own have rows beside ours: its scalers in `dilu-table3` and
/// `fast-fig12`, its routers and places on slices in `fluidfaas`, its schedulers of requests
/// in `lalb`, its packers in `dilu-fig20`.
/// ```no_run
/// use gshare_sched::pack::{MaxRects, MaxRectsConfig};
/// use gshare_sim::scenario::Own;
/// fn main() -> anyhow::Result<()> {
///     gshare_bench::replay::main(&Own::default().with_packer("mine", || Box::new(MaxRects::new(MaxRectsConfig::default()))))
/// }
/// ```
///
/// # Errors
/// Flags or files that cannot be, with name and bound; a file that cannot be written.
pub fn main(own: &Own) -> Result<()> {
    let cli = Cli::parse();
    let profiles = match &cli.wanted {
        Wanted::One(scenario) => return cli.print(&scenario.run(own)?),
        Wanted::All { profiles } => profiles,
    };
    ensure!(!cli.csv, "--csv shows one replay, and `all` runs several");
    let begun = Instant::now();
    for name in Cli::command().get_subcommands().map(clap::Command::get_name) {
        let mut line = vec![OsStr::new("replay"), OsStr::new(name)];
        match (name, profiles) {
            ("dilu-table2", None) => {
                eprintln!("{name}: left out, it needs --profiles");
                continue;
            }
            ("dilu-table2", Some(profiles)) => line.extend([OsStr::new("--profiles"), profiles.as_os_str()]),
            _ => {}
        }
        let Wanted::One(scenario) = Cli::try_parse_from(line)?.wanted else { continue };
        let since = Instant::now();
        let report = scenario.run(own).with_context(|| name.to_owned())?;
        cli.print(&report)?;
        eprintln!("{name}: {:.1} s", since.elapsed().as_secs_f64());
    }
    eprintln!("all: {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

impl Scenario {
    fn run(&self, own: &Own) -> Result<Report> {
        match self {
            Self::DiluTable2(args) => replay::dilu_table2::run(args),
            Self::DiluTable3(args) => replay::dilu_table3::run(args, own),
            Self::FastFig11(args) => replay::fast_fig11::run(args),
            Self::FastSlots(args) => replay::fast_slots::run(args),
            Self::Lalb(args) => replay::lalb::run(args, own),
            Self::DiluFig20(args) => replay::dilu_fig20::run(args, own),
            Self::FastFig12(args) => replay::fast_fig12::run(args, own),
            Self::Fluidfaas(args) => replay::fluidfaas::run(args, own),
        }
    }
}

impl Cli {
    fn print(&self, report: &Report) -> Result<()> {
        if self.csv {
            print!("{}", report.csv());
        } else if self.json {
            println!("{}", serde_json::to_string(report)?);
        } else {
            print!("{}", report.table());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_replay_has_a_default_for_every_flag_but_published_profiles() {
        let command = Cli::command();
        let needing: Vec<_> = command
            .get_subcommands()
            .map(clap::Command::get_name)
            .filter(|name| Cli::try_parse_from(["replay", name]).is_err())
            .collect();
        assert_eq!(needing, ["dilu-table2"]);
    }
}
