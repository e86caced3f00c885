//! Trials of a function at its deployment: the same program, under load over HTTP, at a few settings of the companion's share.
//!
//! # Algorithm
//! 1. Start the program with the whole share and call it once. A program that has not connected to the node's daemon by then
//!    uses no GPU; it gets the smallest share, after one measurement if it has an SLO.
//! 2. Measure a setting: throughput in a closed loop at the function's concurrency, then latency in an open loop at two thirds
//!    of that rate.
//! 3. [`EfficacySearch`] chooses the settings for a function with an SLO or batches: it looks for the most requests per SM, over tenths
//!    of the SMs, or over parts of the SMs and sizes of batches. Without an SLO the settings are the whole share, a half and a quarter of
//!    its SMs. If the driver cannot confine processes to a part of the SMs, they are a half and a quarter of the time instead.
//! 4. Repeat the best of these at half of its time (FaST-GShare, section 3.2, measures a grid of both).
//! 5. On a slice or a whole device there is one setting, with one request at a time.
//! 6. Ask the node's daemon how long others kept the function waiting that could have run by its own share: in all at full load, and
//!    during each call at the lower load. Rate and latencies leave these waits out, so that a point beside others is as one alone. What
//!    remains of a latency is at least the time in which the point's share alone gives the call its GPU time.
//! 7. Points that are too slow for the SLO stay in the table: the scaler does not use them.

use super::deployment::Wants;
use super::host::{DISTURBED, Launch, client};
use super::listening::{Looks, elsewhere};
use super::logs::each_line;
use super::node::Node;
use super::running::{LocalProcess, Running};
use gshare_core::profile::{ProfilePoint, ProfileTable, Setting};
use gshare_core::{BasisPoints, Bytes, Duration, GpuShare, Quota, QuotaRange, SmShare};
use gshare_profile::executor::{ExecError, Executor as _};
use gshare_profile::http::{Call, Http, Program};
use gshare_profile::planner::{EfficacySearch, Journal, Measurement, Planner as _, Step, Trial};
use gshare_sched::platform::{Part, Regime};
use gshare_sched::scale::max_p95;
use gshared::ClientSnapshot;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Load of the latency measurement, as a part of the throughput: a burst on an instance with the headroom that scalers leave.
const SLACK: f64 = 0.66;

/// Calls per measurement: three of them lie above the 95th percentile.
const CALLS: u64 = 60;
/// Calls before a measurement, which trigger lazy loading.
const WARM_UP: u64 = 3;
/// Time limit for a measurement's calls, once [`FEWEST`] are done.
const LONGEST: Duration = Duration::from_millis(1_200);
/// Fewest measured calls.
const FEWEST: usize = 5;
/// Time limit until a program accepts connections: a cold start of a large model.
pub(crate) const READY: Duration = Duration::from_secs(120);
/// Time limit of a call.
const ANSWER: Duration = Duration::from_secs(30);

/// Result of a function's trials, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Measured points.
    pub table: ProfileTable,
    /// Peak GPU memory of the program and a quarter more, in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory: Bytes,
    /// Kind of the device under trial.
    pub regime: Regime,
    /// Least latency of an answer.
    #[serde(rename = "least_ns")]
    pub least: Duration,
    /// Largest share of GPU time that other processes used while a point was measured.
    #[serde(rename = "others_bp")]
    pub others: BasisPoints,
    /// The smallest batch that failed, of a function that takes batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_batch: Option<FailedBatch>,
}

/// A batch that was not answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedBatch {
    /// Requests in it.
    pub batch: u32,
    /// Why, as the trial said.
    pub why: String,
}

impl Measured {
    /// Memory of a function that uses no GPU: the least that can be booked.
    const NO_GPU: Bytes = Bytes(1);

    /// Whether the function uses a GPU.
    pub fn uses_gpu(&self) -> bool {
        self.memory > Self::NO_GPU
    }

    /// Whether other processes may have slowed its trials. The daemon knows their use of the GPU, but not of the CPUs, which a function
    /// without a GPU needs.
    pub fn is_doubtful(&self) -> bool {
        self.others > DISTURBED || !self.uses_gpu()
    }

    /// The union of both measurements; none if they share a point.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let points = self.table.points().iter().chain(other.table.points()).copied().collect();
        Some(Self {
            table: ProfileTable::sparse(points).ok()?,
            memory: self.memory.max(other.memory),
            regime: self.regime,
            least: self.least.min(other.least),
            others: self.others.max(other.others),
            failed_batch: None,
        })
    }
}

/// The reason of trials that end with their function.
const STOPPED: &str = "the trials were stopped";

/// Takes the message about a program that does not listen at `$PORT`.
type Tell = Box<dyn FnMut(&str) + Send>;

/// The program of a trial.
struct Tried {
    process: Box<dyn Running>,
    /// The expected port, and the callback for a program that listens elsewhere.
    port: u16,
    wrong: Tell,
    looks: Looks,
    gpu_ns: Box<dyn Fn() -> u64 + Send>,
    /// The last such message.
    told: Option<String>,
    stop: Arc<AtomicBool>,
}

impl Drop for Tried {
    fn drop(&mut self) {
        self.process.kill();
        // The next program of the trials gets the same share.
        let begun = std::time::Instant::now();
        while !self.process.has_ended() && begun.elapsed() < READY.into() {
            std::thread::sleep(gshare_profile::http::PROBE.into());
        }
        if let Some(folder) = self.process.folder() {
            super::reaper::sweep(folder);
        }
    }
}

impl Program for Tried {
    fn ended(&mut self) -> Option<String> {
        if self.stop.load(Ordering::Acquire) {
            return Some(STOPPED.to_owned());
        }
        let ended = self.process.has_ended();
        ended.then(|| match self.process.end() {
            Some(Err(how)) => how,
            _ => "ended".to_owned(),
        })
    }

    fn does_not_listen(&mut self) -> Option<String> {
        let pid = self.process.pid();
        if let Some(ports) = pid.and_then(|pid| self.looks.at(pid, self.port, &self.gpu_ns)) {
            let text = elsewhere(&ports, self.port);
            (self.wrong)(&text);
            self.told = Some(text);
        }
        self.told.clone()
    }

    fn is_idle(&self) -> bool {
        self.looks.idle()
    }

    fn address(&self, _: u16) -> Option<SocketAddr> {
        self.process.address()
    }
}

/// Runs the trials of a function on the share of its companion.
///
/// # Errors
/// The reason for users, if there is no result.
pub fn run(node: &Weak<Node>, launch: &Launch, stop: &Arc<AtomicBool>) -> Result<Measured, String> {
    let plan = &launch.version.plan;
    let Some(whole) = launch.parts.first().map(|part| part.share) else {
        return Err("an instance without parts".to_owned());
    };
    let turn = Turn::of(node, launch)?;
    let name = launch.version.deployment.service.clone();
    let concurrency = if turn.regime == Regime::Fractional { plan.concurrency } else { 1 };
    let call = Call {
        path: plan.probe.path.clone(),
        body: plan.probe.body.clone(),
        batched: plan.batch.is_some(),
        connections: concurrency,
        patience: Duration::from_secs(30),
    };
    let (of, weak, stops) = (launch.clone(), Weak::clone(node), Arc::clone(stop));
    let mut function = Http::new(call, move |setting, port| {
        let node = weak.upgrade().ok_or("the host ends")?;
        let share = narrowed(whole, setting)?;
        let parts: Vec<Part> = of.parts.iter().map(|part| Part { share, ..*part }).collect();
        start(&node, &of, &parts, port, Arc::clone(&stops))
            .map_err(|error| format!("does not start: {}: {error}", of.version.plan.program()))
    });
    let tell = |text: String| {
        if let Some(node) = node.upgrade() {
            node.logs.add(&name, "trials", text.clone());
            node.host().progress(launch.instance, &text);
        }
    };
    let (all, time) = (whole.sm(), whole.time().request());
    let setting = |sm, quota| Setting { batch: 1, sm, quota };
    tell("is started for the first time".to_owned());
    let uses = first_call(node, launch, &mut function, setting(all, time))?;
    let Some(mut memory) = uses else {
        tell("uses no GPU".to_owned());
        let batch = plan.batch.unwrap_or(1);
        let of_batch = Setting { batch, ..setting(all, time) };
        let mut measured = || point(&mut function, of_batch, concurrency, &Beside::default);
        let seen = plan.slo.map(|_| measured()).transpose()?;
        let (table, least) = without_gpu(batch.max(concurrency), seen.as_ref())?;
        let (memory, others) = (Measured::NO_GPU, BasisPoints::ZERO);
        return Ok(Measured { table, memory, regime: turn.regime, least, others, failed_batch: None });
    };
    let partitioned = node.upgrade().ok_or("the host ends")?.runner.partitioned;
    let part = |parts: u16| {
        let (sm, quota) =
            if partitioned { (all.get() / parts, time.get()) } else { (all.get(), time.get() / parts) };
        let sm = SmShare::new(sm).filter(|sm| sm.get() >= 100)?;
        Some(setting(sm, Quota::new(quota).filter(|quota| !quota.is_zero())?))
    };
    let mut points: Vec<ProfilePoint> = Vec::new();
    let parts: &[u16] = if turn.regime == Regime::Fractional { &[1, 2, 4] } else { &[1] };
    let mut settings: Vec<Setting> = parts.iter().copied().filter_map(part).collect();
    let (mut last, mut least, mut others) = (None, Duration::MAX, BasisPoints::ZERO);
    let mut failed_batch: Option<FailedBatch> = None;
    let one = plan.slo.filter(|_| partitioned && plan.batch.is_none()).map(|_| 1);
    let mut search = None;
    if let Some(most) = plan.batch.or(one).filter(|_| turn.regime == Regime::Fractional) {
        let shares =
            if plan.batch.is_some() { settings.iter().map(|one| one.sm).collect() } else { tenths(all) };
        search = Some((efficacy_search(most, plan.slo, shares)?, Journal::default()));
        settings.clear();
    }
    let mut halved = false;
    loop {
        let next = search.as_ref().and_then(|(planner, journal)| next_trial(planner, journal, time));
        let Some(next) = next.or_else(|| (!settings.is_empty()).then(|| settings.remove(0))) else { break };
        if stop.load(Ordering::Acquire) {
            return Err(STOPPED.to_owned());
        }
        let of = if plan.batch.is_some() { format!("a batch of {} ", next.batch) } else { String::new() };
        tell(format!("{of}is measured at {} of the SMs, {} of the time", turn.of_gpu(next.sm), next.quota));
        let beside = || beside_of(node, launch).unwrap_or_default();
        match point(&mut function, next, concurrency, &beside) {
            Ok(Seen { mut point, fastest, beside }) => {
                (least, others) = (least.min(fastest), others.max(beside));
                let disturbed = if beside > DISTURBED {
                    format!(
                        "; other processes had {beside} of the device's time, and waits for them do not count"
                    )
                } else {
                    String::new()
                };
                tell(format!("serves {}, p95 {}{disturbed}", point.throughput, point.p95));
                if let Some((_, journal)) = search.as_mut().filter(|_| next.quota == time) {
                    // The search is over SMs and batches, in all of this time.
                    let mut point = point;
                    point.quota = Quota::WHOLE;
                    note(journal, Trial::done(Measurement { point, load: None }))?;
                }
                point.sm = turn.of_gpu(point.sm);
                points.push(point);
            }
            Err(why) => {
                if let Some((_, journal)) = search.as_mut().filter(|_| next.quota == time) {
                    let least = failed_batch.as_ref().is_none_or(|failed| next.batch < failed.batch);
                    if next.batch > 1 && least {
                        failed_batch = Some(FailedBatch { batch: next.batch, why: why.clone() });
                    }
                    note(journal, Trial::failed(Setting { quota: Quota::WHOLE, ..next }, why.clone()))?;
                }
                last = Some(why);
            }
        }
        memory = memory.max(memory_of(node, launch).unwrap_or(Bytes::ZERO));
        let searches = search.as_ref().and_then(|(planner, journal)| next_trial(planner, journal, time));
        let fast = |point: &&ProfilePoint| plan.slo.is_none_or(|slo| point.p95 <= max_p95(slo));
        if plan.batch.is_none()
            && searches.is_none()
            && settings.is_empty()
            && turn.regime == Regime::Fractional
            && !core::mem::replace(&mut halved, true)
            && let Some(best) = points
                .iter()
                .filter(|point| point.quota == time)
                .max_by_key(|point| (fast(point), density(point)))
            && let Some(half) = Quota::new(time.get() / 2).filter(|half| !half.is_zero())
            && points.iter().all(|point| point.quota != half)
            && last.is_none()
        {
            settings.push(setting(best.sm, half));
        }
    }
    function.stop();
    let table = ProfileTable::sparse(points).map_err(|error| last.unwrap_or_else(|| error.to_string()))?;
    // Work spaces grow with time, so add a quarter.
    let memory = Bytes(memory.get() + memory.get() / 4).saturating_add(Bytes::from_mib(64));
    Ok(Measured { table, memory, regime: turn.regime, least, others, failed_batch })
}

/// Most trials of the search for SMs, and for batches and SMs.
const TRIALS: (usize, usize) = (4, 6);

/// The search for the batch and the SMs of a function that takes up to `most` requests at once: the most requests for its SMs, within its
/// SLO.
fn efficacy_search(
    most: u32,
    slo: Option<Duration>,
    mut shares: Vec<SmShare>,
) -> Result<EfficacySearch, String> {
    let mut sizes: Vec<u32> = (0..).map(|power| 1 << power).take_while(|size| *size < most).collect();
    sizes.push(most);
    shares.sort_unstable();
    shares.dedup();
    let search =
        EfficacySearch::new(slo.map_or(ANSWER, max_p95)).and_then(|search| search.with_batches(sizes));
    let search = search.and_then(|search| {
        search.with_shares(shares)?.with_max_trials(if most > 1 { TRIALS.1 } else { TRIALS.0 })
    });
    search.map_err(|error| error.to_string())
}

/// Tenths of the SMs of this share, at least 1 % of a device.
fn tenths(all: SmShare) -> Vec<SmShare> {
    (1..=10).filter_map(|part| SmShare::new((all.get() / 10 * part).max(100))).collect()
}

/// The next setting of the search, in this time of a device; none where it has its answer, or there is none.
fn next_trial(planner: &EfficacySearch, journal: &Journal, time: Quota) -> Option<Setting> {
    match planner.next(journal) {
        Ok(Step::Measure(setting)) => Some(Setting { quota: time, ..setting }),
        Ok(Step::Done(_)) | Err(_) => None,
    }
}

fn note(journal: &mut Journal, trial: Trial) -> Result<(), String> {
    journal.add(trial).map_err(|error| error.to_string())
}

/// The device under trial.
struct Turn {
    regime: Regime,
    /// The slice's part of its GPU.
    part: Option<SmShare>,
}

impl Turn {
    fn of(node: &Weak<Node>, launch: &Launch) -> Result<Self, String> {
        let node = node.upgrade().ok_or("the host ends")?;
        let part = launch.parts.first().ok_or("an instance without parts")?;
        let host = node.host();
        let device = host.device(part.gpu).ok_or("a device that is not here")?;
        let of_slice = || {
            let model = device.mig.as_ref()?.model();
            model.share_of(model.get(part.slice?.profile)?)
        };
        Ok(Self { regime: device.effective_regime(), part: of_slice() })
    }

    /// Converts a share of the slice or the device into a share of the whole GPU.
    fn of_gpu(&self, share: SmShare) -> SmShare {
        self.part.unwrap_or(share)
    }
}

/// Starts the program with a share. Its output goes to the function's log.
fn start(
    node: &Arc<Node>,
    launch: &Launch,
    parts: &[Part],
    port: u16,
    stop: Arc<AtomicBool>,
) -> io::Result<Tried> {
    let service = launch.version.deployment.service.clone();
    let (told, instance) = (Arc::downgrade(node), launch.instance);
    let logged = service.clone();
    let wrong = move |text: &str| {
        if let Some(node) = told.upgrade() {
            node.logs.add(&logged, "trials", text.to_owned());
            node.host().progress(instance, text);
        }
    };
    let looks = Looks::new(launch.version.plan.works_in_sight(), launch.patience);
    let of = Arc::downgrade(node);
    let gpu_ns = move || of.upgrade().map_or(0, |node| node.host().gpu_ns(instance));
    let tried = |process: Box<dyn Running>| Tried {
        process,
        port,
        wrong: Box::new(wrong),
        looks,
        gpu_ns: Box::new(gpu_ns),
        told: None,
        stop,
    };
    #[cfg(feature = "kubernetes")]
    if let Some(pods) = &node.runner.pods {
        let launch = Launch { parts: parts.to_vec(), ..launch.clone() };
        let (pod, send) = pods.make(node, &launch, None).map_err(io::Error::other)?;
        send();
        return Ok(tried(Box::new(pod)));
    }
    let name = client(&service, launch.instance, 0, 1);
    let mut process = node.process(launch, parts, port, &name)?;
    let (stdout, stderr) = process.take_output();
    let pipes = [stdout.map(std::os::fd::OwnedFd::from), stderr.map(std::os::fd::OwnedFd::from)];
    for pipe in pipes.into_iter().flatten() {
        // The closure must not keep the node alive: processes end with it.
        let (node, service, name) = (Arc::downgrade(node), service.clone(), name.clone());
        let add = move |line| node.upgrade().map(|node| node.logs.add(&service, &name, line)).is_some();
        // The thread ends with the process, at the end of the pipe.
        let follow = move || each_line(std::fs::File::from(pipe), add);
        std::thread::Builder::new().name("trial-log".into()).spawn(follow)?;
    }
    Ok(tried(Box::new(LocalProcess { process, port })))
}

/// A point, its fastest answer, and the share of GPU time that other processes used meanwhile.
struct Seen {
    point: ProfilePoint,
    fastest: Duration,
    beside: BasisPoints,
}

/// Measures a point: throughput under full load, and latency at the load that an instance will get.
fn point(
    function: &mut Http<Tried>,
    setting: Setting,
    concurrency: u32,
    beside: &dyn Fn() -> Beside,
) -> Result<Seen, String> {
    let mut measured = || -> Result<Seen, ExecError> {
        function.start(setting, READY)?;
        let never = || Duration::ZERO;
        calls(function, concurrency, (None, &never), WARM_UP)?;
        let (begun, before) = (function.now(), beside());
        let (rate, busy) = calls(function, concurrency, (None, &never), CALLS)?;
        let busy_took = function.now().saturating_since(begun).as_secs_f64();
        let delayed = beside().delayed.saturating_sub(before.delayed).as_secs_f64();
        let rate = rate * busy_took / (busy_took - delayed).max(busy_took / 100.0);
        // Under full load a function exhausts its time and waits for the next window. With slack it does not, so latency needs
        // a second run.
        let (_, calm) = calls(function, concurrency, (Some(rate * SLACK), &|| beside().delayed), CALLS)?;
        let after = beside();
        let beside = part_of(after.used.saturating_sub(before.used), function.now().saturating_since(begun));
        let (work, bound) = after.since(&before).least(busy.len() + calm.len(), setting.quota);
        let at = |latencies: &[Duration], percent: usize| latencies[(latencies.len() - 1) * percent / 100];
        let (fastest, p50) = (at(&calm, 0).max(work), at(&calm, 50).max(work));
        let (fastest, p50) = (at(&busy, 0).min(fastest), at(&busy, 50).min(p50));
        // A kernel of another that still runs at the begin of a turn is in no account, so that the median is nearer to the p95 alone.
        let high = if beside > DISTURBED { 50 } else { 95 };
        let p95 = at(&busy, 95).min(at(&calm, high).max(bound));
        // A call of a function that takes batches is one.
        let batch = setting.batch.max(concurrency);
        let rate = rate * f64::from(setting.batch);
        let point = ProfilePoint::measured(setting.sm, setting.quota, batch, rate, p50, p95)
            .map_err(|error| ExecError::Refused(error.to_string()))?;
        Ok(Seen { point, fastest, beside })
    };
    let measured = measured().map_err(|error| error.to_string());
    function.stop();
    measured
}

/// A time as a part of another, at most all of it.
fn part_of(time: Duration, whole: Duration) -> BasisPoints {
    let part = u128::from(time.as_nanos()) * 10_000 / u128::from(whole.as_nanos().max(1));
    u16::try_from(part).ok().and_then(BasisPoints::new).unwrap_or(BasisPoints::WHOLE)
}

/// Sends calls: as many at once as the function takes, or at a given rate. Returns the rate of answers and the latency of each
/// call, sorted and without the function's `delays` meanwhile. Stops early after [`LONGEST`].
fn calls(
    function: &mut Http<Tried>,
    concurrency: u32,
    (rate, delays): (Option<f64>, &dyn Fn() -> Duration),
    most: u64,
) -> Result<(f64, Vec<Duration>), ExecError> {
    let mut delayed = delays();
    let begun = function.now();
    let gap =
        rate.map_or(Duration::ZERO, |rate| core::time::Duration::from_secs_f64(1.0 / rate.max(1e-3)).into());
    let due = |number: u64| begun.saturating_add(gap.saturating_mul(number));
    let (mut sent, mut under_way, mut latencies) = (0_u64, VecDeque::new(), Vec::new());
    loop {
        let now = function.now();
        let more = sent < most && (now.saturating_since(begun) < LONGEST || latencies.len() < FEWEST);
        if !more && under_way.is_empty() {
            break;
        }
        let room = under_way.len() < concurrency as usize;
        if more && room && due(sent) <= now {
            if under_way.is_empty() {
                delayed = delays();
            }
            let now = function.now();
            function.submit()?;
            under_way.push_back((now, delayed));
            sent += 1;
            continue;
        }
        let until = if more && room { due(sent) } else { now.saturating_add(ANSWER) };
        match function.wait(until)? {
            // Answers carry no identity, so an answer counts for the oldest call.
            Some(at) => {
                delayed = delays();
                let took =
                    |(sent, before)| at.saturating_since(sent).saturating_sub(delayed.saturating_sub(before));
                latencies.extend(under_way.pop_front().map(took));
            }
            None if until > now.saturating_add(Duration::from_secs(20)) => {
                return Err(ExecError::Refused(format!("no answer within {ANSWER}")));
            }
            None => {}
        }
    }
    let elapsed = function.now().saturating_since(begun).as_secs_f64();
    let answered = latencies.len() as f64 / elapsed.max(1e-9);
    latencies.sort_unstable();
    Ok((answered, latencies))
}

/// Requests per second per area of a point, for comparison.
fn density(point: &ProfilePoint) -> u64 {
    let area = u64::from(point.sm.get()) * u64::from(point.quota.get());
    point.throughput.as_milli().saturating_mul(10_000) / area.max(1)
}

/// Limits the share to a setting within it.
fn narrowed(whole: GpuShare, setting: Setting) -> Result<GpuShare, String> {
    let time = QuotaRange::new(setting.quota, setting.quota).map_err(|error| error.to_string())?;
    GpuShare::new(time, setting.sm, setting.sm, whole.memory()).map_err(|error| error.to_string())
}

/// Calls the function once; the memory that it took then, or none where it uses no GPU.
fn first_call(
    node: &Weak<Node>,
    launch: &Launch,
    function: &mut Http<Tried>,
    setting: Setting,
) -> Result<Option<Bytes>, String> {
    let plan = &launch.version.plan;
    let unknown = plan.memory.or(plan.expected).is_none()
        && launch.parts.iter().any(|part| part.share.memory().is_some());
    function.start(setting, READY).map_err(|error| match error {
        ExecError::Ended(how) if unknown && how != STOPPED => format!(
            "ended before it took connections: {how}; if it needs more GPU memory than host.guess, set fastgshare/gpu_mem"
        ),
        ExecError::Ended(how) => format!("ended before it took connections: {how}"),
        ExecError::Unavailable(why) => why,
        error => error.to_string(),
    })?;
    function.submit().map_err(|error| error.to_string())?;
    let until = function.now().saturating_add(ANSWER);
    match function.wait(until) {
        Ok(Some(_)) => {}
        Ok(None) => return Err(format!("no answer within {ANSWER}")),
        Err(error) => return Err(error.to_string()),
    }
    let uses = memory_of(node, launch);
    // Without the daemon of its node a pod with a GPU would count as a pod without a GPU.
    #[cfg(feature = "kubernetes")]
    if let (None, Some(node)) = (uses, node.upgrade())
        && let Some(pods) = &node.runner.pods
    {
        pods.snapshot(launch.instance).map_err(|why| format!("cannot be measured: {why:#}"))?;
    }
    function.stop();
    if launch.version.plan.wants != Wants::Measured {
        return Ok(Some(uses.unwrap_or(Bytes::ZERO)));
    }
    Ok(uses)
}

/// The snapshot of the daemon of the trial's device, and its name for the trial's process; none without an answer.
fn snapshot(node: &Weak<Node>, launch: &Launch) -> Option<(gshared::Snapshot, String)> {
    let node = node.upgrade()?;
    #[cfg(feature = "kubernetes")]
    if let Some(pods) = &node.runner.pods {
        return pods.snapshot(launch.instance).ok();
    }
    node.hook(launch)?;
    let name = client(&launch.version.deployment.service, launch.instance, 0, 1);
    Some((gshared::admin::snapshot(node.runner.daemon.as_ref()?).ok()?, name))
}

/// The memory of the trial's process by the node's daemon; none where that does not know it.
fn memory_of(node: &Weak<Node>, launch: &Launch) -> Option<Bytes> {
    let (snapshot, name) = snapshot(node, launch)?;
    let mine = snapshot.clients.iter().filter(|of| of.name == name);
    mine.map(|of| of.memory_bytes).reduce(Bytes::saturating_add)
}

/// The trial beside the other processes of its devices, so far.
#[derive(Debug, Clone, Copy, Default)]
struct Beside {
    /// The time that others used.
    used: Duration,
    /// How long others have kept it waiting.
    delayed: Duration,
    /// Its own GPU time, and launches.
    own: Duration,
    launches: u64,
    /// The window over which the node's daemon settles shares.
    window: Duration,
}

impl Beside {
    fn since(&self, before: &Self) -> Self {
        Self {
            used: self.used.saturating_sub(before.used),
            delayed: self.delayed.saturating_sub(before.delayed),
            own: self.own.saturating_sub(before.own),
            launches: self.launches.saturating_sub(before.launches),
            window: self.window,
        }
    }

    /// The GPU time of one of these calls, and the longest time in which a share of this quota alone gives it. A launch goes while
    /// any of a window's time is left, so the last one is on credit.
    fn least(&self, calls: usize, quota: Quota) -> (Duration, Duration) {
        let per_call = |total: u64| total.checked_div(calls as u64).unwrap_or(0);
        let work = per_call(self.own.as_nanos());
        let last = work.checked_div(per_call(self.launches)).unwrap_or(work);
        let a_window = quota.of(self.window).as_nanos();
        let windows = work.saturating_sub(last).checked_div(a_window).unwrap_or(0);
        let rest = Duration::from_nanos(work.saturating_sub(windows * a_window));
        (Duration::from_nanos(work), self.window.saturating_mul(windows).saturating_add(rest))
    }
}

/// None where the daemon cannot tell.
fn beside_of(node: &Weak<Node>, launch: &Launch) -> Option<Beside> {
    let (snapshot, name) = snapshot(node, launch)?;
    let mine = || snapshot.clients.iter().filter(|of| of.name == name);
    let beside =
        snapshot.clients.iter().filter(|of| of.name != name && mine().any(|mine| mine.gpu == of.gpu));
    let used = beside.map(|of| of.total_used_ns).fold(Duration::ZERO, Duration::saturating_add);
    let sum =
        |of: fn(&ClientSnapshot) -> Duration| mine().map(of).fold(Duration::ZERO, Duration::saturating_add);
    let (own, launches) = (sum(|of| of.total_used_ns), mine().map(|of| of.launches).sum());
    Some(Beside { used, delayed: sum(|of| of.delayed_ns), own, launches, window: snapshot.window_ns })
}

/// The point and the least latency of a function that uses no GPU, in the smallest share. Without an SLO nothing is measured: the point
/// has a rate that no load reaches.
fn without_gpu(batch: u32, seen: Option<&Seen>) -> Result<(ProfileTable, Duration), String> {
    let share = SmShare::from_percent(1).zip(Quota::from_percent(1)).ok_or("a share of 1 %")?;
    let any = Duration::from_nanos(1);
    let unmeasured = || ProfilePoint::measured(share.0, share.1, batch, 1e9, any, any);
    let mut point = match seen {
        Some(seen) => seen.point,
        None => unmeasured().map_err(|error| error.to_string())?,
    };
    (point.sm, point.quota) = share;
    let table = ProfileTable::sparse(vec![point]).map_err(|error| error.to_string())?;
    Ok((table, seen.map_or(any, |seen| seen.fastest)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_profile::executor::ExecError;
    use gshare_runner::HookedProcess;
    use std::process::{Command, Stdio};

    /// Half of the time gives 50 ms of seven launches of 10 ms in a window of 100 ms, or 60 ms in six windows of 20 ms.
    #[test]
    fn the_least_time_of_a_call_follows_from_the_daemons_window() {
        let half = Quota::from_percent(50).unwrap();
        let (own, launches) = (Duration::from_millis(70), 7);
        for (window, least) in [(100, 120), (20, 130), (0, 70)] {
            let beside = Beside { own, launches, window: Duration::from_millis(window), ..Beside::default() };
            let expected = (own, Duration::from_millis(least));
            assert_eq!(beside.least(1, half), expected, "a window of {window} ms");
        }
    }

    #[test]
    fn the_wait_for_a_program_that_does_nothing_ends_with_its_patience() {
        let call =
            Call { path: "/".into(), body: Vec::new(), batched: false, connections: 1, patience: ANSWER };
        let mut function = Http::new(call, |_, port| {
            let mut command = Command::new("/bin/sleep");
            command.arg("1000").stdin(Stdio::null());
            let run = gshare_runner::new_run().map_err(|error| error.to_string())?;
            let process = HookedProcess::start(command, "f", run, None).map_err(|error| error.to_string())?;
            let process = Box::new(LocalProcess { process, port });
            let looks = Looks::new(true, Duration::ZERO).due();
            let (wrong, gpu_ns): (Tell, _) = (Box::new(|_| {}), Box::new(|| 0));
            Ok(Tried { process, port, wrong, looks, gpu_ns, told: None, stop: Arc::default() })
        });
        let setting = Setting { batch: 1, sm: SmShare::WHOLE, quota: Quota::WHOLE };
        let error = function.start(setting, READY).unwrap_err();
        let ExecError::NotReady { within, why: Some(why) } = error else { panic!("{error}") };
        assert!(within < READY && why.starts_with("does nothing"), "{within}: {why}");
    }
}
