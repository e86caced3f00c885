//! The shares measured on the device, compared with the promised shares.
//!
//! # Measurement
//! GPU time is the true time of kernels on the virtual device, split at the ends of windows, independent of every scheduler's or
//! hook's account. The comparison covers any [`SPAN`] consecutive windows without a change to the promise, from the second whole
//! window after the last such change on:
//!
//! - for a client of a [capped or side-by-side](Shape) GPU: the client was present and never silent, and kept the same share. It is
//!   entitled to its limit, regardless of the others.
//! - for a client of an [elastic](Shape::Elastic) GPU: besides, no client came, left or changed. The clients together are entitled
//!   to the time delivered to them. Delivered time below the requests is divided in proportion to the requests; beyond them, each
//!   client gets its request and an amount on top in proportion to its limit, up to its limit ([`divide`]).
//!
//! The error of a client is the difference between its measured and its entitled share. The cost of hand-overs is not an error of
//! shares and has its own bound: an elastic GPU delivers at least [`DELIVERED_PERCENT`] of the time its clients may take.

use super::node_plan::Shape;
use crate::token::account::Windows;
use gshare_core::{Duration, Share, Timestamp};
use std::collections::BTreeMap;

/// The number of windows in a comparison.
pub const SPAN: u64 = 10;
/// The largest error of a share, in basis points: one point.
pub const ERROR_MAX: u64 = 100;
/// The least delivery of an elastic GPU, in percent of the time its clients may take together.
pub const DELIVERED_PERCENT: u64 = 95;

/// A time without any change to a client's entitlement.
#[derive(Debug, Clone, Copy)]
struct Calm {
    instance: usize,
    gpu: usize,
    shape: Shape,
    share: Share,
    windows: Windows,
    /// The number of these windows on the device, which begin again with the first client of a device or of a daemon.
    era: u64,
    /// The number of the calm time on this GPU, which all instances of an elastic GPU share.
    epoch: u64,
    from: Timestamp,
    until: Timestamp,
}

impl Calm {
    /// The first window in the comparison, and the first window after it.
    fn whole_windows(&self) -> (u64, u64) {
        (self.windows.index(self.from) + 3, self.windows.index(self.until))
    }
}

/// The errors measured so far.
#[derive(Debug, Default)]
pub(super) struct Shares {
    error_max: u64,
    used: BTreeMap<(usize, u64, u64), Duration>,
    open: BTreeMap<usize, Calm>,
    closed: Vec<Calm>,
    epochs: BTreeMap<usize, u64>,
}

/// The number of comparisons, and their largest error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Errors {
    /// The number of compared spans, one per client and run of [`SPAN`] windows.
    pub spans: u64,
    /// The largest error, in basis points.
    pub worst: u64,
}

impl Errors {
    fn add(&mut self, other: Self) {
        self.spans += other.spans;
        self.worst = self.worst.max(other.worst);
    }
}

/// The shares of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShareReport {
    /// Instances of [`Shape::Capped`] GPUs.
    pub capped: Errors,
    /// Instances of [`Shape::SideBySide`] GPUs.
    pub side_by_side: Errors,
    /// Instances of [`Shape::Elastic`] GPUs.
    pub elastic: Errors,
    /// The least delivery of an elastic GPU, in per cent of the time its clients may take together; 100 without such a GPU.
    pub delivered_percent: u64,
}

impl ShareReport {
    /// The report before any comparison.
    pub const EMPTY: Self = {
        let none = Errors { spans: 0, worst: 0 };
        Self { capped: none, side_by_side: none, elastic: none, delivered_percent: 100 }
    };

    /// Merges another run's report into this one.
    pub fn add(&mut self, other: &Self) {
        self.capped.add(other.capped);
        self.side_by_side.add(other.side_by_side);
        self.elastic.add(other.elastic);
        self.delivered_percent = self.delivered_percent.min(other.delivered_percent);
    }

    /// The errors of all shapes together.
    pub fn all(&self) -> Errors {
        let mut all = self.capped;
        all.add(self.side_by_side);
        all.add(self.elastic);
        all
    }

    const fn of(&mut self, shape: Shape) -> &mut Errors {
        match shape {
            Shape::Capped => &mut self.capped,
            Shape::SideBySide => &mut self.side_by_side,
            Shape::Elastic | Shape::Any => &mut self.elastic,
        }
    }
}

impl Shares {
    /// Shares without any measurement.
    pub(super) fn new(error_max: u64) -> Self {
        Self { error_max, ..Self::default() }
    }

    /// Begins to measure an instance, which keeps its device busy from `from` on.
    #[expect(clippy::too_many_arguments, reason = "what is compared, and when")]
    pub(super) fn begin(
        &mut self,
        from: Timestamp,
        instance: usize,
        gpu: usize,
        shape: Shape,
        share: Share,
        windows: Windows,
        era: u64,
    ) {
        let epoch = self.epochs.get(&gpu).copied().unwrap_or(0);
        let calm = Calm { instance, gpu, shape, share, windows, era, epoch, from, until: from };
        self.open.insert(instance, calm);
    }

    /// Ends an instance's calm.
    pub(super) fn end(&mut self, now: Timestamp, instance: usize) {
        if let Some(calm) = self.open.remove(&instance) {
            self.closed.push(Calm { until: now, ..calm });
        }
    }

    /// Ends the calm of all instances of an elastic GPU after a change, and begins their next calm.
    pub(super) fn disturb(&mut self, now: Timestamp, gpu: usize) {
        let epoch = self.epochs.entry(gpu).or_default();
        *epoch += 1;
        for calm in self.open.values_mut().filter(|calm| calm.gpu == gpu && calm.shape == Shape::Elastic) {
            self.closed.push(Calm { until: now, ..*calm });
            (calm.from, calm.epoch) = (calm.from.max(now), *epoch);
        }
    }

    /// Counts a kernel of an instance.
    pub(super) fn ran(
        &mut self,
        instance: usize,
        era: u64,
        windows: Windows,
        started: Timestamp,
        ended: Timestamp,
    ) {
        let mut from = started;
        while from < ended {
            let window = windows.index(from);
            let to = windows.end(window).min(ended);
            *self.used.entry((instance, era, window)).or_default() += to.saturating_since(from);
            from = to;
        }
    }

    /// Compares all shares; the error describes the first wrong span.
    pub(super) fn compare(&mut self, end: Timestamp) -> Result<ShareReport, (ShareReport, String)> {
        let open: Vec<_> = self.open.keys().copied().collect();
        open.into_iter().for_each(|instance| self.end(end, instance));
        let mut report = ShareReport::EMPTY;
        match self.compare_all(&mut report) {
            Ok(()) => Ok(report),
            Err(what) => Err((report, what)),
        }
    }

    fn compare_all(&self, report: &mut ShareReport) -> Result<(), String> {
        let mut elastic: BTreeMap<(usize, u64), Vec<Calm>> = BTreeMap::new();
        for calm in &self.closed {
            if calm.shape == Shape::Elastic {
                elastic.entry((calm.gpu, calm.epoch)).or_default().push(*calm);
                continue;
            }
            let entitled = calm.share.quota.limit().of(calm.windows.length).saturating_mul(SPAN);
            let (first, end) = calm.whole_windows();
            for window in first..end.saturating_sub(SPAN - 1) {
                self.judge(calm, window, entitled, report)?;
            }
        }
        for calms in elastic.values() {
            self.compare_elastic(calms, report)?;
        }
        Ok(())
    }

    fn compare_elastic(&self, calms: &[Calm], report: &mut ShareReport) -> Result<(), String> {
        let ranges = || calms.iter().map(Calm::whole_windows);
        let first = ranges().map(|(first, _)| first).max().unwrap_or(0);
        let end = ranges().map(|(_, end)| end).min().unwrap_or(0);
        for window in first..end.saturating_sub(SPAN - 1) {
            let delivered: Duration = calms.iter().map(|calm| self.measured(calm, window)).sum();
            let length = calms[0].windows.length.saturating_mul(SPAN);
            let shares: Vec<Share> = calms.iter().map(|calm| calm.share).collect();
            let may_take: u64 = shares.iter().map(|share| u64::from(share.quota.limit().get())).sum();
            let may_take = length.as_nanos() / 10_000 * may_take.min(10_000);
            let percent = delivered.as_nanos() * 100 / may_take.max(1);
            report.delivered_percent = report.delivered_percent.min(percent);
            if percent < DELIVERED_PERCENT {
                return Err(format!(
                    "device {} delivered {delivered} in {SPAN} windows from {window} on, {percent} % of {} ns",
                    calms[0].gpu, may_take
                ));
            }
            for (calm, entitled) in calms.iter().zip(divide(delivered, length, &shares)) {
                self.judge(calm, window, entitled, report)?;
            }
        }
        Ok(())
    }

    fn measured(&self, calm: &Calm, window: u64) -> Duration {
        let &Calm { instance, era, .. } = calm;
        self.used.range((instance, era, window)..(instance, era, window + SPAN)).map(|(_, used)| *used).sum()
    }

    fn judge(
        &self,
        calm: &Calm,
        window: u64,
        entitled: Duration,
        report: &mut ShareReport,
    ) -> Result<(), String> {
        let measured = self.measured(calm, window);
        let length = calm.windows.length.saturating_mul(SPAN).as_nanos();
        let error = measured.as_nanos().abs_diff(entitled.as_nanos()).saturating_mul(10_000) / length;
        report.of(calm.shape).add(Errors { spans: 1, worst: error });
        if error <= self.error_max {
            return Ok(());
        }
        let by_window: Vec<String> = (window..window + SPAN)
            .map(|window| {
                self.used.get(&(calm.instance, calm.era, window)).copied().unwrap_or_default().to_string()
            })
            .collect();
        let Calm { instance, gpu, shape, share, .. } = calm;
        Err(format!(
            "instance {instance} on device {gpu} ({shape:?}, {}, {} of the SMs) got {measured} of {entitled} in {SPAN} windows from {window} on: \
             {error} basis points off; by window {}",
            share.quota,
            share.sm,
            by_window.join(" ")
        ))
    }
}

/// Divides `delivered` GPU time among clients with unlimited work, over windows of `length` together. Unmet requests share it in
/// proportion to the requests; else each client gets its request and an amount on top in proportion to its limit, up to its limit.
///
/// ```
/// use gshare_core::{Duration, Share, SmShare};
/// use gshare_sim::node::divide;
/// let share = |quota: &str| Share { quota: quota.parse().unwrap(), sm: SmShare::WHOLE };
/// let millis = Duration::from_millis;
/// let shares = [share("0.2:0.25"), share("0.3:1.0")];
/// assert_eq!(divide(millis(400), millis(1_000), &shares), [millis(160), millis(240)]);
/// assert_eq!(divide(millis(900), millis(1_000), &shares), [millis(250), millis(650)]);
/// ```
pub fn divide(delivered: Duration, length: Duration, shares: &[Share]) -> Vec<Duration> {
    let requests: Vec<Duration> = shares.iter().map(|share| share.quota.request().of(length)).collect();
    let limits: Vec<Duration> = shares.iter().map(|share| share.quota.limit().of(length)).collect();
    let requested: Duration = requests.iter().copied().sum();
    if delivered <= requested {
        let part = |request: &Duration| request.scaled(delivered.as_nanos(), requested.as_nanos());
        return requests.iter().map(part).collect();
    }
    // The bisection finds the amount on top of a limit of the whole, since the sum of all parts grows with this amount.
    let hand_out = |top: u64| {
        let one = |(request, limit): (&Duration, &Duration)| {
            request.saturating_add(limit.scaled(top, length.as_nanos())).min(*limit)
        };
        requests.iter().zip(&limits).map(one).collect::<Vec<_>>()
    };
    // A small limit needs a large amount.
    let (mut low, mut high) = (0, length.as_nanos().saturating_mul(10_000));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if hand_out(middle).into_iter().sum::<Duration>() <= delivered {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    hand_out(low)
}
