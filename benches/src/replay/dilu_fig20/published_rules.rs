//! The rules of the published simulation, its floating-point sums, loosened limits and nodes of four GPUs included.

use super::instance_events::{Event, Kind};
use super::{GPUS_PER_NODE, MEMORY_GB, NODES, Outcome};
use anyhow::{Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    Exclusive,
    InflessLimit,
    InflessRequest,
    Dilu,
}

impl Rules {
    pub(super) const ALL: [Self; 4] = [Self::Exclusive, Self::InflessLimit, Self::InflessRequest, Self::Dilu];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "paper_exclusive",
            Self::InflessLimit => "paper_infless_l",
            Self::InflessRequest => "paper_infless_r",
            Self::Dilu => "paper_dilu",
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PaperGpu {
    pub(super) request: f64,
    limit: f64,
    pub(super) memory: f64,
    jobs: usize,
}

impl PaperGpu {
    fn holds(&self, request: f64, limit: f64, memory: f64, gamma: f64) -> bool {
        self.request + request <= 1.0 && self.limit + limit <= gamma && self.memory + memory <= MEMORY_GB
    }
}

/// The published rules, on floating-point sums that are never set back to zero.
pub(super) fn paper(events: &[Event], rules: Rules, gamma: f64) -> Result<Outcome> {
    let mut gpus = vec![PaperGpu::default(); NODES * GPUS_PER_NODE];
    // Of several GPUs with the same score the lowest number is taken.
    let mut idle: BTreeSet<usize> = (0..gpus.len()).collect();
    let mut active: BTreeSet<usize> = BTreeSet::new();
    // Per job: the GPU, and the charge subtracted when the job ends.
    let mut places: BTreeMap<&str, Vec<(usize, PaperGpu)>> = BTreeMap::new();
    let mut outcome = Outcome::default();
    let (alpha, beta) = if rules == Rules::Dilu { (0.6, 0.4) } else { (1.0, 0.0) };
    for event in events {
        let job = &event.job;
        let start = Instant::now();
        let (request, limit) = match rules {
            Rules::InflessLimit => (job.limit, 0.0),
            Rules::InflessRequest => (job.request, 0.0),
            Rules::Exclusive | Rules::Dilu => (job.request, job.limit),
        };
        let memory = job.memory_gb;
        if event.start {
            let charge = PaperGpu { request, limit, memory, jobs: 1 };
            let chosen: Vec<(usize, PaperGpu, PaperGpu)> = match job.kind {
                _ if rules == Rules::Exclusive => {
                    idle.iter().take(job.gpus).map(|gpu| (*gpu, charge, charge)).collect()
                }
                Kind::Training => paper_training(&gpus, &active, &idle, job.gpus, charge, gamma),
                kind => {
                    let mut best: Option<(f64, usize)> = None;
                    for gpu in &active {
                        let state = &gpus[*gpu];
                        if state.holds(request, limit, memory, gamma) {
                            let score = alpha * (1.0 - (state.request + request))
                                + beta * (1.0 - (state.memory + memory) / MEMORY_GB);
                            if best.is_none_or(|best| score < best.0) {
                                best = Some((score, *gpu));
                            }
                        }
                    }
                    let split = || match kind {
                        Kind::LargeModel if rules == Rules::Dilu => {
                            paper_split(&gpus, &active, charge, gamma)
                        }
                        _ => None,
                    };
                    match best {
                        Some((_, gpu)) => vec![(gpu, charge, charge)],
                        None => split().unwrap_or_else(|| {
                            idle.iter().take(1).map(|gpu| (*gpu, charge, charge)).collect()
                        }),
                    }
                }
            };
            if chosen.is_empty() {
                bail!("{} fits nowhere", job.name);
            }
            for (gpu, add, subtract) in chosen {
                if gpus[gpu].jobs == 0 {
                    idle.remove(&gpu);
                    active.insert(gpu);
                }
                let state = &mut gpus[gpu];
                state.request += add.request;
                state.limit += add.limit;
                state.memory += add.memory;
                state.jobs += 1;
                places.entry(&job.name).or_default().push((gpu, subtract));
            }
        } else {
            for (gpu, charge) in places.remove(job.name.as_str()).unwrap_or_default() {
                let state = &mut gpus[gpu];
                state.request -= charge.request;
                state.limit -= charge.limit;
                state.memory -= charge.memory;
                state.jobs -= 1;
                if state.jobs == 0 {
                    active.remove(&gpu);
                    idle.insert(gpu);
                }
            }
        }
        outcome.spent += start.elapsed();
        outcome.observe(event.second, active.len(), || mean_free(active.iter().map(|gpu| &gpus[*gpu])));
    }
    Ok(outcome)
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
pub(super) fn mean_free<'a>(gpus: impl Iterator<Item = &'a PaperGpu>) -> (f64, f64) {
    let (mut sm, mut memory, mut count) = (0.0, 0.0, 0usize);
    for gpu in gpus {
        sm += 1.0 - gpu.request;
        memory += 1.0 - gpu.memory / MEMORY_GB;
        count += 1;
    }
    (sm / count.max(1) as f64, memory / count.max(1) as f64)
}

/// The GPUs that fit, by node: nodes and GPUs in the order in which they come.
fn by_node(active: &BTreeSet<usize>, fits: impl Fn(usize) -> bool) -> Vec<(usize, Vec<usize>)> {
    let mut nodes: Vec<(usize, Vec<usize>)> = Vec::new();
    for &gpu in active.iter().filter(|gpu| fits(**gpu)) {
        let node = gpu / GPUS_PER_NODE;
        match nodes.iter_mut().find(|(known, _)| *known == node) {
            Some((_, list)) => list.push(gpu),
            None => nodes.push((node, vec![gpu])),
        }
    }
    nodes
}

/// The first node with enough fitting active GPUs; else the first node where active and idle GPUs together suffice.
fn paper_training(
    gpus: &[PaperGpu],
    active: &BTreeSet<usize>,
    idle: &BTreeSet<usize>,
    count: usize,
    charge: PaperGpu,
    gamma: f64,
) -> Vec<(usize, PaperGpu, PaperGpu)> {
    let nodes = by_node(active, |gpu| gpus[gpu].holds(charge.request, charge.limit, charge.memory, gamma));
    let enough = nodes.iter().find(|(_, list)| list.len() >= count);
    let chosen: Vec<usize> = match enough {
        Some((_, list)) => list[..count].to_vec(),
        None => (0..NODES)
            .find_map(|node| {
                let mut list = nodes
                    .iter()
                    .find(|(known, _)| *known == node)
                    .map(|(_, list)| list.clone())
                    .unwrap_or_default();
                list.extend(idle.iter().filter(|gpu| *gpu / GPUS_PER_NODE == node));
                list.truncate(count);
                (list.len() == count).then_some(list)
            })
            .unwrap_or_default(),
    };
    chosen.into_iter().map(|gpu| (gpu, charge, charge)).collect()
}

/// The first node with enough memory on its active GPUs with SM room together; the fullest GPU first. The request is charged as
/// the limit, but the release gives the limit back.
fn paper_split(
    gpus: &[PaperGpu],
    active: &BTreeSet<usize>,
    charge: PaperGpu,
    gamma: f64,
) -> Option<Vec<(usize, PaperGpu, PaperGpu)>> {
    for (_, mut list) in by_node(active, |gpu| gpus[gpu].holds(charge.request, charge.limit, 0.0, gamma)) {
        let free: f64 = list.iter().map(|gpu| MEMORY_GB - gpus[*gpu].memory).sum();
        if free < charge.memory {
            continue;
        }
        list.sort_by(|a, b| gpus[*b].memory.total_cmp(&gpus[*a].memory));
        let mut left = charge.memory;
        let mut parts = Vec::new();
        for gpu in list {
            if left <= 0.0 {
                break;
            }
            let memory = left.min(MEMORY_GB - gpus[gpu].memory);
            left -= memory;
            let subtract = PaperGpu { memory, ..charge };
            parts.push((gpu, PaperGpu { limit: charge.request, ..subtract }, subtract));
        }
        return Some(parts);
    }
    None
}
