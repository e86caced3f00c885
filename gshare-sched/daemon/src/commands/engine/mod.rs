//! `gshare engine`: a decision engine as a filter, for hosts in any language.

mod filter;
mod request;
mod token;

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
    Token(filter::Options),
    /// The request scheduler: which GPU serves which request, and which models stay in its memory.
    Request(filter::Options),
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match &options.engine {
        Kind::Token(options) => token::run(options),
        Kind::Request(options) => request::run(options),
    }
}
