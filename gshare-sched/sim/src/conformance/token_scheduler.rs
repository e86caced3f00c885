//! Whether a scheduler of tokens keeps the contract of [`TokenScheduler`].
//!
//! # Runs
//! 1. **Random worlds**: [operations](crate::token::ops) over a few slots and GPUs, nonsense and late calls included, under the
//!    [generally valid](check::always) checkers.
//! 2. **The same again**: the log hash must be the same.
//! 3. **The same without the nonsense**: the log hash must be the same. If a refused call left anything behind, however hidden, a
//!    later result shows it sooner or later.
//! 4. **Keen clients**: they always want more, use their grants at once and to the nanosecond, and sometimes ask ahead of time. Requests
//!    must be met to the nanosecond in every window, and waits must be bounded, for shapes from narrow to wide.
//! 5. **Scenes**: a leaving client frees its SMs in the same call, a dead client frees them at the end of its token, a wide client
//!    is not passed over, and unclaimed time goes to a client in need of it.
//!
//! A claim without any test counts as a failure of the suite.

use crate::rng::Rng;
use crate::story::Story;
use crate::token::Terms;
use crate::token::check::{self, Check, bounded_wait::BoundedWait, request_met::RequestMet};
use crate::token::drive::Driver;
use crate::token::keen::Keen;
use crate::token::ops::{TokenOp, World};
use gshare_core::token::token_claims as claims;
use gshare_core::{
    ClientId, Duration, GpuId, Quota, QuotaRange, Share, SmShare, Timestamp, TokenEvent, TokenScheduler,
    UseState,
};
use std::collections::BTreeMap;

/// The runs to make, and the promises of the policy.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Conformance {
    /// The policy's own terms.
    pub terms: Terms,
    /// The numbers of slots and GPUs of an instance.
    pub world: World,
    /// The seeds of the random worlds and of the keen clients.
    pub seeds: core::ops::Range<u64>,
    /// The number of operations in a random world.
    pub operations: usize,
    /// The number of windows in a run of keen clients.
    pub windows: u64,
    /// Whether the policy promises that the requests of keen clients are met (see [`check::request_met`]).
    pub meets_requests: bool,
    /// Whether the policy bounds the waits of clients with owed time (see [`check::bounded_wait`]).
    pub bounds_waits: bool,
    /// Whether clients hold side by side where their SMs fit. A policy with one holder at a time promises an idle GPU's time alone.
    pub holds_together: bool,
}

impl Conformance {
    /// All promises, over 40 seeds: a few seconds in a debug build.
    pub const fn new(terms: Terms, world: World) -> Self {
        Self {
            terms,
            world,
            seeds: 0..40,
            operations: 400,
            windows: 20,
            meets_requests: true,
            bounds_waits: true,
            holds_together: true,
        }
    }
}

/// Counts of the checks of a suite.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The number of checked calls.
    pub calls: u64,
    /// The number of tests of each claim.
    pub tested: BTreeMap<&'static str, u64>,
}

impl Report {
    fn add(&mut self, driver: &Driver) {
        self.calls += driver.audit().calls();
        for (name, count) in driver.audit().tested() {
            *self.tested.entry(name).or_default() += count;
        }
    }
}

/// Runs the suite over the instances of `make`, which must be equal and without clients.
pub fn token_scheduler(
    make: &dyn Fn() -> Box<dyn TokenScheduler>,
    profile: &Conformance,
) -> Result<Report, Story> {
    let mut report = Report::default();
    for seed in profile.seeds.clone() {
        let of_seed = |story| Story { seed: Some(seed), ..story };
        random_world(make, profile, seed, &mut report).map_err(of_seed)?;
        keen_clients(make, profile, seed, &mut report).map_err(of_seed)?;
        for claim in [claims::SAME, claims::REFUSED] {
            *report.tested.entry(claim).or_default() += 1;
        }
    }
    let scenes: [(&str, Scene); 5] = [
        (claims::LEAVES, leaving),
        (claims::REVOKED, dying),
        (claims::WIDE, wide_and_narrow),
        (claims::ELASTIC, elastic),
        (claims::RETURNS, returning),
    ];
    for (claim, scene) in scenes {
        let mut driver = driver(make, profile, false);
        scene(&mut driver, profile).map_err(|story| Story { claim, ..story })?;
        report.add(&driver);
        *report.tested.entry(claim).or_default() += 1;
    }
    let promised = |claim: &str| match claim {
        claims::REQUEST => profile.meets_requests,
        claims::WAIT => profile.bounds_waits,
        _ => true,
    };
    for claim in claims::ALL.iter().filter(|claim| promised(claim)) {
        if report.tested.get(claim).is_none_or(|count| *count == 0) {
            let wrong = format!("`{claim}` was never put to the test");
            return Err(driver(make, profile, false).wrong(wrong));
        }
    }
    Ok(report)
}

type Scene = fn(&mut Driver, &Conformance) -> Result<(), Story>;

fn driver(make: &dyn Fn() -> Box<dyn TokenScheduler>, profile: &Conformance, keen: bool) -> Driver {
    let mut checks = check::always_if(profile.holds_together);
    if keen && profile.meets_requests {
        checks.push(Check::new(claims::REQUEST, RequestMet::new(Duration::ZERO)));
    }
    if keen && profile.bounds_waits {
        checks.push(Check::new(claims::WAIT, BoundedWait::default()));
    }
    Driver::new(make(), profile.terms, checks)
}

/// Runs 1 to 3 of the [module](self).
fn random_world(
    make: &dyn Fn() -> Box<dyn TokenScheduler>,
    profile: &Conformance,
    seed: u64,
    report: &mut Report,
) -> Result<(), Story> {
    let run = |nonsense: bool| {
        let mut rng = Rng::new(seed);
        // Small worlds and short pauses collide more; both are drawn once per seed.
        let slots = u32::try_from(rng.between(1, u64::from(profile.world.slots))).unwrap_or(1);
        let world = World { slots, ..profile.world };
        let mut driver = driver(make, profile, false);
        for _ in 0..profile.operations {
            let op = TokenOp::random(&mut rng);
            if nonsense || !op.is_nonsense() {
                op.apply(world, &mut driver)?;
            }
        }
        Ok(driver)
    };
    let first = run(true)?;
    report.add(&first);
    for (nonsense, what) in [(true, "when it was run again"), (false, "without the refused calls")] {
        let second = run(nonsense)?;
        if first.audit().log_hash() != second.audit().log_hash() {
            return Err(second.wrong(format!("the same events gave other actions {what}")));
        }
    }
    Ok(())
}

/// Run 4 of the [module](self).
fn keen_clients(
    make: &dyn Fn() -> Box<dyn TokenScheduler>,
    profile: &Conformance,
    seed: u64,
    report: &mut Report,
) -> Result<(), Story> {
    let mut rng = Rng::new(seed);
    let mut driver = driver(make, profile, true);
    let clients = rng.between(1, u64::from(profile.world.slots));
    let shares = keen_shares(&mut rng, clients);
    let ahead =
        if rng.percent(50) { rng.duration(Duration::ZERO, Duration::from_millis(2)) } else { Duration::ZERO };
    let start = Timestamp::ZERO.saturating_add(rng.duration(Duration::ZERO, profile.terms.window));
    let mut keen = Keen::new(&mut driver, ahead);
    for (slot, share) in (0..).zip(shares) {
        let client = ClientId::new(slot, 0);
        keen.call(start, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
        keen.ask(start, client)?;
    }
    keen.run(start.saturating_add(profile.terms.window.saturating_mul(profile.windows)))?;
    report.add(&driver);
    Ok(())
}

/// Shares with requests up to the whole in sum, or (one seed in four) with any sum; SMs of one of four shapes.
fn keen_shares(rng: &mut Rng, clients: u64) -> Vec<Share> {
    let shape = rng.below(4);
    let feasible = !rng.percent(25);
    let mut left = 10_000;
    (0..clients)
        .map(|index| {
            let most = if feasible { left * 2 / (clients - index).max(2) } else { 10_000 };
            let request = if rng.percent(10) { 0 } else { rng.between(0, most.min(10_000)) };
            left = left.saturating_sub(request);
            let limit = if rng.percent(40) { request.max(1) } else { rng.between(request.max(1), 10_000) };
            let sm = match shape {
                0 => 10_000,
                1 => rng.between(1, 10_000),
                2 => rng.between(100, 3_000),
                // Narrow clients and one wide client.
                _ => {
                    if index == 0 {
                        rng.between(7_000, 10_000)
                    } else {
                        rng.between(100, 2_500)
                    }
                }
            };
            let points = |points: u64| u16::try_from(points).unwrap_or(10_000);
            share(points(request), points(limit), points(sm))
        })
        .collect()
}

fn share(request: u16, limit: u16, sm: u16) -> Share {
    let quota = |points| Quota::new(points).unwrap_or(Quota::WHOLE);
    let quota = QuotaRange::new(quota(request), quota(limit)).unwrap_or(QuotaRange::BEST_EFFORT);
    Share { quota, sm: SmShare::new(sm).unwrap_or(SmShare::WHOLE) }
}

fn join(driver: &mut Driver, slot: u32, share: Share) -> Result<ClientId, Story> {
    let client = ClientId::new(slot, 0);
    driver.must(driver.now(), TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
    Ok(client)
}

fn ask(driver: &mut Driver, client: ClientId) -> Result<(), Story> {
    driver.must(driver.now(), TokenEvent::Used { client, used: Duration::ZERO, state: UseState::Wants })
}

fn holds(driver: &Driver, client: ClientId) -> bool {
    driver.book().client(client).is_some_and(|entry| entry.held.is_some())
}

fn expect(driver: &Driver, ok: bool, message: &str) -> Result<(), Story> {
    if ok { Ok(()) } else { Err(driver.wrong(message.to_owned())) }
}

/// Two clients without room side by side; the first holds, the second waits.
fn one_behind_another(driver: &mut Driver) -> Result<(ClientId, ClientId), Story> {
    let first = join(driver, 0, share(2_000, 10_000, 6_000))?;
    let second = join(driver, 1, share(2_000, 10_000, 6_000))?;
    ask(driver, first)?;
    ask(driver, second)?;
    expect(driver, holds(driver, first), "an idle GPU was not given to who asked first")?;
    expect(driver, !holds(driver, second), "two clients of 60 % of the SMs hold at once")?;
    Ok((first, second))
}

fn leaving(driver: &mut Driver, _: &Conformance) -> Result<(), Story> {
    let (first, second) = one_behind_another(driver)?;
    driver.must(driver.now(), TokenEvent::ClientLeft { client: first })?;
    expect(driver, holds(driver, second), "the SMs of a client that left were not given on at once")
}

fn returning(driver: &mut Driver, _: &Conformance) -> Result<(), Story> {
    let (first, second) = one_behind_another(driver)?;
    let used = Duration::from_micros(10);
    let now = driver.now().saturating_add(used);
    driver.must(now, TokenEvent::Used { client: first, used, state: UseState::Idle })?;
    expect(driver, holds(driver, second), "the SMs of an idle token were not given on at once")?;
    let less = Duration::from_micros(9);
    driver
        .must_refuse(now, TokenEvent::Used { client: first, used: less, state: UseState::Wants })
        .map(|_| ())
}

fn dying(driver: &mut Driver, profile: &Conformance) -> Result<(), Story> {
    let (first, second) = one_behind_another(driver)?;
    let charged = |driver: &Driver| driver.scheduler().client(first).map(|status| status.total_used);
    let entry = driver.book().client(first);
    let Some(allowed) = entry.and_then(|entry| entry.held).map(|held| held.allowed) else { return Ok(()) };
    let Some(due) = entry.and_then(|entry| entry.due(profile.terms)) else { return Ok(()) };
    driver.advance(due)?;
    expect(driver, !holds(driver, first), "a token that was never given back was not taken back in time")?;
    expect(
        driver,
        holds(driver, second),
        "the SMs of a token that was taken back were not given on at once",
    )?;
    expect(driver, charged(driver) == Some(allowed), "a token that was taken back is charged in full")?;
    // The engine still hears a slow client: its total is charged beyond the token once.
    for (used, total) in [
        (allowed, allowed),
        (allowed.saturating_mul(3), allowed.saturating_mul(3)),
        (allowed.saturating_mul(3), allowed.saturating_mul(3)),
    ] {
        driver.must(driver.now(), TokenEvent::Used { client: first, used, state: UseState::Idle })?;
        expect(driver, charged(driver) == Some(total), "a late total was not charged exactly")?;
    }
    Ok(())
}

fn wide_and_narrow(driver: &mut Driver, profile: &Conformance) -> Result<(), Story> {
    let start = driver.now();
    let mut keen = Keen::new(driver, Duration::ZERO);
    // Three narrow clients that never leave 90 % of the SMs free by themselves, and a wide client in the last place.
    for slot in 0..4 {
        let client = ClientId::new(slot, 0);
        let share = if slot == 3 { share(2_000, 10_000, 9_000) } else { share(2_000, 10_000, 3_000) };
        let at = start.saturating_add(Duration::from_millis(3).saturating_mul(slot.into()));
        keen.run(at)?;
        keen.call(at, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
        keen.ask(at, client)?;
    }
    keen.run(start.saturating_add(profile.terms.window.saturating_mul(10)))?;
    let used = |slot| {
        driver.scheduler().client(ClientId::new(slot, 0)).map_or(Duration::ZERO, |status| status.total_used)
    };
    let wide = used(3);
    let owed = Quota::new(2_000).unwrap_or(Quota::WHOLE).of(profile.terms.window).saturating_mul(8);
    expect(
        driver,
        wide >= owed,
        &format!("in 10 windows a wide client got {wide} of {owed} that it is owed in 8"),
    )
}

fn elastic(driver: &mut Driver, profile: &Conformance) -> Result<(), Story> {
    let start = driver.now();
    let mut keen = Keen::new(driver, Duration::ZERO);
    let client = ClientId::new(0, 0);
    let idle = ClientId::new(1, 0);
    keen.call(
        start,
        TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share: share(1_000, 8_000, 10_000) },
    )?;
    keen.call(
        start,
        TokenEvent::ClientJoined { client: idle, gpu: GpuId::new(0), share: share(9_000, 9_000, 10_000) },
    )?;
    keen.ask(start, client)?;
    let windows = 5;
    keen.run(
        start
            .saturating_add(profile.terms.window.saturating_mul(windows))
            .saturating_sub(Duration::from_nanos(1)),
    )?;
    let used = driver.scheduler().client(client).map_or(Duration::ZERO, |status| status.total_used);
    let limit = Quota::new(8_000).unwrap_or(Quota::WHOLE).of(profile.terms.window).saturating_mul(windows);
    expect(
        driver,
        used == limit,
        &format!("alone, a client of limit 80 % used {used} in {windows} windows, not {limit}"),
    )
}
