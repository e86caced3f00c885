//! Replays: a figure of a paper, run again on our engines and printed beside the paper's numbers.
//!
//! One module per figure, with `Args` (its flags) and `run` (which answers with a [`Report`]). The binary `replay`
//! turns a report into a table, or with `--json` into one JSON object:
//! `{"scenario", "seeds", "rows": [{"policy", ...}], "paper": [{...}]}`.

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
pub mod store_memory;

use serde::Serialize;
use serde_json::{Map, Value};

/// What a replay found, beside what the paper printed.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the scenario, as on the command line.
    pub scenario: &'static str,
    /// Seeds it ran with; empty when nothing is drawn at random.
    pub seeds: Vec<u64>,
    /// One object per policy (and input).
    pub rows: Vec<Map<String, Value>>,
    /// The paper's figures for the same rows.
    pub paper: Vec<Map<String, Value>>,
}

impl Report {
    /// A report without rows.
    pub const fn new(scenario: &'static str, seeds: Vec<u64>) -> Self {
        Self { scenario, seeds, rows: Vec::new(), paper: Vec::new() }
    }

    /// The report as text: a table of the rows, then one of the paper's.
    pub fn table(&self) -> String {
        let mut text = format!("{} (seeds {:?})\n", self.scenario, self.seeds);
        text.push_str(&columns(&self.rows));
        if !self.paper.is_empty() {
            text.push_str("\nprinted in the paper, or found by its published rules\n");
            text.push_str(&columns(&self.paper));
        }
        text
    }
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
    // The policy first, whatever the alphabet says.
    keys.sort_by_key(|key| *key != "policy");
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
        .map(|key| rows.iter().map(|row| cell(row, key).len()).chain([key.len()]).max().unwrap_or(0))
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
