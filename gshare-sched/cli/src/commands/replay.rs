//! `gshare replay`: drives the engine over a journal and checks what it did.

use super::print_json;
use anyhow::Context as _;
use gshare_core::{ClientId, GpuId, LeaseId, Timestamp, TokenAction, TokenEvent, TokenScheduler};
use gshare_sched::token::MultiTokenConfig;
use gshared::journal::{self, Line};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Replay a journal: the same engine, told the same events at the same times.
///
/// Orders that were recorded (`journal.actions = true`) must come out again; a run whose first file is gone is checked
/// as far as its orders were recorded. Exits with an error if an order differs, if the SMs of the holders of a GPU add
/// up to more than the whole, or if one lease was granted to two clients.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Journal files, or directories of them.
    #[arg(required = true, value_name = "JOURNAL")]
    journal: Vec<PathBuf>,
    /// Print one JSON object: {"runs": […]}, times in ns.
    #[arg(long)]
    json: bool,
}

/// One run of a daemon.
#[derive(Debug, Default, Serialize)]
struct Run {
    epoch: u64,
    files: usize,
    /// Whether the journal has the run from its start, so that the engine's orders are comparable.
    from_start: bool,
    events: u64,
    /// Events that the engine refused, those included that the journal only counts.
    refused: u64,
    grants: u64,
    revokes: u64,
    throttles: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    /// Events whose recorded orders were compared with the replay's.
    compared: u64,
    differences: u64,
    /// The most SMs that holders had at once, in basis points.
    most_sm_held: u64,
    /// Times the holders' SMs added up to more than the whole.
    sm_violations: u64,
    /// Leases that went to two clients.
    doubled_leases: u64,
    clients: Vec<Client>,
}

/// What a client got.
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

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut files = Vec::new();
    for path in &options.journal {
        let context = || path.display().to_string();
        if path.is_dir() {
            files.extend(journal::segments(path).with_context(context)?);
        } else {
            files.push(path.clone());
        }
    }
    anyhow::ensure!(!files.is_empty(), "no journal files there");
    let runs = replay(&files)?;
    if options.json {
        print_json(&serde_json::json!({ "runs": runs }))?;
    } else {
        runs.iter().for_each(print);
    }
    let bad: u64 = runs.iter().map(|run| run.differences + run.sm_violations + run.doubled_leases).sum();
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
    match (run.from_start, run.compared) {
        (false, _) => println!("  its beginning is missing: orders are not compared"),
        (true, 0) => println!("  orders were not recorded: replayed, nothing to compare"),
        (true, n) => println!("  {n} recorded orders compared, {} differ", run.differences),
    }
    println!(
        "  holders' SMs: at most {}.{:02}% at once, {} times beyond the whole; {} leases doubled",
        run.most_sm_held / 100,
        run.most_sm_held % 100,
        run.sm_violations,
        run.doubled_leases
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

fn replay(files: &[PathBuf]) -> anyhow::Result<Vec<Run>> {
    let mut runs: Vec<Replay> = Vec::new();
    for file in files {
        let context = || file.display().to_string();
        for line in journal::read(file).with_context(context)? {
            let line = line.with_context(context)?;
            if let Some(epoch) = line.epoch {
                match runs.last_mut() {
                    // After a gap the engine's state is unknown, as where the first file is gone.
                    Some(last) if last.run.epoch == epoch && line.lost == 0 => last.run.files += 1,
                    _ => runs.push(Replay::new(epoch, &line).with_context(context)?),
                }
                continue;
            }
            runs.last_mut().with_context(|| no_header(file))?.line(&line);
        }
    }
    Ok(runs.into_iter().map(Replay::finish).collect())
}

fn no_header(file: &Path) -> String {
    format!("{}: does not begin with a journal's header", file.display())
}

struct Replay {
    run: Run,
    engine: Box<dyn TokenScheduler>,
    orders: Vec<TokenAction>,
    clients: BTreeMap<ClientId, Client>,
    gone: Vec<Client>,
    names: BTreeMap<ClientId, (String, i32)>,
    /// What each holder has: its GPU and its SMs, as they were when it was granted.
    holders: BTreeMap<ClientId, (LeaseId, GpuId, u64)>,
    owners: BTreeMap<LeaseId, ClientId>,
    sms: BTreeMap<ClientId, u64>,
    used: BTreeMap<ClientId, (LeaseId, u64)>,
}

impl Replay {
    fn new(epoch: u64, header: &Line) -> anyhow::Result<Self> {
        let config: MultiTokenConfig =
            serde_json::from_value(header.engine.clone().context("its token scheduler was the host's own")?)?;
        let from_start = header.segment == Some(0);
        Ok(Self {
            run: Run { epoch, files: 1, from_start, ..Run::default() },
            engine: header.policy.build(config)?,
            orders: Vec::new(),
            clients: BTreeMap::new(),
            gone: Vec::new(),
            names: BTreeMap::new(),
            holders: BTreeMap::new(),
            owners: BTreeMap::new(),
            sms: BTreeMap::new(),
            used: BTreeMap::new(),
        })
    }

    fn line(&mut self, line: &Line) {
        if let Some(note) = &line.note {
            self.names.insert(note.client, (note.name.clone(), note.pid));
        }
        self.run.refused += line.omitted.unwrap_or(0);
        let Some(now) = line.now_ns else { return };
        if let Some(event) = line.event {
            self.event(now, event);
        }
        if let Some(recorded) = &line.actions {
            if self.run.from_start {
                self.run.compared += 1;
                self.run.differences += u64::from(*recorded != self.orders);
            } else {
                // What the engine of that time said, as this one does not know its past.
                let recorded = recorded.clone();
                self.orders(now, &recorded);
            }
        }
    }

    fn event(&mut self, now: u64, event: TokenEvent) {
        self.run.first_ns.get_or_insert(now);
        self.run.last_ns = now;
        self.run.events += 1;
        self.orders.clear();
        let handled = self.engine.handle(Timestamp::from_nanos(now), event, &mut self.orders);
        if handled.is_err() {
            self.run.refused += 1;
            if self.run.from_start {
                return;
            }
        }
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
            TokenEvent::TokenReturned { client, lease, used, .. } => {
                self.use_time(client, lease, used.as_nanos());
                if self.holders.get(&client).is_some_and(|(held, ..)| *held == lease) {
                    self.holders.remove(&client);
                }
            }
            TokenEvent::UsageReported { client, lease, used } => {
                self.use_time(client, lease, used.as_nanos());
            }
            TokenEvent::ClientLeft { client } => {
                self.holders.remove(&client);
                self.sms.remove(&client);
                self.used.remove(&client);
                if let Some(entry) = self.clients.remove(&client) {
                    self.gone.push(self.closed(entry, now));
                }
            }
            _ => {}
        }
        if self.run.from_start {
            let orders = std::mem::take(&mut self.orders);
            self.orders(now, &orders);
            self.orders = orders;
        }
    }

    /// Books what was ordered: who holds what.
    fn orders(&mut self, now: u64, orders: &[TokenAction]) {
        for order in orders {
            match *order {
                TokenAction::Grant { client, lease, .. } => {
                    self.run.grants += 1;
                    if let Some(entry) = self.clients.get_mut(&client) {
                        entry.grants += 1;
                        let gpu = entry.gpu;
                        let sm = self.sms.get(&client).copied().unwrap_or(0);
                        // A lease that is extended keeps the SMs it was granted with.
                        let held = self.holders.get(&client).filter(|(held, ..)| *held == lease);
                        let sm = held.map_or(sm, |(_, _, sm)| *sm);
                        self.holders.insert(client, (lease, gpu, sm));
                        self.check_sms(gpu);
                    }
                    let owner = *self.owners.entry(lease).or_insert(client);
                    self.run.doubled_leases += u64::from(owner != client);
                }
                TokenAction::Revoke { client, .. } => {
                    self.run.revokes += 1;
                    self.holders.remove(&client);
                    if let Some(entry) = self.clients.get_mut(&client) {
                        entry.revoked += 1;
                    }
                }
                TokenAction::Throttle { .. } => self.run.throttles += 1,
                _ => {}
            }
        }
        self.run.last_ns = now;
    }

    fn check_sms(&mut self, gpu: GpuId) {
        let held: u64 = self.holders.values().filter(|(_, on, _)| *on == gpu).map(|(.., sm)| sm).sum();
        self.run.most_sm_held = self.run.most_sm_held.max(held);
        self.run.sm_violations += u64::from(held > 10_000);
    }

    fn use_time(&mut self, client: ClientId, lease: LeaseId, used: u64) {
        let before = self.used.insert(client, (lease, used));
        let more = match before {
            Some((of, before)) if of == lease => used.saturating_sub(before),
            _ => used,
        };
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.used_ns += more;
        }
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
