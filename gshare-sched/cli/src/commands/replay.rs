//! `gshare replay`: drives a node over a journal and checks what it did.

use super::print_json;
use anyhow::Context as _;
use gshare_core::{ClientId, GpuId, TokenAction, TokenEvent, UseState};
use gshare_sched::node::{NodeAction, Note};
use gshared::journal::{self, Line, Replay, TokenStep};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Replay a journal: the same node, told the same events at the same times.
///
/// Each event must lead to the frames that it led to before; a run whose first file is gone is checked as far as its
/// actions were recorded (`journal.actions = true`). Exits with an error if an outcome differs, and says at which event;
/// if the SMs of the holders of a GPU add up to more than the whole, or if one lease was granted to two clients.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare replay /var/lib/gshare/journal                           whether the node would do the same again
  gshare replay --tokens journal | gshare engine token            what its token engine did, event by event")]
pub(crate) struct Options {
    /// Journal files, or directories of them.
    #[arg(required = true, value_name = "JOURNAL")]
    journal: Vec<PathBuf>,
    /// Print one JSON object: {"runs": […]}, times in ns.
    #[arg(long, conflicts_with = "tokens")]
    json: bool,
    /// Print the token engine's part alone, as input for `gshare engine token`: its configuration, then its events.
    #[arg(long)]
    tokens: bool,
}

/// One run of a daemon.
#[derive(Debug, Default, Serialize)]
struct Run {
    epoch: u64,
    files: usize,
    /// Whether the journal has the run from its start, so that it can be replayed.
    from_start: bool,
    events: u64,
    /// Events that the node refused or that had no effect, those included that the journal only counts; and events that
    /// the token engine refused.
    refused: u64,
    grants: u64,
    revokes: u64,
    throttles: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    /// Events whose recorded outcome was compared with the replay's.
    compared: u64,
    differences: u64,
    /// The first event whose outcome differs.
    first_difference: Option<Difference>,
    /// The most SMs that holders had at once, in basis points.
    most_sm_held: u64,
    /// Times the holders' SMs added up to more than the whole.
    sm_violations: u64,
    /// Leases that went to two clients.
    clients: Vec<Client>,
}

/// An event that led to something else than before.
#[derive(Debug, Clone, Serialize)]
struct Difference {
    file: PathBuf,
    /// Line in the file, from 1.
    line: u64,
    now_ns: u64,
    event: String,
}

/// The figures of an instance on a device.
#[derive(Debug, Clone, Serialize)]
struct Client {
    client: ClientId,
    name: Option<String>,
    pid: Option<i32>,
    gpu: GpuId,
    grants: u64,
    revoked: u64,
    used_ns: u64,
    /// Share of the time that it was there.
    share: f64,
    #[serde(skip)]
    joined: u64,
}

/// The journal files that paths lead to, oldest first within a directory.
pub(super) fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(journal::segments(path).with_context(|| path.display().to_string())?);
        } else {
            files.push(path.clone());
        }
    }
    anyhow::ensure!(!files.is_empty(), "no journal files there");
    Ok(files)
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let files = files(&options.journal)?;
    if options.tokens {
        return print_tokens(&files);
    }
    let runs = replay(&files)?;
    if options.json {
        print_json(&serde_json::json!({ "runs": runs }))?;
    } else {
        runs.iter().for_each(print);
    }
    let bad: u64 = runs.iter().map(|run| run.differences + run.sm_violations).sum();
    anyhow::ensure!(bad == 0, "the journal does not hold: see above");
    Ok(())
}

fn print(run: &Run) {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let span = run.last_ns.saturating_sub(run.first_ns.unwrap_or(run.last_ns)) as f64 / 1e9;
    println!(
        "run {}: {} events in {span:.3} s, {} grants, {} revokes, {} throttles, {} refused",
        run.epoch, run.events, run.grants, run.revokes, run.throttles, run.refused
    );
    if run.from_start {
        println!("  {} outcomes compared, {} differ", run.compared, run.differences);
    } else {
        println!("  its beginning is missing: outcomes are not compared");
    }
    if let Some(Difference { file, line, now_ns, event }) = &run.first_difference {
        println!("  first at {}:{line}, at {now_ns} ns: {event}", file.display());
    }
    println!(
        "  holders' SMs: at most {}.{:02}% at once, {} times beyond the whole",
        run.most_sm_held / 100,
        run.most_sm_held % 100,
        run.sm_violations
    );
    for client in &run.clients {
        let name = client.name.as_deref().unwrap_or("?");
        println!(
            "  {:<10} {name:<20} pid {:<8} {} grants {:<7} revoked {:<4} share {:.1}%",
            client.client.to_string(),
            client.pid.unwrap_or(0),
            client.gpu,
            client.grants,
            client.revoked,
            client.share * 100.0
        );
    }
}

/// Drives `each` over the lines of files; `true` in front of a header means that a run begins there.
pub(super) fn read(
    files: &[PathBuf],
    mut each: impl FnMut(&Path, u64, &Line, bool) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut last = None;
    for file in files {
        let context = || file.display().to_string();
        for (line, number) in journal::read(file).with_context(context)?.zip(1..) {
            let line = line.with_context(|| format!("{}:{number}", file.display()))?;
            // After a gap the state of the node is unknown, as where the first file is gone.
            let begins = line.epoch.is_some() && (line.epoch != last || line.lost > 0);
            last = line.epoch.or(last);
            anyhow::ensure!(last.is_some(), "{}: does not begin with a journal's header", file.display());
            each(file, number, &line, begins).with_context(|| format!("{}:{number}", file.display()))?;
        }
    }
    Ok(())
}

fn replay(files: &[PathBuf]) -> anyhow::Result<Vec<Run>> {
    let mut runs: Vec<Replayer> = Vec::new();
    read(files, |file, number, line, begins| {
        if begins {
            runs.push(Replayer::new(line)?);
        }
        let Some(last) = runs.last_mut() else { return Ok(()) };
        if line.epoch.is_some() {
            last.run.files += 1;
            return Ok(());
        }
        last.line(file, number, line)
    })?;
    Ok(runs.into_iter().map(Replayer::finish).collect())
}

/// The token engine's configuration and events.
fn print_tokens(files: &[PathBuf]) -> anyhow::Result<()> {
    let mut replay: Option<Replay> = None;
    read(files, |_, _, line, begins| {
        if begins {
            anyhow::ensure!(line.segment == Some(0), "its beginning is missing: it cannot be replayed");
            replay = Some(Replay::new(line)?);
            println!("{}", serde_json::json!({ "engine": line.engine }));
        }
        let Some(done) = replay.as_mut().map(|replay| replay.line(line)).transpose()?.flatten() else {
            return Ok(());
        };
        for action in done.actions {
            if let NodeAction::Note(Note::TokenEvent { token }) = action {
                println!("{}", serde_json::json!({ "now_ns": done.now, "event": token }));
            }
        }
        Ok(())
    })
}

struct Replayer {
    run: Run,
    /// `None` where the beginning is missing.
    replay: Option<Replay>,
    clients: BTreeMap<ClientId, Client>,
    gone: Vec<Client>,
    names: BTreeMap<ClientId, (String, i32)>,
    /// The GPU and the SMs of each holder, as they were when its token was granted.
    holders: BTreeMap<ClientId, (GpuId, u64)>,
    sms: BTreeMap<ClientId, u64>,
}

impl Replayer {
    fn new(header: &Line) -> anyhow::Result<Self> {
        let from_start = header.segment == Some(0);
        let replay = Replay::new(header)?;
        Ok(Self {
            run: Run { epoch: header.epoch.unwrap_or(0), from_start, ..Run::default() },
            replay: from_start.then_some(replay),
            clients: BTreeMap::new(),
            gone: Vec::new(),
            names: BTreeMap::new(),
            holders: BTreeMap::new(),
            sms: BTreeMap::new(),
        })
    }

    fn line(&mut self, file: &Path, number: u64, line: &Line) -> anyhow::Result<()> {
        self.run.refused += line.omitted.unwrap_or(0);
        let Some(now) = line.now_ns else { return Ok(()) };
        let Some(mut replay) = self.replay.take() else {
            // Counts the steps of the node of that time, as this one does not know its past.
            self.run.events += u64::from(line.event()?.is_some());
            line.tokens().for_each(|step| self.step(now, step));
            return Ok(());
        };
        if let Some(done) = replay.line(line)? {
            self.run.first_ns.get_or_insert(now);
            self.run.last_ns = now;
            self.run.events += 1;
            self.run.refused += u64::from(done.refused);
            self.run.compared += u64::from(done.same.is_some());
            if done.same == Some(false) {
                self.run.differences += 1;
                let event = format!("{:?}", line.event()?);
                let difference = Difference { file: file.to_owned(), line: number, now_ns: now, event };
                self.run.first_difference.get_or_insert(difference);
            }
            for action in done.actions {
                if let NodeAction::Note(note) = action {
                    self.note(now, note);
                }
            }
        }
        self.replay = Some(replay);
        Ok(())
    }

    fn note(&mut self, now: u64, note: &Note) {
        match note {
            Note::TokenEvent { token } => self.step(now, TokenStep::TokenEvent { token: *token }),
            Note::TokenOrder { order } => self.step(now, TokenStep::TokenOrder { order: *order }),
            Note::TokenRefused { .. } | Note::Refused { .. } => {
                self.run.refused += 1;
            }
            Note::DebtWait { .. } => self.run.throttles += 1,
            Note::Admitted { tenant, name, pid, .. } => {
                self.names.entry(*tenant).or_insert((name.clone(), *pid));
            }
            _ => {}
        }
    }

    fn step(&mut self, now: u64, step: TokenStep) {
        match step {
            TokenStep::TokenEvent { token } => self.event(now, token),
            TokenStep::TokenOrder { order } => self.order(order),
        }
    }

    fn event(&mut self, now: u64, event: TokenEvent) {
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                let entry = Client {
                    client,
                    name: None,
                    pid: None,
                    gpu,
                    grants: 0,
                    revoked: 0,
                    used_ns: 0,
                    share: 0.0,
                    joined: now,
                };
                self.clients.insert(client, entry);
                self.sms.insert(client, u64::from(share.sm.get()));
            }
            TokenEvent::ShareChanged { client, share } => {
                self.sms.insert(client, u64::from(share.sm.get()));
            }
            TokenEvent::Used { client, used, state } => {
                if let Some(entry) = self.clients.get_mut(&client) {
                    entry.used_ns = used.as_nanos();
                }
                if matches!(state, UseState::Idle | UseState::Wants) {
                    self.holders.remove(&client);
                }
            }
            TokenEvent::ClientLeft { client } => {
                self.holders.remove(&client);
                self.sms.remove(&client);
                if let Some(entry) = self.clients.remove(&client) {
                    self.gone.push(self.closed(entry, now));
                }
                self.names.remove(&client);
            }
            _ => {}
        }
    }

    /// Books what was ordered: who holds what.
    fn order(&mut self, order: TokenAction) {
        match order {
            TokenAction::Allow { client, .. } => {
                self.run.grants += 1;
                if let Some(entry) = self.clients.get_mut(&client) {
                    entry.grants += 1;
                    let gpu = entry.gpu;
                    let sm = self.sms.get(&client).copied().unwrap_or(0);
                    // A token that is extended keeps the SMs it was granted with.
                    let sm = self.holders.get(&client).map_or(sm, |(_, sm)| *sm);
                    self.holders.insert(client, (gpu, sm));
                    self.check_sms(gpu);
                }
            }
            TokenAction::Stop { client } => {
                self.run.revokes += 1;
                self.holders.remove(&client);
                if let Some(entry) = self.clients.get_mut(&client) {
                    entry.revoked += 1;
                }
            }
            TokenAction::Throttle { .. } => self.run.throttles += 1,
        }
    }

    fn check_sms(&mut self, gpu: GpuId) {
        let held: u64 = self.holders.values().filter(|(on, _)| *on == gpu).map(|(_, sm)| sm).sum();
        self.run.most_sm_held = self.run.most_sm_held.max(held);
        self.run.sm_violations += u64::from(held > 10_000);
    }

    fn closed(&self, mut entry: Client, now: u64) -> Client {
        if let Some((name, pid)) = self.names.get(&entry.client) {
            (entry.name, entry.pid) = (Some(name.clone()), Some(*pid));
        }
        #[expect(clippy::cast_precision_loss, reason = "a report")]
        let share = entry.used_ns as f64 / now.saturating_sub(entry.joined).max(1) as f64;
        entry.share = share;
        entry
    }

    fn finish(mut self) -> Run {
        let open: Vec<Client> = std::mem::take(&mut self.clients).into_values().collect();
        let now = self.run.last_ns;
        let mut all = std::mem::take(&mut self.gone);
        all.extend(open.into_iter().map(|entry| self.closed(entry, now)));
        self.run.clients = all;
        self.run
    }
}
