//! When applications are called: drawn by a seed, or as in windows of a trace.

use super::Args;
use super::applications::APPLICATIONS;
use anyhow::{Context, Result, bail};
use gshare_core::Duration;
use gshare_sim::Rng;
use gshare_sim::load_trace::{FunctionCounts, read_azure_counts};
use std::path::Path;

/// Calls per second of each application over time: shares of a mean, bin by bin.
pub(super) struct Shape {
    pub(super) bin: Duration,
    pub(super) shares: Vec<Vec<f64>>,
}

impl Shape {
    /// With a mean of 1.
    fn new(bin: Duration, bins: Vec<Vec<f64>>) -> Self {
        let scaled = |bins: Vec<f64>| {
            let mean = bins.iter().sum::<f64>() / bins.len() as f64;
            bins.into_iter().map(|bin| bin / mean.max(1e-9)).collect::<Vec<f64>>()
        };
        Self { bin, shares: bins.into_iter().map(scaled).collect() }
    }

    fn bins(args: &Args, bin: Duration) -> Result<usize> {
        Ok(usize::try_from(args.length.as_nanos() / bin.as_nanos())?.max(1))
    }

    /// About the variability of the trace's aggregate (CV 0.4 by the minute), with bursts of three times the mean.
    pub(super) fn generated(args: &Args, rng: &mut Rng) -> Result<Self> {
        let bin = Duration::from_secs(20);
        let bins = Self::bins(args, bin)?;
        let draw = |rng: &mut Rng| {
            let level = 0.4 + rng.below(1_000) as f64 / 1_000.0;
            if rng.percent(8) { level * 3.0 } else { level }
        };
        Ok(Self::new(bin, (0..APPLICATIONS.len()).map(|_| (0..bins).map(|_| draw(rng)).collect()).collect()))
    }

    /// Windows of the trace's busiest functions. A minute of it is six seconds here: ten minutes show a hundred.
    fn windows(args: &Args, path: &Path) -> Result<Vec<Self>> {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let mut functions = read_azure_counts(std::io::BufReader::new(file))?;
        functions.sort_by_key(|one| std::cmp::Reverse(one.counts.iter().map(|&n| u64::from(n)).sum::<u64>()));
        functions.truncate(APPLICATIONS.len());
        let minutes = functions.first().map_or(0, |one| one.counts.len());
        let bin = Duration::from_secs(6);
        let bins = Self::bins(args, bin)?;
        if functions.len() < APPLICATIONS.len() || minutes < bins {
            let (has, path) = (functions.len(), path.display());
            bail!("{path}: has {has} functions of {minutes} minutes, need {} of {bins}", APPLICATIONS.len());
        }
        let every: Vec<usize> = (0..=minutes - bins).step_by(bins).collect();
        let from = if args.trace_from.is_empty() { every } else { args.trace_from.clone() };
        if let Some(late) = from.iter().find(|&&from| from > minutes - bins) {
            bail!("--trace-from {late}: need at most {}, for {bins} of {minutes} minutes", minutes - bins);
        }
        let window = |from: usize| {
            let of =
                |one: &FunctionCounts| one.counts[from..from + bins].iter().map(|&n| f64::from(n)).collect();
            Self::new(bin, functions.iter().map(of).collect())
        };
        Ok(from.into_iter().map(window).collect())
    }
}

/// The source of one run: a seed, and on a trace a window of it.
pub(super) struct Draw {
    pub(super) seed: u64,
    pub(super) window: Option<Shape>,
}

pub(super) fn draws(args: &Args) -> Result<Vec<Draw>> {
    let mut draws = Vec::new();
    for &seed in &args.seeds {
        match &args.trace {
            None => draws.push(Draw { seed, window: None }),
            Some(path) => {
                let windows = Shape::windows(args, path)?;
                draws.extend(windows.into_iter().map(|window| Draw { seed, window: Some(window) }));
            }
        }
    }
    Ok(draws)
}
