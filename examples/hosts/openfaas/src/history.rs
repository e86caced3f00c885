//! The last five minutes of the host, a sample each second: `/system/history` and the lines of the page.
//!
//! A latency is the time from the arrival of a request to the head of its answer, waiting included. Failed requests (5xx) count
//! for the rate alone. Percentiles are within 3 per cent: latencies are counted in buckets of a sixteenth of a power of two.

use gshare_core::{GpuId, Timestamp};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Number of samples kept.
const SAMPLES: usize = 300;
/// Number of samples whose requests count for the percentiles of a sample.
const RECENT: usize = 10;

/// The host during one second.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// End of the second, since the host began, in ns.
    #[serde(rename = "at_ns")]
    pub at: Timestamp,
    /// Functions by name.
    pub functions: BTreeMap<String, FunctionSample>,
    /// Part of each GPU that its processes used lately: time, weighed by the share of the SMs.
    pub gpus: BTreeMap<GpuId, f64>,
}

/// A function during one second.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FunctionSample {
    /// Answered requests per second.
    pub rate: f64,
    /// Median latency over the last ten seconds in ns; null without a request.
    pub p50_ns: Option<u64>,
    /// The 95th percentile of the latency over the last ten seconds in ns; null without a request.
    pub p95_ns: Option<u64>,
    /// Number of ready instances.
    pub ready: u64,
    /// Number of requests that wait for an instance.
    pub waiting: u64,
    /// GPU time used per second of time.
    pub used: f64,
}

/// A function at the end of a second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Count {
    /// Number of ready instances.
    pub ready: u64,
    /// Number of requests that wait for an instance.
    pub waiting: u64,
    /// GPU time used since the host began, in ns.
    pub gpu_ns: u64,
}

/// Number of requests by bucket of their latency.
type Latencies = BTreeMap<u32, u64>;

/// A function's calls and GPU time since the last sample, and latencies of the last samples, the newest at the back.
#[derive(Debug, Default)]
struct Since {
    answered: u64,
    gpu_ns: Option<u64>,
    latencies: VecDeque<Latencies>,
}

/// The samples, and the counts from which the next sample follows.
#[derive(Debug, Default)]
pub struct History {
    samples: VecDeque<Sample>,
    since: BTreeMap<String, Since>,
}

impl History {
    /// Counts an answered call of a function.
    pub fn called(&mut self, name: &str, failed: bool, took: Duration) {
        if !self.since.contains_key(name) {
            self.since.insert(name.to_owned(), Since::default());
        }
        let Some(since) = self.since.get_mut(name) else { return };
        since.answered += 1;
        if since.latencies.is_empty() {
            since.latencies.push_back(Latencies::new());
        }
        if let (false, Some(latencies)) = (failed, since.latencies.back_mut()) {
            // The first bits of a float are its logarithm.
            *latencies.entry(took.as_secs_f32().to_bits() >> 19).or_default() += 1;
        }
    }

    /// Ends a second, with the functions there are and the use of the GPUs.
    pub fn sample(&mut self, at: Timestamp, functions: BTreeMap<String, Count>, gpus: BTreeMap<GpuId, f64>) {
        let seconds = self.samples.back().map_or(1.0, |last| at.saturating_since(last.at).as_secs_f64());
        let seconds = seconds.max(1e-3);
        self.since.retain(|name, _| functions.contains_key(name));
        let function = |(name, Count { ready, waiting, gpu_ns }): (String, Count)| {
            let since = self.since.entry(name.clone()).or_default();
            let mut all = Latencies::new();
            for (bucket, count) in since.latencies.iter().flatten() {
                *all.entry(*bucket).or_default() += count;
            }
            let used =
                gpu_ns.saturating_sub(since.gpu_ns.replace(gpu_ns).unwrap_or(gpu_ns)) as f64 / 1e9 / seconds;
            let rate = std::mem::take(&mut since.answered) as f64 / seconds;
            since.latencies.push_back(Latencies::new());
            if since.latencies.len() > RECENT {
                since.latencies.pop_front();
            }
            let (p50_ns, p95_ns) = (percentile(&all, 50), percentile(&all, 95));
            (name, FunctionSample { rate, p50_ns, p95_ns, ready, waiting, used })
        };
        let functions = functions.into_iter().map(function).collect();
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { at, functions, gpus });
    }

    /// The samples after a time, the oldest first.
    pub fn after(&self, time: Timestamp) -> Vec<Sample> {
        self.samples.iter().filter(|sample| sample.at > time).cloned().collect()
    }
}

/// The middle of the bucket that holds this percentile, in ns; none of no latencies.
fn percentile(of: &Latencies, percent: u64) -> Option<u64> {
    let rank = (of.values().sum::<u64>() * percent).div_ceil(100);
    let mut below = 0;
    let (bucket, _) = of.iter().find(|(_, count)| {
        below += **count;
        below >= rank
    })?;
    u64::try_from(Duration::from_secs_f32(f32::from_bits(bucket << 19 | 1 << 18)).as_nanos()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_the_rate_of_its_second_and_the_percentiles_of_ten() {
        let mut history = History::default();
        let mut second = 0;
        let mut end = |history: &mut History| {
            second += 1;
            let count = Count { ready: 2, waiting: 1, gpu_ns: 500_000_000 * second };
            let at = Timestamp::from_millis(1000 * second);
            history.sample(at, BTreeMap::from([("f".into(), count)]), BTreeMap::new());
            history.samples.back().unwrap().functions["f"].clone()
        };
        let first = end(&mut history);
        assert_eq!((first.p50_ns, first.used), (None, 0.0));
        for millis in 1..=100 {
            history.called("f", false, Duration::from_millis(millis));
            history.called("removed", false, Duration::from_millis(millis));
        }
        history.called("f", true, Duration::from_secs(60));
        let sample = end(&mut history);
        assert!(!history.since.contains_key("removed"));
        assert_eq!((sample.rate, sample.ready, sample.waiting, sample.used), (101.0, 2, 1, 0.5));
        let near =
            |found: Option<u64>, millis: f64| (found.unwrap() as f64 / 1e6 / millis - 1.0).abs() < 0.035;
        assert!(near(sample.p50_ns, 50.0) && near(sample.p95_ns, 95.0), "{sample:?}");
        for _ in 1..RECENT {
            let sample = end(&mut history);
            assert!(sample.rate == 0.0 && near(sample.p95_ns, 95.0), "{sample:?}");
        }
        assert_eq!(end(&mut history).p95_ns, None, "all requests are older than ten samples");
        for _ in 0..2 * SAMPLES {
            end(&mut history);
        }
        assert_eq!(history.after(Timestamp::ZERO).len(), SAMPLES);
        assert_eq!(history.after(history.samples[SAMPLES - 2].at).len(), 1);
    }
}
