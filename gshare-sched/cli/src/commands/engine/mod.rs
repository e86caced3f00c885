//! `gshare lab engine`: a decision engine as a filter, for hosts in any language.
//!
//! # Cost, and why there is no C interface
//! `benches/scripts/filter_cost.py` measures the cost. On two idle CPUs of a virtual machine a round trip through the token
//! engine takes 60 us where the same bytes through `cat` take 53 us; on busy CPUs it is 11 us and 7.5 us. So most of the
//! time goes into waking a sleeping process, twice. An event without a waiting process takes 2.2 us, of which the decision
//! takes some 0.5 us. A token is 10 ms long and costs two events: 1.2 % of its time if the host waits for each answer, and
//! 0.05 % if it does not; scaling and placement come once a second. A C interface would save this cost. In return it would
//! freeze the layout of events and actions, which grow, bring `unsafe` to the host, and take crashes and memory of two
//! languages into one process. It becomes worth its price for a host with more than some thousand awaited decisions a
//! second, and such a host can embed the crate.

mod filter;
mod platform_events;
mod token_scheduler;

/// Feed an engine events as JSON lines; read its actions as JSON lines.
///
/// Each line in, `{"now_ns": N, "event": {…}}`, gives one line out: `{"now_ns": N, "actions": […], "next_deadline_ns": N or
/// null}`, or `{"error": "…", "line": N}` if the event is refused, which changes nothing. The host calls again at the
/// deadline with `deadline_reached`. A line without an event is skipped. A line with an `"engine"` replaces the engine by a
/// new engine with that configuration.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab engine platform --schema                                 what a line in and a line out may be
  gshare lab engine token < events.jsonl > actions.jsonl")]
pub(crate) struct Options {
    /// The engine.
    #[command(subcommand)]
    engine: Kind,
}

#[derive(Debug, clap::Subcommand)]
enum Kind {
    /// The multi-token scheduler of one node, which decides on clients that may launch kernels.
    Token(filter::Options),
    /// The platform: functions, instances and requests of a whole cluster, with its packers, scalers, routers and keepers.
    Platform(filter::Options),
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match &options.engine {
        Kind::Token(options) => token_scheduler::run(options),
        Kind::Platform(options) => platform_events::run(options),
    }
}
