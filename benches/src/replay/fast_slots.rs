//! FaST-GShare, sections 3.3.3 and 3.4.2: does each packed client get its promised quota?
//!
//! A GPU is offered 60 demands of a mix, one by one, and takes each demand that fits, so it is packed to the brim. Every client is
//! always backlogged, request = limit. The policy `printed_queue` is the queue by missing quota, up to the first client that does
//! not fit, in a hundred quanta a window. The policy `multi_token` is the engine, which keeps slots where the quotas add up to more
//! than a window. A GPU counts as met if every client got its quota in each of three windows.

use anyhow::{Context, Result, anyhow};
use gshare_core::{ClientId, Duration, GpuId, QuotaRange, Share, SmShare, Timestamp, TokenEvent};
use gshare_sched::pack::{MaxRectsConfig, Packer, Placement};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::token::drive::Driver;
use gshare_sim::token::keen::Keen;
use gshare_sim::token::{Terms, check};
use serde_json::{Map, Value};

use super::{Report, row};
use crate::mixes::{Mix, SplitMix64};
use crate::peers::{Ours, demand};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// First seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds; each packs `--gpus` GPUs of every mix
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// GPUs of a mix
    #[arg(long, default_value_t = 100)]
    gpus: u32,
}

/// Windows measured, after one to settle.
const WINDOWS: u64 = 3;
/// How long before its end a client asks for the next token.
const AHEAD: Duration = Duration::from_micros(300);

/// Runs every policy on the same GPUs.
///
/// # Errors
/// When a scheduler breaks its contract.
pub fn run(args: &Args) -> Result<Report> {
    let seeds: Vec<u64> = (args.seed..args.seed + args.seeds).collect();
    let mut report = Report::new("fast-slots", seeds.clone());
    for mix in Mix::PERCENT {
        let mut packed = Vec::new();
        for seed in &seeds {
            let mut rng = SplitMix64::new(*seed);
            for _ in 0..args.gpus {
                packed.push(pack(mix, &mut rng));
            }
        }
        for policy in ["printed_queue", "multi_token"] {
            let (mut met, mut worst) = (0usize, f64::INFINITY);
            for clients in &packed {
                let least = match policy {
                    "printed_queue" => printed_queue(clients),
                    _ => engine(clients).with_context(|| format!("{policy} on {clients:?}"))?,
                };
                met += usize::from(least >= 1.0);
                worst = worst.min(least);
            }
            report.rows.push(row(&[
                ("policy", policy.into()),
                ("input", mix.name().into()),
                ("gpus", packed.len().into()),
                ("gpus_met", met.into()),
                ("gpus_met_percent", percent(met, packed.len()).into()),
                ("worst_share_of_quota", worst.min(1.0).into()),
            ]));
        }
    }
    // Found by the printed rule in the same quanta, before this engine was there.
    let printed = |input: &str, percent: u64| -> Map<String, Value> {
        row(&[
            ("policy", "printed_queue".into()),
            ("input", input.into()),
            ("gpus_met_percent", percent.into()),
        ])
    };
    report.paper = vec![printed("profile", 33), printed("light", 0), printed("fine", 42)];
    Ok(report)
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn percent(part: usize, whole: usize) -> f64 {
    part as f64 * 100.0 / whole.max(1) as f64
}

fn pack(mix: Mix, rng: &mut SplitMix64) -> Vec<Placement> {
    let mut pool = Ours::new(1, MaxRectsConfig::default()).0;
    for _ in 0..60 {
        let (w, h) = mix.draw(rng);
        // A demand that does not fit has no client.
        let _ = pool.place(&demand(w, h));
    }
    let mut placements = Vec::new();
    pool.placements(&mut |placement| placements.push(*placement));
    placements
}

/// The least that a client got of its quota, in a window of a hundred quanta.
fn printed_queue(clients: &[Placement]) -> f64 {
    let quota = |client: &Placement| i32::from(client.demand.quota.get() / 100);
    let mut used = vec![0i32; clients.len()];
    for _ in 0..100 {
        let mut queue: Vec<usize> = (0..clients.len()).collect();
        queue.retain(|client| used[*client] < quota(&clients[*client]));
        queue.sort_by_key(|client| (used[*client] - quota(&clients[*client]), *client));
        let mut free = SmShare::WHOLE.get();
        for client in queue {
            let Some(left) = free.checked_sub(clients[client].demand.sm.get()) else { break };
            free = left;
            used[client] += 1;
        }
    }
    let shares = clients.iter().zip(&used).map(|(client, used)| f64::from(*used) / f64::from(quota(client)));
    shares.fold(f64::INFINITY, f64::min)
}

/// The same in the least of the windows measured, by an engine.
fn engine(clients: &[Placement]) -> Result<f64> {
    let config = MultiTokenConfig::default();
    let window = config.window;
    let terms = Terms::multi_token(window, window, (config.slack, config.grace), config.max_debt);
    let mut driver = Driver::new(Box::new(MultiToken::new(config)?), terms, check::always());
    let mut keen = Keen::new(&mut driver, AHEAD);
    let now = Timestamp::ZERO;
    let wrong = |violation| anyhow!("{violation}");
    let ids: Vec<ClientId> =
        (0..u32::try_from(clients.len())?).map(|place| ClientId::new(place, 0)).collect();
    for (client, placement) in ids.iter().zip(clients) {
        let (client, demand) = (*client, placement.demand);
        let share = Share { quota: QuotaRange::new(demand.quota, demand.quota)?, sm: demand.sm };
        keen.call(now, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share }).map_err(wrong)?;
    }
    for client in &ids {
        keen.ask(now, *client).map_err(wrong)?;
    }
    let mut before = Vec::new();
    let mut least = f64::INFINITY;
    for index in 0..=WINDOWS {
        let end = now.saturating_add(window.saturating_mul(index + 1));
        keen.run(end).map_err(wrong)?;
        let total = |client: &ClientId| keen.used(end, *client);
        let totals: Vec<Duration> = ids.iter().map(total).collect();
        for ((now, before), placement) in totals.iter().zip(&before).zip(clients) {
            least = least.min(part((*now).saturating_sub(*before), placement.demand.quota.of(window)));
        }
        before = totals;
    }
    Ok(least)
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn part(used: Duration, quota: Duration) -> f64 {
    used.as_nanos() as f64 / quota.as_nanos().max(1) as f64
}
