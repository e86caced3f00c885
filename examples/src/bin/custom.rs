//! A host of your own: [`Platform`] decides, the runner starts real processes, and one policy is the host's.
//!
//! Each process is `cat`, and each request a line that `cat` answers. The host uses virtual time, so every run prints the
//! same. A real host passes the time of day, and its functions take their real time.
//!
//! `cargo run -p gshare-examples --bin custom`

use anyhow::Context as _;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, InstanceId, NodeId, RequestId, Timestamp};
use gshare_runner::HookedProcess;
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport, Platform,
    PlatformAction, PlatformConfig, PlatformEvent, Work,
};
use gshare_sched::scale::{HorizontalOrder, HorizontalScaler, LoadReport};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

/// The host's own policy, in place of the scalers of `gshare_sched::scale`: as many instances as the last tick needed.
struct AsManyAsNeeded;

impl HorizontalScaler for AsManyAsNeeded {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let LoadReport { now, fleet, load, .. } = report;
        let Some((best, point)) = fleet.startable(now).next() else { return };
        let needed = load.as_milli().div_ceil(point.throughput.as_milli()).max(1);
        let has = u64::from(fleet.deployed());
        orders.extend((has..needed.min(has + u64::from(fleet.room()))).map(|_| HorizontalOrder::Start(best)));
        let surplus = fleet.instances().skip(usize::try_from(needed).unwrap_or(usize::MAX));
        orders.extend(surplus.map(|(instance, _)| HorizontalOrder::Remove(instance)));
    }

    fn forget(&mut self, _: FunctionId) {}

    /// Each report is for itself: the sooner the better.
    fn early_reports(&self) -> bool {
        true
    }
}

/// A running copy: its process, and a line to it.
struct Instance {
    _process: HookedProcess,
    line: BufReader<UnixStream>,
}

/// An event at a time of the host's clock.
enum Happening {
    Arrives,
    Tell(PlatformEvent),
}

/// The platform, and what this host does for it.
struct Host {
    platform: Platform,
    now: Timestamp,
    instances: BTreeMap<InstanceId, Instance>,
    /// By time and order.
    ahead: BTreeMap<(Timestamp, u64), Happening>,
    requests: u64,
    order: u64,
    answered: u64,
}

impl Host {
    fn later(&mut self, after: Duration, happening: Happening) {
        self.order += 1;
        self.ahead.insert((self.now.saturating_add(after), self.order), happening);
    }

    fn tell(&mut self, event: PlatformEvent) -> anyhow::Result<()> {
        let mut orders = Vec::new();
        self.platform.handle(self.now, event, &mut orders)?;
        for order in orders {
            self.obey(order)?;
        }
        Ok(())
    }

    /// Everything that this host does.
    fn obey(&mut self, order: PlatformAction) -> anyhow::Result<()> {
        let report = |instance, report| Happening::Tell(PlatformEvent::Instance { instance, report });
        match order {
            PlatformAction::Start { instance, parts, .. } => {
                let (ours, theirs) = UnixStream::pair()?;
                let mut command = Command::new("cat");
                command.stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs.try_clone()?)));
                command.stdout(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
                // The share of the process. The hook enforces it, so pass `Some(hook)` here for a real limit.
                command.env("GSHARE_QUOTA", parts[0].share.time().to_string());
                let name = format!("echo-{}", instance.number());
                let process = HookedProcess::start(command, &name, gshare_runner::new_run()?, None)?;
                self.instances.insert(instance, Instance { _process: process, line: BufReader::new(ours) });
                self.later(Duration::from_millis(300), report(instance, InstanceReport::Ready));
            }
            PlatformAction::Stop { instance, .. } => {
                // Dropped: killed.
                self.instances.remove(&instance);
                self.later(Duration::ZERO, report(instance, InstanceReport::Gone));
            }
            PlatformAction::Dispatch { request, instance } => {
                let of = self.instances.get_mut(&instance).context("an instance that runs")?;
                writeln!(of.line.get_mut(), "request {}", request.number())?;
                let mut answer = String::new();
                of.line.read_line(&mut answer)?;
                anyhow::ensure!(answer.trim() == format!("request {}", request.number()), "{answer}");
                let took = Duration::from_millis(36);
                self.later(took, Happening::Tell(PlatformEvent::RequestDone { request, took }));
                self.answered += 1;
            }
            // A drained instance is stopped next; nothing of this host is parked, measured or fetched.
            _ => {}
        }
        Ok(())
    }

    /// Lets the clock go on to the next thing that happens, up to a time.
    fn step(&mut self, until: Timestamp) -> anyhow::Result<bool> {
        let happens = self.ahead.first_key_value().map(|(key, _)| key.0);
        let Some(next) = [happens, self.platform.next_deadline()].into_iter().flatten().min() else {
            return Ok(false);
        };
        if next > until {
            self.now = until;
            return Ok(false);
        }
        self.now = next;
        if self.platform.next_deadline() == Some(next) {
            self.tell(PlatformEvent::DeadlineReached)?;
        } else if let Some((_, happening)) = self.ahead.pop_first() {
            let event = match happening {
                Happening::Tell(event) => event,
                Happening::Arrives => {
                    self.requests += 1;
                    let request = RequestId::new(self.requests);
                    PlatformEvent::RequestArrived { request, function: FunctionId::new(0), deadline: None }
                }
            };
            self.tell(event)?;
        }
        Ok(true)
    }
}

fn main() -> anyhow::Result<()> {
    // Ours would be FractionalPolicies::fast()?.
    let policies = FractionalPolicies {
        scaler: Box::new(AsManyAsNeeded),
        packer: Box::new(MaxRects::new(MaxRectsConfig::default())),
    };
    let pool = FractionalPool::new(FractionalConfig::default(), policies)?;
    let platform = Platform::new(PlatformConfig::default(), vec![pool.into()])?;
    let (instances, ahead, now) = (BTreeMap::new(), BTreeMap::new(), Timestamp::ZERO);
    let mut host = Host { platform, now, instances, ahead, requests: 0, order: 0, answered: 0 };
    for gpu in 0..2 {
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
        host.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec })?;
    }
    // 24 % of the SMs for 40 % of the time serve 27 requests/s.
    let point =
        ProfilePoint::measured("24".parse()?, "0.4".parse()?, 1, 27.0, "10ms".parse()?, "10ms".parse()?)?;
    let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point])?) };
    let spec = Box::new(FunctionSpec::new(work, Bytes::from_gib(2)).with_instances(1, 16));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec })?;

    println!("load/s  processes  sent  answered");
    for load in [20, 60, 110, 250, 110, 20] {
        let (sent, answered, begun) = (host.requests, host.answered, host.now);
        for number in 0..3 * load {
            host.later(Duration::from_micros(1_000_000 * number / load), Happening::Arrives);
        }
        while host.step(begun.saturating_add(Duration::from_secs(3)))? {}
        let (sent, answered) = (host.requests - sent, host.answered - answered);
        println!("{load:>6}  {:>9}  {sent:>4}  {answered:>8}", host.instances.len());
    }
    Ok(())
}
