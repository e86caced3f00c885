//! `gshare top`: the table of `gshare status`, again and again.

use super::{Where, out, status};
use gshare_core::{ClientId, Duration, Timestamp};
use std::collections::BTreeMap;

/// Show shares asked for and measured, SMs, memory and waits, live.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    place: Where,
    /// Time between two tables, over which shares are measured.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Stop after so many tables.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let time: Duration = text.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())?;
    if time < Duration::from_millis(50) { Err("need at least 50ms".into()) } else { Ok(time) }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stdout());
    let mut before: (Timestamp, BTreeMap<ClientId, Duration>) = Default::default();
    let mut shown = 0;
    while options.count.is_none_or(|count| shown < count) {
        if shown > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(options.interval.as_nanos()));
        }
        let snapshot = options.place.snapshot()?;
        let elapsed = snapshot.now_ns.saturating_since(before.0).as_nanos();
        let table = status::text(&snapshot, |client| {
            let Some(used) = before.1.get(&client.client) else { return client.measured };
            let late = client.total_used_ns.as_nanos().saturating_sub(used.as_nanos());
            #[expect(clippy::cast_precision_loss, reason = "a report")]
            let share = late as f64 / elapsed.max(1) as f64;
            share
        });
        let text = if terminal {
            // Home; each line is cleared to its end, so that the table does not flicker.
            format!("\x1b[H{}\x1b[J", table.replace('\n', "\x1b[K\n"))
        } else {
            table + "\n"
        };
        if !out::write(&mut std::io::stdout().lock(), text.as_bytes())? {
            return Ok(());
        }
        let used = snapshot.clients.iter().map(|client| (client.client, client.total_used_ns)).collect();
        before = (snapshot.now_ns, used);
        shown += 1;
    }
    Ok(())
}
