//! The figures of a run, read off its requests and its slices.

use super::super::row;
use super::applications::APPLICATIONS;
use gshare_core::{Duration, GpuId, Timestamp};
use gshare_sched::mig::GpuModel;
use gshare_sim::world::{Ended, Outcome, Record};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// The figures of one run.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Figures {
    sent: f64,
    in_time: f64,
    served: f64,
    seconds: f64,
    served_while_sent: f64,
    seconds_sent: f64,
    p95_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    mean_ms: f64,
    gpu_s: f64,
    mig_s: f64,
    held_s: f64,
    starts: f64,
    /// Sums over the answered requests: waiting, loads, execution and transfer in ms. The next field counts the requests that ran
    /// on several slices.
    spent_ms: [f64; 4],
    pipelines: f64,
    /// By application: counted, and in time.
    by_application: [[f64; 2]; APPLICATIONS.len()],
}

/// The time that spans take together, up to `end`.
fn covered<'a>(spans: impl Iterator<Item = &'a (Timestamp, Timestamp)>, end: Timestamp) -> Duration {
    let mut spans: Vec<_> = spans.map(|&(from, to)| (from, to.min(end))).collect();
    spans.sort_unstable();
    let mut upto = Timestamp::ZERO;
    let new = |(from, to): (Timestamp, Timestamp)| {
        let time = to.saturating_since(from.max(upto));
        upto = upto.max(to);
        time
    };
    spans.into_iter().map(new).sum()
}

pub(super) fn figures(outcome: &Outcome, model: &GpuModel, slos: &[Duration], from: Timestamp) -> Figures {
    let empty = Record::default();
    let record = outcome.record.as_ref().unwrap_or(&empty);
    let (mut latencies, mut in_time, mut sent, mut while_sent) = (Vec::new(), 0u64, 0u64, 0u64);
    let (mut spent_ms, mut pipelines, mut by_application) = ([0.0; 4], 0u64, [[0.0; 2]; APPLICATIONS.len()]);
    let last = record.ends.iter().map(|end| end.arrived).max().unwrap_or(from);
    let finished = record.finished();
    for &Ended { function, arrived, at, spent, .. } in record.ends.iter().filter(|end| end.arrived >= from) {
        sent += 1;
        by_application[function.index()][0] += 1.0;
        if let Some(spent) = spent {
            let latency = at.saturating_since(arrived);
            let hit = latency <= slos[function.index()];
            in_time += u64::from(hit);
            by_application[function.index()][1] += f64::from(u8::from(hit));
            let parts = [spent.queue, spent.load, spent.execution, spent.transfer];
            for (sum, part) in spent_ms.iter_mut().zip(parts) {
                *sum += part.as_secs_f64() * 1e3;
            }
            pipelines += u64::from(spent.slices > 1);
            while_sent += u64::from(at <= last);
            latencies.push(latency);
        }
    }
    let gpus: BTreeSet<GpuId> = record.worked.keys().map(|(gpu, _)| *gpu).collect();
    let of =
        |gpu: GpuId| record.worked.iter().filter(move |((of, _), _)| *of == gpu).flat_map(|(_, spans)| spans);
    let gpu_time: Duration = gpus.into_iter().map(|gpu| covered(of(gpu), finished)).sum();
    let worked = record.worked.values().flatten();
    let slice_time: Duration = worked.map(|&(from, to)| to.saturating_since(from)).sum();
    let held = record.held.iter().map(|((_, slice), spans)| {
        let compute = slice.and_then(|slice| model.get(slice.profile)).map_or(0, |one| one.compute_slices);
        covered(spans.iter(), finished).saturating_mul(compute.into())
    });
    latencies.sort_unstable();
    let mean_ms =
        latencies.iter().map(|one| one.as_secs_f64()).sum::<f64>() * 1e3 / latencies.len().max(1) as f64;
    let percentile = |percent: usize| {
        let at = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        latencies.get(at).map_or(0.0, |latency| latency.as_secs_f64() * 1e3)
    };
    Figures {
        sent: sent as f64,
        in_time: in_time as f64,
        served: latencies.len() as f64,
        seconds: finished.saturating_since(from).as_secs_f64(),
        served_while_sent: while_sent as f64,
        seconds_sent: last.saturating_since(from).as_secs_f64(),
        p95_ms: percentile(95),
        p99_ms: percentile(99),
        max_ms: percentile(100),
        mean_ms,
        gpu_s: gpu_time.as_secs_f64(),
        mig_s: slice_time.as_secs_f64(),
        held_s: held.sum::<Duration>().as_secs_f64(),
        starts: outcome.actions.get("start").map_or(0.0, |&n| n as f64),
        spent_ms,
        pipelines: pipelines as f64,
        by_application,
    }
}

/// Rows of seconds.
pub(super) type Series = Vec<Map<String, Value>>;

/// GPUs and slices that are held and at work in each second.
pub(super) fn series(outcome: &Outcome, model: &GpuModel) -> Series {
    let empty = Record::default();
    let record = outcome.record.as_ref().unwrap_or(&empty);
    let second = |at: Timestamp| usize::try_from(at.as_nanos() / 1_000_000_000).unwrap_or(usize::MAX);
    let seconds = second(record.finished()) + 1;
    let mut counts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (what, spans) in [("held", &record.held), ("active", &record.worked)] {
        let mut gpus = BTreeSet::new();
        for ((gpu, slice), spans) in spans {
            let within = |&(from, to): &(Timestamp, Timestamp)| second(from)..=second(to).min(seconds - 1);
            for at in spans.iter().flat_map(within).collect::<BTreeSet<_>>() {
                let mut count =
                    |name: String| counts.entry(name).or_insert_with(|| vec![0; seconds])[at] += 1;
                count(format!("slices_{what}"));
                if let (Some(profile), "active") = (slice.and_then(|slice| model.get(slice.profile)), what) {
                    count(format!("active_{}", profile.name));
                }
                if gpus.insert((at, *gpu)) {
                    count(format!("gpus_{what}"));
                }
            }
        }
    }
    let row = |at: usize| {
        let counts = counts.iter().map(|(name, counts)| (name.clone(), counts[at].into()));
        counts.chain([("second".to_owned(), at.into())]).collect()
    };
    (0..seconds).map(row).collect()
}

/// The figures of several seeds together.
pub(super) fn measures(runs: &[Figures]) -> Map<String, Value> {
    let sum = |of: fn(&Figures) -> f64| runs.iter().map(of).sum::<f64>();
    let mean = |of| sum(of) / runs.len().max(1) as f64;
    let (in_time, seconds) = (sum(|one| one.in_time), sum(|one| one.seconds));
    let served = sum(|one| one.served).max(1.0);
    let mut measures = row(&[
        ("slo_hit_percent", (100.0 * in_time / sum(|one| one.sent).max(1.0)).into()),
        ("throughput_per_s", (sum(|one| one.served) / seconds).into()),
        ("while_sent_per_s", (sum(|one| one.served_while_sent) / sum(|one| one.seconds_sent)).into()),
        ("in_time_per_s", (in_time / seconds).into()),
        ("p95_ms", mean(|one| one.p95_ms).into()),
        ("p99_ms", mean(|one| one.p99_ms).into()),
        ("max_ms", mean(|one| one.max_ms).into()),
        ("mean_ms", mean(|one| one.mean_ms).into()),
        ("gpu_time_s", mean(|one| one.gpu_s).into()),
        ("mig_time_s", mean(|one| one.mig_s).into()),
        ("starts", mean(|one| one.starts).into()),
        ("held_slice_s", mean(|one| one.held_s).into()),
        ("gpu_ms_per_in_time", (1e3 * sum(|one| one.gpu_s) / in_time.max(1.0)).into()),
        ("mig_ms_per_in_time", (1e3 * sum(|one| one.mig_s) / in_time.max(1.0)).into()),
        ("pipelines_percent", (100.0 * sum(|one| one.pipelines) / served).into()),
    ]);
    for (number, name) in ["queue_ms", "load_ms", "execution_ms", "transfer_ms"].into_iter().enumerate() {
        let sum = runs.iter().map(|one| one.spent_ms[number]).sum::<f64>();
        measures.insert(name.to_owned(), (sum / served).into());
    }
    for number in 0..APPLICATIONS.len() {
        let of = |what: usize| runs.iter().map(|one| one.by_application[number][what]).sum::<f64>();
        if of(0) > 0.0 {
            measures.insert(format!("hit_app{number}"), (100.0 * of(1) / of(0)).into());
        }
    }
    measures
}
