//! Replays: a figure of a paper, run again on our engines and printed beside the paper's numbers.
//!
//! Each figure has one module, with `Args` (its flags) and `run` (its answer is a [`Report`]). The binary `replay` turns a report
//! into a table, or with `--json` into one JSON object: `{"scenario", "seeds", "rows": [{"policy", ...}], "paper": [{...}]}`. Where
//! seeds decide much, the object also has `compared`, which says how sure the differences are, see [`paired`]. `--csv` prints the
//! rows alone.

mod cli;
pub mod dilu_fig20;
pub mod dilu_table2;
pub mod dilu_table3;
pub mod fast_fig11;
pub mod fast_fig12;
pub mod fast_slots;
pub mod fluidfaas;
pub mod lalb;
pub mod paired;
pub mod progress;
mod whole_devices;

pub use cli::main;

use crate::seeds::in_order;
use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value};
use std::ops::ControlFlow;

/// The results of a replay, beside the paper's numbers.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the scenario, as on the command line.
    pub scenario: &'static str,
    /// Seeds it ran with; empty when nothing is drawn at random.
    pub seeds: Vec<u64>,
    /// One object per policy (and input).
    pub rows: Vec<Map<String, Value>>,
    /// Ours beside other policies, seed by seed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub compared: Vec<paired::Compared>,
    /// The paper's figures for the same rows.
    pub paper: Vec<Map<String, Value>>,
}

impl Report {
    /// A report without rows.
    pub const fn new(scenario: &'static str, seeds: Vec<u64>) -> Self {
        Self { scenario, seeds, rows: Vec::new(), compared: Vec::new(), paper: Vec::new() }
    }

    /// The report as text: a table of the rows, the comparisons, then a table of the paper's numbers.
    pub fn table(&self) -> String {
        let mut text = format!("{} (seeds {:?})\n", self.scenario, self.seeds);
        text.push_str(&columns(&self.rows));
        for compared in &self.compared {
            text.push('\n');
            text.push_str(&compared.table());
        }
        if !self.paper.is_empty() {
            text.push_str("\nprinted in the paper, or found by its published rules\n");
            text.push_str(&columns(&self.paper));
        }
        text
    }

    /// The rows as comma-separated values, the columns' names first.
    pub fn csv(&self) -> String {
        csv(&self.rows)
    }
}

/// The answers of `job` for each number below `jobs`, in their order, with the work divided among `threads`. How far the work is
/// goes to stderr, see [`progress`].
///
/// # Errors
/// The error of the first failed job.
pub fn in_parallel<T: Send>(
    threads: usize,
    jobs: usize,
    job: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (progress, mut answers) = (progress::Progress::new(jobs), Vec::with_capacity(jobs));
    let run = |number: u64| {
        let answer = job(usize::try_from(number)?);
        progress.done();
        answer
    };
    let take = |_, answer: Result<T>| match answer {
        Ok(answer) => {
            answers.push(answer);
            ControlFlow::Continue(())
        }
        Err(error) => ControlFlow::Break(error),
    };
    match in_order(threads, 0..u64::try_from(jobs)?, run, take) {
        ControlFlow::Continue(()) => Ok(answers),
        ControlFlow::Break(error) => Err(error),
    }
}

/// The mean of some numbers; not a number without any.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values.into_iter().fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

/// A row of its subject and its figures.
pub fn joined(about: &Map<String, Value>, figures: &Map<String, Value>) -> Map<String, Value> {
    about.iter().chain(figures).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// A row from pairs: `row(&[("policy", "ours".into()), ("gpus", 1.into())])`.
pub fn row(pairs: &[(&str, Value)]) -> Map<String, Value> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

/// Columns for the subject of a row. All other columns are figures.
const ABOUT: [&str; 21] = [
    "policy",
    "against",
    "workload",
    "partition",
    "load",
    "trace",
    "model",
    "input",
    "ws",
    "arrivals",
    "headroom_percent",
    "max_exec_ms",
    "instances",
    "orders",
    "memory_mib",
    "limit",
    "gamma_bp",
    "max_per_min",
    "seed",
    "second",
    "traces",
];

/// The columns of rows: the subject first, then figures in the order of the alphabet.
fn keys(rows: &[Map<String, Value>]) -> Vec<&String> {
    let mut keys: Vec<&String> = Vec::new();
    for key in rows.iter().flat_map(|row| row.keys()) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys.sort_by_key(|key| ABOUT.iter().position(|one| one == key).unwrap_or(ABOUT.len()));
    keys
}

/// A value as a cell of a table.
fn cell(row: &Map<String, Value>, key: &str) -> String {
    match row.get(key) {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => match number.as_f64() {
            Some(value) if !number.is_i64() && !number.is_u64() => format!("{value:.3}"),
            _ => number.to_string(),
        },
        Some(other) => other.to_string(),
    }
}

/// Rows as comma-separated values, the columns' names first. A cell with a comma, a quote or a line's end is quoted.
fn csv(rows: &[Map<String, Value>]) -> String {
    let quoted = |text: String| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    };
    let keys = keys(rows);
    let line =
        |cells: &mut dyn Iterator<Item = String>| cells.map(quoted).collect::<Vec<_>>().join(",") + "\n";
    let mut text = line(&mut keys.iter().map(|key| (*key).clone()));
    for row in rows {
        // All digits of a number, unlike in the table.
        text += &line(&mut keys.iter().map(|key| match row.get(*key) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => String::new(),
        }));
    }
    text
}

pub(crate) fn columns(rows: &[Map<String, Value>]) -> String {
    let keys = keys(rows);
    let mut lines = vec![keys.iter().map(|key| (*key).clone()).collect()];
    lines.extend(rows.iter().map(|row| keys.iter().map(|key| cell(row, key)).collect()));
    aligned("  ", &lines)
}

/// Lines of cells, with each column as wide as its widest cell.
pub(crate) fn aligned(indent: &str, lines: &[Vec<String>]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines.first().map_or(0, Vec::len)).map(width).collect();
    let line = |cells: &Vec<String>| {
        let cells = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{indent}{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    lines.iter().map(line).collect()
}

/// The platform of the papers' policies, under which requests wait for up to a day.
pub(crate) fn without_bounds() -> gshare_sched::platform::PlatformConfig {
    gshare_sched::platform::PlatformConfig::default()
        .with_max_wait(gshare_core::Duration::from_secs(86_400))
        .with_max_waiting(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_has_a_header_and_quotes_where_it_must() {
        let rows = [
            row(&[("policy", "ours, late last".into()), ("p95_ms", 1.23456.into())]),
            row(&[("policy", "the \"best\"".into()), ("load", 1.into())]),
        ];
        assert_eq!(csv(&rows), "policy,load,p95_ms\n\"ours, late last\",,1.23456\n\"the \"\"best\"\"\",1,\n");
    }

    #[test]
    fn answers_come_in_order_whatever_the_threads() {
        let squares = |threads| in_parallel(threads, 40, |number| Ok(number * number)).unwrap();
        assert_eq!(squares(1), (0..40).map(|number| number * number).collect::<Vec<_>>());
        assert_eq!(squares(1), squares(7));
        let odd = |number: usize| if number % 7 == 6 { anyhow::bail!("{number}") } else { Ok(()) };
        for threads in 1..8 {
            assert_eq!(in_parallel(threads, 40, odd).unwrap_err().to_string(), "6");
        }
    }
}
