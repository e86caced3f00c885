//! Operations: random calls as small values, for property tests, fuzzers and committed regressions alike.
//!
//! An operation names a slot and percentages, never a total or a time, and takes its meaning from the book. Any list of operations
//! is therefore a possible history, and a shrunk list is one as well.

use super::Book;
use super::drive::Driver;
use crate::rng::Rng;
use crate::story::Story;
use gshare_core::{
    ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Share, SmShare, Timestamp, TokenError,
    TokenEvent, UseState,
};

/// One operation. Slots and GPUs count modulo the world's size, percentages modulo 101.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum TokenOp {
    /// Time passes; the scheduler is called at its deadlines.
    Wait {
        /// The time in microseconds.
        micros: u16,
    },
    /// Time passes without a call of the scheduler, even past its deadlines.
    Sleep {
        /// The time, in 100 microseconds.
        tenths_ms: u16,
    },
    /// The scheduler is called at its next deadline.
    Deadline,
    /// The scheduler is called as if at a deadline.
    Poke,
    /// A client joins, if its slot is free.
    Join {
        /// The client's slot.
        slot: u8,
        /// The client's GPU.
        gpu: u8,
        /// The request in per cent of the limit.
        request: u8,
        /// The limit in per cent, at least 1.
        limit: u8,
        /// The SMs in per cent, at least 1.
        sm: u8,
    },
    /// A client's share changes.
    Change {
        /// The client's slot.
        slot: u8,
        /// The request in per cent of the limit.
        request: u8,
        /// The limit in per cent, at least 1.
        limit: u8,
        /// The SMs in per cent, at least 1.
        sm: u8,
    },
    /// A client's class changes.
    Class {
        /// The client's slot.
        slot: u8,
        /// Whether the client has a latency to keep from now on.
        slo_sensitive: bool,
    },
    /// A client leaves with its token.
    Leave {
        /// The client's slot.
        slot: u8,
    },
    /// A client asks for a token.
    Request {
        /// The client's slot.
        slot: u8,
    },
    /// A client gives its token back.
    Return {
        /// The client's slot.
        slot: u8,
        /// GPU time used, in per cent of the token; may exceed 100.
        used: u8,
        /// Whether the client wants the next token at once.
        again: bool,
    },
    /// A client reports its use of the token.
    Report {
        /// The client's slot.
        slot: u8,
        /// GPU time used, in per cent of the token; may exceed 100.
        used: u8,
    },
    /// A client launches a kernel as long as several windows, and reports it.
    Long {
        /// The client's slot.
        slot: u8,
        /// The length of the kernel in 64ths of a window: up to four windows.
        length: u8,
    },
    /// A client without a token reports work that ended after its charge.
    Late {
        /// The client's slot.
        slot: u8,
        /// GPU time beyond its last report, in 64ths of a window.
        more: u8,
    },
    /// A call that the scheduler must refuse.
    Nonsense {
        /// The slot named in the call.
        slot: u8,
        /// The kind of nonsense.
        kind: u8,
    },
}

/// The size of a world of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// The number of client slots, which must equal the scheduler's number.
    pub slots: u32,
    /// The number of GPUs, which must equal the scheduler's number.
    pub gpus: u32,
}

impl TokenOp {
    /// A random operation; operations that move a world along are more likely than disturbances.
    pub fn random(rng: &mut Rng) -> Self {
        let mut byte = || rng.next_u64().to_le_bytes()[0];
        let (slot, a, b, c, d) = (byte(), byte(), byte(), byte(), byte());
        match byte() % 34 {
            0..4 => Self::Wait { micros: u16::from_le_bytes([a, b]) },
            4 => Self::Sleep { tenths_ms: u16::from_le_bytes([a, b & 3]) },
            5..9 => Self::Deadline,
            9 => Self::Poke,
            10..13 => Self::Join { slot, gpu: d, request: a, limit: b, sm: c },
            13 => Self::Change { slot, request: a, limit: b, sm: c },
            14 => Self::Leave { slot },
            15..22 => Self::Request { slot },
            22..26 => Self::Return { slot, used: a % 120, again: b % 2 == 0 },
            26..29 => Self::Report { slot, used: a % 110 },
            29 => Self::Long { slot, length: a },
            30 => Self::Late { slot, more: a % 16 },
            31..33 => Self::Class { slot, slo_sensitive: a % 4 > 0 },
            _ => Self::Nonsense { slot, kind: a },
        }
    }

    /// Whether the scheduler must refuse the operation.
    pub const fn is_nonsense(self) -> bool {
        matches!(self, Self::Nonsense { .. })
    }

    /// Performs the operation. An operation without sense at present (a return of nothing) does nothing.
    pub fn apply(self, world: World, driver: &mut Driver) -> Result<(), Story> {
        let now = driver.now();
        let client = |slot: u8, book: &Book| book.in_slot(u32::from(slot) % world.slots);
        match self {
            Self::Wait { micros } => {
                let until = now.saturating_add(Duration::from_micros(micros.into()));
                driver.advance(until)?;
                driver.must(until, TokenEvent::DeadlineReached)
            }
            Self::Sleep { tenths_ms } => {
                let until = now.saturating_add(Duration::from_micros(100 * u64::from(tenths_ms)));
                driver.must(until, TokenEvent::DeadlineReached)
            }
            Self::Deadline => match driver.scheduler().next_deadline() {
                Some(deadline) => driver.must(deadline.max(now), TokenEvent::DeadlineReached),
                None => Ok(()),
            },
            Self::Poke => driver.must(now, TokenEvent::DeadlineReached),
            Self::Join { slot, gpu, request, limit, sm } => {
                let slot = u32::from(slot) % world.slots;
                if driver.book().in_slot(slot).is_some() {
                    return Ok(());
                }
                let client = ClientId::new(slot, driver.book().next_generation(slot));
                let gpu = GpuId::new(u32::from(gpu) % world.gpus);
                driver.must(now, TokenEvent::ClientJoined { client, gpu, share: share(request, limit, sm) })
            }
            Self::Change { slot, request, limit, sm } => match client(slot, driver.book()) {
                Some(client) => {
                    driver.must(now, TokenEvent::ShareChanged { client, share: share(request, limit, sm) })
                }
                None => Ok(()),
            },
            Self::Class { slot, slo_sensitive } => match client(slot, driver.book()) {
                Some(client) => {
                    let class =
                        if slo_sensitive { ServiceClass::SLO_SENSITIVE } else { ServiceClass::BestEffort };
                    driver.must(now, TokenEvent::ClassChanged { client, class })
                }
                None => Ok(()),
            },
            Self::Leave { slot } => match client(slot, driver.book()) {
                Some(client) => driver.must(now, TokenEvent::ClientLeft { client }),
                None => Ok(()),
            },
            Self::Request { slot } => {
                let Some(client) = client(slot, driver.book()) else { return Ok(()) };
                let (said, holds) = said(client, driver.book());
                let state = if holds { UseState::Extends } else { UseState::Wants };
                driver.must(now, TokenEvent::Used { client, used: said, state })
            }
            Self::Return { slot, used, .. } | Self::Report { slot, used } => {
                let Some(client) = client(slot, driver.book()) else { return Ok(()) };
                let Some((held, said)) =
                    driver.book().client(client).and_then(|entry| Some((entry.held?, entry.said)))
                else {
                    return Ok(());
                };
                let used = held.base.saturating_add(percent(held.allowed - held.base, used)).max(said);
                let state = match self {
                    Self::Return { again: true, .. } => UseState::Wants,
                    Self::Return { .. } => UseState::Idle,
                    _ => UseState::Holds,
                };
                driver.must(now, TokenEvent::Used { client, used, state })
            }
            Self::Long { slot, length: part } | Self::Late { slot, more: part } => {
                let Some(client) = client(slot, driver.book()) else { return Ok(()) };
                let (said, holds) = said(client, driver.book());
                if holds != matches!(self, Self::Long { .. }) {
                    return Ok(());
                }
                let window = driver.book().terms().window.as_nanos();
                let used = said.saturating_add(Duration::from_nanos(window * u64::from(part) / 64));
                driver.must(now, TokenEvent::Used { client, used, state: UseState::Holds })
            }
            Self::Nonsense { slot, kind } => nonsense(slot, kind, world, driver),
        }
    }
}

/// A client's reported use, and whether it holds a token.
fn said(client: ClientId, book: &Book) -> (Duration, bool) {
    book.client(client).map_or((Duration::ZERO, false), |entry| (entry.said, entry.held.is_some()))
}

fn percent(whole: Duration, percent: u8) -> Duration {
    Duration::from_nanos(whole.as_nanos().saturating_mul(percent.into()) / 100)
}

/// A valid share: `request` is per cent of the limit.
fn share(request: u8, limit: u8, sm: u8) -> Share {
    let limit = 1 + u16::from(limit) % 100;
    let request = u16::from(request) % 101 * limit;
    let quota = |points| Quota::new(points).unwrap_or(Quota::WHOLE);
    let sm = SmShare::from_percent(1 + u16::from(sm) % 100).unwrap_or(SmShare::WHOLE);
    let quota = QuotaRange::new(quota(request), quota(100 * limit)).unwrap_or(QuotaRange::BEST_EFFORT);
    Share { quota, sm }
}

/// A call that no scheduler may accept, and the error it must return.
fn nonsense(slot: u8, kind: u8, world: World, driver: &mut Driver) -> Result<(), Story> {
    let now = driver.now();
    let slot = u32::from(slot) % world.slots;
    let gpu = GpuId::new(0);
    let nobody = ClientId::new(slot, driver.book().next_generation(slot));
    let somebody = driver.book().in_slot(slot);
    let (used, state) = (Duration::ZERO, UseState::Wants);
    let sound = share(50, 50, 50);
    let expected: (Timestamp, TokenEvent, fn(&TokenError) -> bool) = match (kind % 12, somebody) {
        (0, _) if now > Timestamp::ZERO => {
            let past = now.saturating_sub(Duration::from_nanos(1));
            (past, TokenEvent::DeadlineReached, |error| matches!(error, TokenError::TimeWentBack { .. }))
        }
        // A refused call in the future must not move the time there either.
        (1, _) => (
            now.saturating_add(Duration::from_secs(1)),
            TokenEvent::Used { client: nobody, used, state },
            is_unknown,
        ),
        (2, _) => (now, TokenEvent::ClientLeft { client: nobody }, is_unknown),
        (3, _) => (now, TokenEvent::ShareChanged { client: nobody, share: sound }, is_unknown),
        (4, _) => (now, TokenEvent::Used { client: nobody, used, state: UseState::Holds }, is_unknown),
        (7, Some(client)) => (now, TokenEvent::ClientJoined { client, gpu, share: sound }, |error| {
            matches!(error, TokenError::ClientExists { .. })
        }),
        (8, Some(client)) => {
            let share = Share { sm: SmShare::ZERO, ..sound };
            (now, TokenEvent::ShareChanged { client, share }, |error| {
                matches!(error, TokenError::BadShare { .. })
            })
        }
        (9, Some(client)) => {
            // A report below the last report, if the last report leaves room for it.
            let (said, _) = said(client, driver.book());
            let Some(less) = said.as_nanos().checked_sub(1) else { return Ok(()) };
            let used = Duration::from_nanos(less);
            (now, TokenEvent::Used { client, used, state: UseState::Holds }, |error| {
                matches!(error, TokenError::UsageShrank { .. })
            })
        }
        (10, None) => {
            let client = ClientId::new(u32::MAX, 0);
            (now, TokenEvent::ClientJoined { client, gpu, share: sound }, |error| {
                matches!(error, TokenError::TooManyClients { .. })
            })
        }
        (11, None) => {
            let gpu = GpuId::new(u32::MAX);
            (now, TokenEvent::ClientJoined { client: nobody, gpu, share: sound }, |error| {
                matches!(error, TokenError::UnknownGpu { .. })
            })
        }
        _ => return Ok(()),
    };
    let (at, event, fits) = expected;
    let error = driver.must_refuse(at, event)?;
    if fits(&error) {
        Ok(())
    } else {
        Err(driver.wrong(format!("{event:?} was refused with the wrong error: {error}")))
    }
}

const fn is_unknown(error: &TokenError) -> bool {
    matches!(error, TokenError::UnknownClient { .. })
}
