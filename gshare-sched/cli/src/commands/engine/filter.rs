//! The common part of the filters: lines in, lines out, and their schema.

use crate::commands::{out, print_json};
use anyhow::Context as _;
use gshare_core::{Engine, Timestamp};
use schemars::{JsonSchema, schema_for};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;

/// Arguments of each engine.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Print the JSON schema of a line in, a line out and the configuration, and exit.
    #[arg(long)]
    schema: bool,
    /// Configuration of the engine as a JSON file; missing fields have their defaults.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Options {
    /// The configuration in the file, or the default configuration.
    fn config<C: DeserializeOwned + Default>(&self) -> anyhow::Result<C> {
        let Some(file) = &self.config else { return Ok(C::default()) };
        let context = || format!("--config {}", file.display());
        let text = std::fs::read_to_string(file).with_context(context)?;
        serde_json::from_str(&text).with_context(context)
    }
}

/// A line in: an event and its time. A line without an event is skipped.
#[derive(Deserialize, JsonSchema)]
struct Input<Event, Config> {
    /// The time in ns since an epoch of the host's choice; never less than on the line before.
    #[schemars(required)]
    now_ns: Option<Timestamp>,
    #[schemars(required)]
    event: Option<Event>,
    /// Replaces the engine by another with this configuration: on the first line of the token engine's part of a journal.
    #[schemars(skip)]
    engine: Option<Config>,
}

/// A line out.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum Output<Answer> {
    /// The engine handled the line.
    Handled(Answer),
    /// The engine refused the line; nothing changed.
    Refused {
        /// The reason for the refusal.
        error: String,
        /// Number of the line in, from 1.
        line: u64,
    },
}

/// The answer of an engine.
#[derive(Serialize, JsonSchema)]
struct Orders<Action> {
    now_ns: Timestamp,
    actions: Vec<Action>,
    /// The time of the next `deadline_reached`; null for never.
    next_deadline_ns: Option<Timestamp>,
}

/// Runs an engine of a configuration, made by `new`, between standard input and output.
pub(super) fn run<E, C>(options: &Options, new: impl Fn(C) -> anyhow::Result<E>) -> anyhow::Result<()>
where
    E: Engine,
    E::Event: DeserializeOwned + JsonSchema,
    E::Action: Serialize + JsonSchema,
    C: DeserializeOwned + Default + JsonSchema,
{
    if options.schema {
        return print_json(&serde_json::json!({
            "input": schema_for!(Input<E::Event, C>),
            "output": schema_for!(Output<Orders<E::Action>>),
            "config": schema_for!(C),
        }));
    }
    filter(options.config()?, new, &mut std::io::stdin().lock(), &mut std::io::stdout().lock())
}

/// Gives each event of `input` to an engine.
pub(super) fn filter<E, C>(
    config: C,
    new: impl Fn(C) -> anyhow::Result<E>,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> anyhow::Result<()>
where
    E: Engine,
    E::Event: DeserializeOwned,
    E::Action: Serialize,
    C: DeserializeOwned,
{
    let mut engine = new(config)?;
    lines(input, output, |Input { now_ns, event, engine: config }| {
        let Some(event) = event else {
            if let Some(config) = config {
                engine = new(config)?;
            }
            return Ok(None);
        };
        let now_ns = now_ns.context("an event without now_ns")?;
        let mut actions = Vec::new();
        engine.handle(now_ns, event, &mut actions).map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(Some(Orders { now_ns, actions, next_deadline_ns: engine.next_deadline() }))
    })
}

/// Writes any answer of `handle` to a line of `input` at once, since the host may wait for it.
fn lines<I: DeserializeOwned, O: Serialize>(
    input: &mut impl BufRead,
    output: &mut impl Write,
    mut handle: impl FnMut(I) -> anyhow::Result<Option<O>>,
) -> anyhow::Result<()> {
    let (mut line, mut text) = (0, Vec::new());
    loop {
        text.clear();
        line += 1;
        // Zero bytes end the journal of a killed daemon.
        if input.read_until(b'\n', &mut text)? == 0 || text.first() == Some(&0) {
            return Ok(());
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let answer = serde_json::from_slice(&text).map_err(anyhow::Error::from).and_then(&mut handle);
        let answer = match answer {
            Ok(None) => continue,
            Ok(Some(answer)) => Output::Handled(answer),
            Err(error) => Output::Refused { error: format!("{error:#}"), line },
        };
        let mut answer = serde_json::to_vec(&answer)?;
        answer.push(b'\n');
        if !out::write(output, &answer)? {
            return Ok(());
        }
    }
}
