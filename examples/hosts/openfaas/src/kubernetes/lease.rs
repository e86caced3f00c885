//! One leader among the replicas of a controller, by a `Lease` (coordination.k8s.io/v1).
//!
//! # Algorithm
//! The leader writes the lease again every `PAUSE`; the others read it as often.
//! 1. A missing lease is made; a lease without a holder, or with our own name, is taken at once.
//! 2. Another replica's lease is taken after no change for `DURATION` **by our own clock**, counted from our first
//!    read of it: clocks of two nodes are never compared. A pause of our reads begins the count anew, so that after an outage of
//!    the API server its holder goes on.
//! 3. A leader counts from the begin of its last successful write, and after `DEADLINE` without another success its [`Fence`] closes: it
//!    writes nothing more. Since `DEADLINE < DURATION`, it is closed before another replica may write. If the next look finds the leader's
//!    own lease, no other has led, and the fence opens again.
//! 4. Writes name the version that was read: if two replicas take a lease at once, one gets 409.
//! 5. A replica that is asked to end gives the lease back, so that its successor need not wait.
//!
//! Worked example, with 15 s, 10 s and 2 s: a leader that loses the API server at 0 s writes nothing from 10 s on; another replica
//! that read the last lease at 1 s leads from 16 s on.
//!
//! No name is used twice: a restarted replica waits like any other.
//!
//! # Limits
//! A fully stopped leader (SIGSTOP, a frozen node) may finish the one write that it had begun when it resumes; the fence holds
//! back all others. Our writes name versions or UIDs, or make a pod that the next leader does not know and deletes.

use super::pods::MANAGER;
use super::said;
use super::writes::{ANSWER, answered, post};
use anyhow::Context as _;
use gshare_core::{Duration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff;
use kube::{Api, Client};
use rustix::time::{ClockId, clock_gettime};
use std::pin::pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Another's lease that has not changed for this time is taken. As Kubernetes' own controllers have it, and the next two.
const DURATION: Duration = Duration::from_secs(15);
/// A leader that could not renew its lease for this time writes nothing more; less than [`DURATION`].
const DEADLINE: Duration = Duration::from_secs(10);
/// Between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// Place of a lease: `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    namespace: String,
    name: String,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |part: &str| {
            let known =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
            (1..=253).contains(&part.len()) && part.bytes().all(known)
        };
        match text.split_once('/') {
            Some((namespace, name)) if plain(namespace) && plain(name) => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(format!("`{text}`: need NAMESPACE/NAME of lowercase letters, digits, `-` and `.`")),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Time since some start, and of day.
pub type Clock = dyn Fn() -> (Timestamp, jiff::Timestamp) + Send + Sync;

/// Between two looks at a closed fence.
const LOOK: std::time::Duration = std::time::Duration::from_millis(100);
/// Whether a replica may write: until the end of its last lease, by the clock at each look. So a leader that was stopped and wakes after
/// the end of its lease writes nothing.
#[derive(Debug, Clone)]
pub struct Fence(Arc<Gate>);

struct Gate {
    /// Nanoseconds on the clock; 0 before the first lease.
    until: AtomicU64,
    over: AtomicBool,
    clock: Box<Clock>,
}

gshare_core::debug_fields!(Gate { until, over });

impl Fence {
    /// Of a replica that leads by a lease, or of the only replica.
    pub fn new(by_lease: bool) -> Self {
        Self::by(by_lease, Box::new(clock))
    }

    /// By another clock.
    pub fn by(by_lease: bool, clock: Box<Clock>) -> Self {
        let until = AtomicU64::new(if by_lease { 0 } else { u64::MAX });
        Self(Arc::new(Gate { until, over: AtomicBool::new(false), clock }))
    }

    fn now(&self) -> (Timestamp, jiff::Timestamp) {
        (self.0.clock)()
    }

    /// Whether a write may be sent now.
    pub fn is_open(&self) -> bool {
        !self.is_over() && self.now().0.as_nanos() < self.0.until.load(Ordering::Acquire)
    }

    /// Waits until writes may be sent. False: none may be sent any more.
    pub async fn opens(&self) -> bool {
        while !self.is_open() && !self.is_over() {
            tokio::time::sleep(LOOK).await;
        }
        !self.is_over()
    }

    /// No write may be sent any more.
    pub fn close(&self) {
        self.0.over.store(true, Ordering::Release);
    }

    /// Whether no write may be sent any more.
    pub fn is_over(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }

    pub(super) fn open_until(&self, until: Timestamp) {
        self.0.until.store(until.as_nanos(), Ordering::Release);
    }
}

/// Does `work`, by this lease if there is one, until `stop`, which `work` knows as well. The work writes behind the fence: it goes on while
/// the lease cannot be kept, until another replica has it.
///
/// # Errors
/// When another replica leads.
pub async fn run(
    place: Option<&Place>,
    client: Client,
    fence: Fence,
    stop: impl Future<Output = ()>,
    work: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let Some(place) = place else {
        work.await;
        return Ok(());
    };
    let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("a name of its own")?;
    let host = rustix::system::uname();
    let identity = format!("{}_{}", host.nodename().to_string_lossy(), random.trim_end());
    let elector = Elector::new(identity);
    Leadership::new(client, place.clone(), elector, fence).lead(stop, work).await?;
    Ok(())
}

/// Time since the machine started, with that for which it slept, and of day.
fn clock() -> (Timestamp, jiff::Timestamp) {
    let since = clock_gettime(ClockId::Boottime);
    // Neither part is below zero.
    let [seconds, nanos] = [since.tv_sec, since.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    let nanos = seconds * 1_000_000_000 + nanos;
    (Timestamp::from_nanos(nanos), jiff::Timestamp::now())
}

/// Decides for one replica whether it leads. Pure.
#[derive(Debug, Clone)]
pub struct Elector {
    identity: String,
    /// The version of another's lease, and when it was first and last read.
    seen: Option<(Option<String>, Timestamp, Timestamp)>,
    /// From before the last write that went through.
    led: Option<Timestamp>,
}

impl Elector {
    /// For a replica with a name that no other has.
    pub fn new(identity: impl Into<String>) -> Self {
        Self { identity: identity.into(), seen: None, led: None }
    }

    /// Until when it leads, if it does.
    pub fn leads_until(&self) -> Option<Timestamp> {
        self.led.map(|led| led + DEADLINE)
    }

    /// Whether it leads.
    pub fn leads(&self, now: Timestamp) -> bool {
        self.leads_until().is_some_and(|until| now < until)
    }

    /// The lease to write, given the lease that was read; none while another replica holds it.
    pub fn wants(
        &mut self,
        now: Timestamp,
        wall: jiff::Timestamp,
        found: Option<&Lease>,
    ) -> Option<LeaseSpec> {
        let old = found.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let holder = old.holder_identity.as_deref().unwrap_or_default();
        if holder != self.identity && self.leads_until().is_some_and(|until| now >= until) {
            // Another replica may have led meanwhile, also if it has given the lease back.
            self.led = None;
            return None;
        }
        if !holder.is_empty() && holder != self.identity {
            self.led = None;
            let version = found.and_then(|lease| lease.metadata.resource_version.clone());
            match &mut self.seen {
                // While no lease could be read, the holder may have been unable to write as well.
                Some((seen, since, read)) if *seen == version && now.saturating_since(*read) < DEADLINE => {
                    *read = now;
                    if now.saturating_since(*since) < DURATION {
                        return None;
                    }
                }
                _ => {
                    self.seen = Some((version, now, now));
                    return None;
                }
            }
        }
        let wall = Some(MicroTime(wall));
        let (acquire_time, transitions) = match holder == self.identity {
            true => (old.acquire_time.or_else(|| wall.clone()), old.lease_transitions.unwrap_or(0)),
            false => (wall.clone(), old.lease_transitions.map_or(0, |count| count.saturating_add(1))),
        };
        Some(LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_nanos() / 1_000_000_000).ok(),
            acquire_time,
            renew_time: wall,
            lease_transitions: Some(transitions),
            ..old
        })
    }

    /// A write that was begun at `began` went through.
    pub fn written(&mut self, began: Timestamp) {
        (self.seen, self.led) = (None, Some(began));
    }
}

/// A replica no longer leads: the lease could not be written for too long, or is another's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no longer the leader: the lease {0} could not be kept")]
pub struct Lost(pub Place);

/// A lease to lead by.
pub struct Leadership {
    leases: Api<Lease>,
    place: Place,
    elector: Elector,
    /// Of the work's writes, with the clock of both.
    fence: Fence,
}

gshare_core::debug_fields!(Leadership { place, elector });

impl Leadership {
    /// Of the lease there, for work that writes behind this fence.
    pub fn new(client: Client, place: Place, elector: Elector, fence: Fence) -> Self {
        let leases = Api::namespaced(client, &place.namespace);
        Self { leases, place, elector, fence }
    }

    /// Waits until this replica leads, or `stop`; then does `work` for as long as it leads. When `work` is done the lease
    /// is given back.
    ///
    /// # Errors
    /// If the lead is lost: another replica has the lease.
    pub async fn lead(
        mut self,
        stop: impl Future<Output = ()>,
        work: impl Future<Output = ()>,
    ) -> Result<(), Lost> {
        let mut stop = pin!(stop);
        loop {
            tokio::select! {
                () = self.look() => {}
                // A write that is on its way may still take the lease; then it runs out.
                () = &mut stop => return Ok(()),
            }
            if self.elector.leads(self.fence.now().0) {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE.into()) => {}
                () = &mut stop => return Ok(()),
            }
        }
        eprintln!("lease {}: {} leads", self.place, self.elector.identity);
        {
            let mut work = pin!(work);
            loop {
                let Some(until) = self.elector.leads_until() else { return Err(Lost(self.place)) };
                let left = match until.saturating_since(self.fence.now().0) {
                    Duration::ZERO => ANSWER,
                    left => left.into(),
                };
                let keep = async {
                    tokio::time::sleep(PAUSE.into()).await;
                    self.look().await;
                };
                tokio::select! {
                    // Work is not gone on with when the time is over.
                    biased;
                    // A look that hangs must not keep it.
                    _ = tokio::time::timeout(left, keep) => {}
                    () = &mut work => break,
                }
            }
        }
        self.give_back().await;
        Ok(())
    }

    async fn look(&mut self) {
        if let Err(error) = self.try_look().await {
            // Made or written by another in between is no fault.
            if !matches!(&error, kube::Error::Api(status) if status.code == 409) {
                eprintln!("lease {}: {}", self.place, said(&error));
            }
        }
    }

    async fn try_look(&mut self) -> Result<(), kube::Error> {
        let found = answered(self.leases.get_opt(&self.place.name)).await?;
        let (began, wall) = self.fence.now();
        let Some(spec) = self.elector.wants(began, wall, found.as_ref()) else { return Ok(()) };
        self.write(found, spec).await?;
        self.elector.written(began);
        if let Some(until) = self.elector.leads_until() {
            self.fence.open_until(until);
        }
        Ok(())
    }

    async fn write(&self, found: Option<Lease>, spec: LeaseSpec) -> Result<(), kube::Error> {
        let (name, post, spec) = (&self.place.name, post(MANAGER), Some(spec));
        let written = match found {
            Some(found) => answered(self.leases.replace(name, &post, &Lease { spec, ..found })).await,
            None => {
                let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
                answered(self.leases.create(&post, &Lease { metadata, spec })).await
            }
        };
        written.map(drop)
    }

    /// Gives the lease back: no replica has to wait for it to run out, unless this fails.
    async fn give_back(&self) {
        let Ok(Some(found)) = answered(self.leases.get_opt(&self.place.name)).await else { return };
        let spec = found.spec.clone().unwrap_or_default();
        if spec.holder_identity.as_deref() == Some(&self.elector.identity) {
            let spec = LeaseSpec { holder_identity: Some(String::new()), ..spec };
            let _ = self.write(Some(found), spec).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EPOCH: jiff::Timestamp = jiff::Timestamp::UNIX_EPOCH;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn lease(spec: LeaseSpec, version: u64) -> Lease {
        let metadata = ObjectMeta { resource_version: Some(version.to_string()), ..ObjectMeta::default() };
        Lease { metadata, spec: Some(spec) }
    }

    #[test]
    fn the_worked_example() {
        let (mut a, mut b) = (Elector::new("a"), Elector::new("b"));
        let spec = a.wants(at(0), EPOCH, None).unwrap();
        assert_eq!((spec.lease_duration_seconds, spec.lease_transitions), (Some(15), Some(0)));
        a.written(at(0));
        let held = lease(spec, 1);
        assert_eq!(b.wants(at(1_000), EPOCH, Some(&held)), None);
        assert!(a.leads(at(9_999)) && !a.leads(at(10_000)));
        for now in [3_000, 9_000, 15_999] {
            assert_eq!(b.wants(at(now), EPOCH, Some(&held)), None);
        }
        let mut away = b.clone();
        assert_eq!(away.wants(at(30_000), EPOCH, Some(&held)), None, "it has read nothing for long");
        let taken = b.wants(at(16_000), EPOCH, Some(&held)).unwrap();
        assert_eq!((taken.holder_identity.as_deref(), taken.lease_transitions), (Some("b"), Some(1)));
        // A lease that changes is being renewed.
        assert_eq!(b.wants(at(16_000), EPOCH, Some(&lease(held.spec.clone().unwrap(), 2))), None);
        // One that was given back is taken at once.
        let free = LeaseSpec { holder_identity: Some(String::new()), ..held.spec.unwrap() };
        assert!(b.wants(at(16_001), EPOCH, Some(&lease(free.clone(), 3))).is_some());
        // Late, the first one takes its own lease again, and no other: somebody may have led meanwhile.
        let own = lease(LeaseSpec { holder_identity: Some("a".into()), ..free.clone() }, 4);
        assert!(a.clone().wants(at(60_000), EPOCH, Some(&own)).is_some());
        for other in [Some(lease(free, 4)), None] {
            let mut late = a.clone();
            assert_eq!((late.wants(at(60_000), EPOCH, other.as_ref()), late.leads_until()), (None, None));
        }
    }

    proptest! {
        /// Clocks may be days apart, and reads and writes may take any time, get lost, or stay unanswered: two replicas
        /// never lead at once.
        #[test]
        fn never_do_two_lead(
            steps in prop::collection::vec((0_usize..3, 0_u64..4_000, 0_u8..8), 1..200),
            offsets in prop::array::uniform3(0_u64..100_000_000),
        ) {
            let mut electors = ["a", "b", "c"].map(Elector::new);
            let (mut held, mut version, mut now): (Option<Lease>, u64, u64) = (None, 0, 0);
            // Read, and not yet written: the lease at its version, and when that began.
            let mut pending: [Option<(u64, Timestamp, LeaseSpec)>; 3] = [None, None, None];
            for (who, later, what) in steps {
                now += later;
                let own = |who: usize| at(now + offsets[who]);
                match pending[who].take() {
                    None => {
                        let spec = electors[who].wants(own(who), EPOCH, held.as_ref());
                        pending[who] = spec.map(|spec| (version, own(who), spec));
                    }
                    // Lost on its way.
                    Some(_) if what == 0 => {}
                    Some((read, began, spec)) if read == version => {
                        version += 1;
                        held = Some(lease(spec, version));
                        // The answer may be lost.
                        if what > 1 {
                            electors[who].written(began);
                        }
                    }
                    Some(_) => {}
                }
                let leading = (0..3).filter(|who| electors[*who].leads(own(*who))).count();
                prop_assert!(leading <= 1, "{leading} at {now} ms");
            }
        }
    }
}
