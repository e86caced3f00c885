//! `gshare engine`: a decision engine as a filter, for hosts in any language.

use super::{print_json, schema};
use anyhow::Context as _;
use gshare_core::{Engine as _, Timestamp, TokenAction, TokenEvent};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;

/// Feed an engine events as JSON lines; read its actions as JSON lines.
///
/// Each line in, `{"now_ns": N, "event": {…}}`, gives one line out: `{"now_ns": N, "actions": […],
/// "next_deadline_ns": N or null}`, or `{"error": "…", "line": N}` if the event is refused, which changes nothing. The
/// host calls again at the deadline with `deadline_reached`. A line without an event is passed over, so that a journal
/// of the daemon is input as it is; the header of a journal configures the engine.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The engine.
    #[command(subcommand)]
    engine: Kind,
}

#[derive(Debug, clap::Subcommand)]
enum Kind {
    /// The multi-token scheduler: who may launch kernels now.
    Token(Token),
}

#[derive(Debug, clap::Args)]
struct Token {
    /// Print the JSON schema of a line in, a line out and the configuration, and exit.
    #[arg(long)]
    schema: bool,
    /// Configuration of the engine: a JSON file; what it leaves out is the default.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Input {
    now_ns: Option<Timestamp>,
    event: Option<TokenEvent>,
    /// Of a journal's header.
    engine: Option<MultiTokenConfig>,
}

#[derive(Serialize)]
struct Output<'a> {
    now_ns: Timestamp,
    actions: &'a [TokenAction],
    next_deadline_ns: Option<Timestamp>,
}

#[derive(Serialize)]
struct Refusal {
    error: String,
    line: u64,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let Kind::Token(token) = &options.engine;
    if token.schema {
        return print_json(&schema::token());
    }
    let config = match &token.config {
        None => MultiTokenConfig::default(),
        Some(file) => {
            let context = || format!("--config {}", file.display());
            let text = std::fs::read_to_string(file).with_context(context)?;
            serde_json::from_str(&text).with_context(context)?
        }
    };
    filter(config, &mut std::io::stdin().lock(), &mut std::io::stdout().lock())
}

/// Answers each event of `input` with one line, at once: the host may wait for it.
fn filter(config: MultiTokenConfig, input: &mut impl BufRead, output: &mut impl Write) -> anyhow::Result<()> {
    let mut engine = MultiToken::new(config)?;
    let (mut line, mut actions, mut text) = (0, Vec::new(), Vec::new());
    loop {
        text.clear();
        line += 1;
        // Zero bytes: the end of a journal whose daemon was killed.
        if input.read_until(b'\n', &mut text)? == 0 || text.first() == Some(&0) {
            return Ok(());
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        actions.clear();
        let answer = match serde_json::from_slice::<Input>(&text) {
            Err(error) => Err(error.to_string()),
            Ok(Input { engine: Some(config), event: None, .. }) => {
                match MultiToken::new(config) {
                    Ok(configured) => engine = configured,
                    Err(error) => refuse(output, error.to_string(), line)?,
                }
                continue;
            }
            Ok(Input { event: None, .. }) => continue,
            Ok(Input { now_ns: None, .. }) => Err("an event without now_ns".into()),
            Ok(Input { now_ns: Some(now), event: Some(event), .. }) => engine
                .handle(now, event, &mut actions)
                .map(|()| Output { now_ns: now, actions: &actions, next_deadline_ns: engine.next_deadline() })
                .map_err(|error| error.to_string()),
        };
        match answer {
            Ok(answer) => {
                serde_json::to_writer(&mut *output, &answer)?;
                output.write_all(b"\n")?;
                output.flush()?;
            }
            Err(error) => refuse(output, error, line)?,
        }
    }
}

fn refuse(output: &mut impl Write, error: String, line: u64) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *output, &Refusal { error, line })?;
    output.write_all(b"\n")?;
    Ok(output.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(input: &str) -> Vec<serde_json::Value> {
        let mut output = Vec::new();
        filter(MultiTokenConfig::default(), &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    const JOIN: &str = r#"{"now_ns":5,"event":{"event":"client_joined","client":0,"gpu":0,"share":{"quota":{"request":3000,"limit":8000},"sm":2400}}}"#;

    #[test]
    fn an_event_in_is_a_line_out_with_actions_and_the_next_deadline() {
        let input =
            format!("{JOIN}\n{{\"now_ns\":6,\"event\":{{\"event\":\"token_requested\",\"client\":0}}}}\n");
        let lines = answers(&input);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["actions"].as_array().unwrap().len(), 0);
        assert_eq!(lines[1]["actions"][0]["action"], "grant");
        assert!(lines[1]["next_deadline_ns"].as_u64().unwrap() > 6);
    }

    #[test]
    fn an_error_is_a_line_of_its_own_and_changes_nothing() {
        let input = format!(
            "nonsense\n{JOIN}\n{JOIN}\n{{\"event\":{{\"event\":\"deadline_reached\"}}}}\n\n{{\"now_ns\":4,\"event\":{{\"event\":\"deadline_reached\"}}}}\n{{\"now_ns\":6,\"event\":{{\"event\":\"token_requested\",\"client\":0}}}}"
        );
        let lines = answers(&input);
        assert_eq!(lines.len(), 6);
        assert_eq!((lines[0]["line"].as_u64(), lines[2]["line"].as_u64()), (Some(1), Some(3)));
        assert!(lines[2]["error"].as_str().unwrap().contains("cannot join"));
        assert!(lines[3]["error"].as_str().unwrap().contains("now_ns"));
        assert!(lines[4]["error"].as_str().unwrap().contains("time went back"));
        assert_eq!(lines[5]["actions"][0]["action"], "grant");
    }

    #[test]
    fn a_journal_is_input_as_it_is() {
        let input = format!(
            "{{\"journal\":1,\"epoch\":3,\"segment\":0,\"engine\":{{\"max_clients\":0}}}}\n\
             {{\"journal\":1,\"epoch\":3,\"segment\":0,\"engine\":{{\"window_ns\":50000000}}}}\n{JOIN}\n\
             {{\"now_ns\":5,\"actions\":[]}}\n{{\"now_ns\":5,\"note\":{{\"client\":0,\"name\":\"a\",\"pid\":1}}}}\n\0\0\0"
        );
        let lines = answers(&input);
        assert_eq!(lines.len(), 2, "a bad header is an error, notes and actions are passed over: {lines:?}");
        assert!(lines[0]["error"].as_str().unwrap().contains("max_clients"));
    }
}
