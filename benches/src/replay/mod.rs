//! Replays: a figure of a paper, run again on our engines and printed beside the paper's numbers.
//!
//! One module per figure, with `Args` (its flags) and `run` (which answers with a [`Report`]). The binary `replay`
//! turns a report into a table, or with `--json` into one JSON object:
//! `{"scenario", "seeds", "rows": [{"policy", ...}], "paper": [{...}]}`, and where seeds decide much `compared`, which says
//! how sure they are, see [`paired`].

pub mod dilu_cv;
pub mod dilu_fig20;
pub mod dilu_table2;
pub mod dilu_table3;
pub mod fast_fig11;
pub mod fast_fig12;
pub mod fast_slots;
pub mod fluidfaas;
pub mod fluidfaas_evict;
pub mod lalb;
pub mod lalb_real;
pub mod packing;
pub mod paired;
pub mod store_memory;

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a replay found, beside what the paper printed.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the scenario, as on the command line.
    pub scenario: &'static str,
    /// Seeds it ran with; empty when nothing is drawn at random.
    pub seeds: Vec<u64>,
    /// One object per policy (and input).
    pub rows: Vec<Map<String, Value>>,
    /// Ours beside another policy, seed by seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<paired::Compared>,
    /// The paper's figures for the same rows.
    pub paper: Vec<Map<String, Value>>,
}

impl Report {
    /// A report without rows.
    pub const fn new(scenario: &'static str, seeds: Vec<u64>) -> Self {
        Self { scenario, seeds, rows: Vec::new(), compared: None, paper: Vec::new() }
    }

    /// The report as text: a table of the rows, what they come to beside each other, then one of the paper's.
    pub fn table(&self) -> String {
        let mut text = format!("{} (seeds {:?})\n", self.scenario, self.seeds);
        text.push_str(&columns(&self.rows));
        if let Some(compared) = &self.compared {
            text.push('\n');
            text.push_str(&compared.table());
        }
        if !self.paper.is_empty() {
            text.push_str("\nprinted in the paper, or found by its published rules\n");
            text.push_str(&columns(&self.paper));
        }
        text
    }
}

/// What `job` answers for each number below `jobs`, in their order, with the work divided among `threads`.
///
/// # Errors
/// That of the first job that failed.
pub fn in_parallel<T: Send>(
    threads: usize,
    jobs: usize,
    job: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= jobs {
                return done;
            }
            let answer = job(number);
            if answer.is_err() {
                // Those before it are done or under way, so it is known which failed first.
                next.store(jobs, Ordering::Relaxed);
            }
            done.push((number, answer));
        }
    };
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
        joined.flatten().collect()
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, answer)| answer).collect()
}

/// A row from pairs: `row(&[("policy", "ours".into()), ("gpus", 1.into())])`.
pub fn row(pairs: &[(&str, Value)]) -> Map<String, Value> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

fn columns(rows: &[Map<String, Value>]) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for key in rows.iter().flat_map(|row| row.keys()) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    // What a row is about first, whatever the alphabet says.
    let about = ["policy", "workload", "partition", "load"];
    keys.sort_by_key(|key| about.iter().position(|one| one == key).unwrap_or(about.len()));
    let cell = |row: &Map<String, Value>, key: &String| match row.get(key) {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => match number.as_f64() {
            Some(value) if !number.is_i64() && !number.is_u64() => format!("{value:.3}"),
            _ => number.to_string(),
        },
        Some(other) => other.to_string(),
    };
    let mut text = String::new();
    let widths: Vec<usize> = keys
        .iter()
        .map(|key| {
            rows.iter().map(|row| cell(row, key).chars().count()).chain([key.len()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: Vec<String>| {
        let cells = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    text.push_str(&line(keys.iter().map(|key| (*key).clone()).collect()));
    for row in rows {
        text.push_str(&line(keys.iter().map(|key| cell(row, key)).collect()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

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
