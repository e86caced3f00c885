//! `gshare top`: the clients of the GPUs, live: a screen on a terminal, else the table of `gshare status` again and again.

mod view;

use super::{Form, Where, out, status};
use gshare_core::{ClientId, Duration, Timestamp};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use view::View;

/// Longest wait for a key, so that a signal ends the command soon.
const TURN: std::time::Duration = std::time::Duration::from_millis(100);

/// Show requested and measured shares, SMs, memory and waits, live.
///
/// On a terminal each client has a row with a bar of used against requested time, and the last 60 measurements; columns
/// that do not fit are left out. Keys: s sorts by the next column, r reverses, arrows and PgUp/PgDn move, ? explains, q
/// ends. Elsewhere, and with --count or --json, tables are printed one after another; a table in JSON is one line, with the
/// fields of `gshare status --json`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare top                                 the screen, measured each second; q ends
  gshare top --interval 250ms                four times a second
  gshare top --count 60 > shares             a minute of tables, for a file
  gshare top --json --interval 5s            a line of JSON each five seconds")]
pub(crate) struct Options {
    #[command(flatten)]
    place: Where,
    /// Time between two tables, over which shares are measured.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print N tables, and stop.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    form: Form,
}

fn interval(text: &str) -> Result<Duration, String> {
    let time: Duration = text.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())?;
    if time < Duration::from_millis(50) { Err("need at least 50ms".into()) } else { Ok(time) }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if options.form.json || options.count.is_some() || dumb || !std::io::stdout().is_terminal() {
        return tables(options);
    }
    let mut view = View::new(std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()));
    // Without a daemon the command ends before the terminal is touched.
    view.update(options.place.snapshot()?);
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    // A panic restores the terminal as well, by a hook of `try_init`.
    let shown = ratatui::try_init()
        .map_err(anyhow::Error::from)
        .and_then(|mut terminal| live(options, &mut view, &mut terminal, &ended));
    let restored = ratatui::try_restore();
    shown?;
    Ok(restored?)
}

/// Shows the view until a key or a signal ends it.
fn live(
    options: &Options,
    view: &mut View,
    terminal: &mut ratatui::DefaultTerminal,
    ended: &AtomicBool,
) -> anyhow::Result<()> {
    let interval = std::time::Duration::from_nanos(options.interval.as_nanos());
    let mut asked = Instant::now();
    while !ended.load(Ordering::Relaxed) {
        terminal.draw(|frame| view.draw(frame))?;
        if event::poll(interval.saturating_sub(asked.elapsed()).min(TURN))? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release && !view.key(key) => return Ok(()),
                _ => {}
            }
        }
        if asked.elapsed() >= interval {
            asked = Instant::now();
            match options.place.snapshot() {
                Ok(snapshot) => view.update(snapshot),
                Err(error) => view.fail(&error.to_string()),
            }
        }
    }
    Ok(())
}

/// Prints tables, one after another.
fn tables(options: &Options) -> anyhow::Result<()> {
    let mut before: (Timestamp, BTreeMap<ClientId, Duration>) = Default::default();
    let mut shown = 0;
    while options.count.is_none_or(|count| shown < count) {
        if shown > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(options.interval.as_nanos()));
        }
        let mut snapshot = options.place.snapshot()?;
        let elapsed = snapshot.now_ns.saturating_since(before.0);
        for client in &mut snapshot.clients {
            if let Some(used) = before.1.get(&client.client) {
                client.measured = share(client.total_used_ns.saturating_sub(*used), elapsed);
            }
        }
        status::look_who_holds(&mut snapshot);
        let text = match options.form.json {
            true => serde_json::to_string(&snapshot)?,
            false => status::text(&snapshot),
        };
        if !out::write(&mut std::io::stdout().lock(), (text + "\n").as_bytes())? {
            return Ok(());
        }
        let used = snapshot.clients.iter().map(|client| (client.client, client.total_used_ns)).collect();
        before = (snapshot.now_ns, used);
        shown += 1;
    }
    Ok(())
}

/// The part `used` of `elapsed`, as a fraction of 1.
#[expect(clippy::cast_precision_loss, reason = "a report")]
fn share(used: Duration, elapsed: Duration) -> f64 {
    used.as_nanos() as f64 / elapsed.as_nanos().max(1) as f64
}
