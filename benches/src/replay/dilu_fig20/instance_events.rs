//! Events of the figure: read from a file of the published form, or drawn from the published distributions.

use crate::mixes::SplitMix64;
use anyhow::{Context, Result, bail};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Inference,
    /// Inference of a model that may be split over several GPUs.
    LargeModel,
    Training,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) gpus: usize,
    pub(super) request: f64,
    pub(super) limit: f64,
    pub(super) memory_gb: f64,
}

#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) second: i64,
    pub(super) start: bool,
    pub(super) job: Job,
}

pub(super) fn read(path: &Path) -> Result<Vec<Event>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut events = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        events.push(parse(line).with_context(|| format!("{}:{}", path.display(), number + 1))?);
    }
    Ok(events)
}

fn parse(line: &str) -> Result<Event> {
    // One dict literal; no value holds a quote, a comma (but the list) or a brace.
    let value = |key: &str| -> Result<&str> {
        let (_, rest) = line.split_once(&format!("'{key}': ")).with_context(|| format!("no {key}"))?;
        let end = match rest.as_bytes().first() {
            Some(b'\'') => rest[1..].find('\'').map(|end| end + 1),
            Some(b'[') => rest.find(']'),
            _ => rest.find([',', '}']),
        };
        Ok(rest[..end.with_context(|| format!("{key} does not end"))?].trim_matches(['\'', '[']))
    };
    let number = |key: &str| -> Result<f64> { Ok(value(key)?.parse()?) };
    let kind = match value("type")? {
        "inference" => Kind::Inference,
        "llm-inference" => Kind::LargeModel,
        "training" => Kind::Training,
        other => bail!("unknown type {other}"),
    };
    let memory = value("memory")?.split(',').next().context("memory of the first GPU")?.trim().parse()?;
    let start = match value("Action")? {
        "start" => true,
        "delete" => false,
        other => bail!("unknown action {other}"),
    };
    let job = Job {
        name: value("service_name")?.to_owned(),
        kind,
        gpus: value("gpu_num")?.parse()?,
        request: number("sm_requests")?,
        limit: number("sm_limits")?,
        memory_gb: memory,
    };
    Ok(Event { second: seconds(value("Time")?)?, start, job })
}

/// Seconds of `YYYY-MM-DD HH:MM:SS` since some midnight; only differences are used.
fn seconds(text: &str) -> Result<i64> {
    let numbers: Vec<i64> = text.split(['-', ' ', ':']).map(str::parse).collect::<Result<_, _>>()?;
    let [year, month, day, hour, minute, second] = numbers[..] else { bail!("not a time: {text}") };
    // Days of the civil calendar, with the year beginning in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    Ok(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// The published distributions: 60 % inference, 20 % large models, 20 % training; one start a second, shuffled; 60 % of
/// the count, drawn among inference and large models, deleted after 1 to 3 minutes, 10 %, drawn among training, after 10 to 15.
pub(super) fn draw(seed: u64, count: usize) -> Vec<Event> {
    let mut rng = SplitMix64::new(seed);
    let between = |rng: &mut SplitMix64, low: f64, high: f64| {
        // Two decimals, as the published files have.
        ((low + (high - low) * rng.unit()) * 100.0).round() / 100.0
    };
    let mut jobs: Vec<Job> = (0..count)
        .map(|index| {
            let name = format!("job-{index}");
            match index * 5 / count.max(1) {
                0..=2 => {
                    let request = between(&mut rng, 0.2, 0.4);
                    let limit = (request + 0.2f64).max(between(&mut rng, 0.3, 0.6));
                    let memory_gb = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0][rng.below(8)];
                    Job { name, kind: Kind::Inference, gpus: 1, request, limit, memory_gb }
                }
                3 => {
                    let request = between(&mut rng, 0.4, 0.6);
                    let limit = between(&mut rng, request + 0.2, 0.8);
                    let memory_gb = between(&mut rng, 20.0, 30.0).floor();
                    Job { name, kind: Kind::LargeModel, gpus: 1, request, limit, memory_gb }
                }
                _ => {
                    let request = between(&mut rng, 0.4, 0.8);
                    let limit = (request + 0.2f64).max(between(&mut rng, 0.6, 1.0));
                    let memory_gb = [25.0, 30.0, 35.0, 40.0][rng.below(4)];
                    Job { name, kind: Kind::Training, gpus: [2, 4][rng.below(2)], request, limit, memory_gb }
                }
            }
        })
        .collect();
    for index in (1..jobs.len()).rev() {
        jobs.swap(index, rng.below(index + 1));
    }
    let mut deleted = vec![false; jobs.len()];
    for (training, deletes) in [(false, count * 6 / 10), (true, count / 10)] {
        let of_kind = |index: &usize| (jobs[*index].kind == Kind::Training) == training;
        let mut indices: Vec<usize> = (0..jobs.len()).filter(of_kind).collect();
        for index in (1..indices.len()).rev() {
            indices.swap(index, rng.below(index + 1));
        }
        indices.iter().take(deletes).for_each(|index| deleted[*index] = true);
    }
    let mut events = Vec::new();
    for (index, job) in jobs.into_iter().enumerate() {
        let second = i64::try_from(index).unwrap_or(i64::MAX);
        if deleted[index] {
            // Whole minutes: 1 to 3, a trainer's 10 to 15.
            let (low, choices) = if job.kind == Kind::Training { (10, 6) } else { (1, 3) };
            let after = 60 * (low + i64::try_from(rng.below(choices)).unwrap_or(0));
            events.push(Event { second: second + after, start: false, job: job.clone() });
        }
        events.push(Event { second, start: true, job });
    }
    events.sort_by_key(|event| event.second);
    events
}
