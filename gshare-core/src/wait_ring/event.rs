//! The events that are traced, and how each is encoded as a kind and four words.

use crate::units::Quota;
use crate::wire::RefusalCode;

/// The categories that a trace is asked for by: the words of `GSHARE_TRACE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Launches that waited.
    Gate,
    /// Memory that was charged, given back or denied.
    Memory,
    /// The daemon: connections, refusals, tokens.
    Link,
}

impl Category {
    /// All, with their words.
    pub const ALL: [(&str, Self); 3] = [("gate", Self::Gate), ("memory", Self::Memory), ("link", Self::Link)];

    /// Its bit in a set of categories.
    pub const fn bit(self) -> u64 {
        1 << self as u32
    }
}

/// Which ring an event goes into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// For what happens up to thousands of times a second.
    Often,
    /// For what must still be there an hour later.
    Seldom,
}

/// A field of an event as a word.
trait Word: Sized {
    fn put(self) -> u64;
    fn take(word: u64) -> Option<Self>;
}

impl Word for u64 {
    fn put(self) -> u64 {
        self
    }
    fn take(word: u64) -> Option<Self> {
        Some(word)
    }
}

impl Word for bool {
    fn put(self) -> u64 {
        self.into()
    }
    fn take(word: u64) -> Option<Self> {
        (word < 2).then_some(word == 1)
    }
}

impl Word for Quota {
    fn put(self) -> u64 {
        self.get().into()
    }
    fn take(word: u64) -> Option<Self> {
        u16::try_from(word).ok().and_then(Self::new)
    }
}

/// Enumerations without fields, as the number of their place.
macro_rules! listed {
    ($($ty:ty: [$($value:expr),* $(,)?];)*) => {$(
        impl Word for $ty {
            fn put(self) -> u64 {
                let all = [$($value),*];
                all.iter().position(|value| *value == self).map_or(u64::MAX, |place| place as u64)
            }
            fn take(word: u64) -> Option<Self> {
                [$($value),*].get(usize::try_from(word).ok()?).copied()
            }
        }
    )*};
}
listed! {
    End: [End::Launched, End::Failed, End::NotMetered];
    Denial: [Denial::OverLimit, Denial::NoAnswer];
    FromDaemon: [FromDaemon::Taken, FromDaemon::Alone, FromDaemon::NoAnswer];
    RefusalCode: [
        RefusalCode::DuplicateName,
        RefusalCode::NotAllowed,
        RefusalCode::Full,
        RefusalCode::BadSpec,
        RefusalCode::UnknownDevice,
        RefusalCode::Protocol,
    ];
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum End {
    /// The launch was made.
    Launched,
    /// The launch failed: no daemon, and the policy is to launch nothing.
    Failed,
    /// Launches are not metered any more.
    NotMetered,
}

/// Why memory was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum Denial {
    /// The limit leaves less, as the daemon (without one, the process itself) counts.
    OverLimit,
    /// The daemon did not answer in time.
    NoAnswer,
}

/// The daemon's answer about a device, or its absence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum FromDaemon {
    /// The daemon shares it out.
    Taken,
    /// The process keeps to its limits by itself.
    Alone,
    /// There was no answer in time.
    NoAnswer,
}

macro_rules! whys {
    ($($(#[$doc:meta])* $kind:literal $name:ident { $([$limit:ident])? $($ns:ident $ns_doc:literal)? })*) => {
        /// The reason for which a launch waits.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "reason", rename_all = "snake_case"))]
        #[non_exhaustive]
        pub enum Why {
            $($(#[$doc])* $name {
                $(
                    /// The most of the device's time that the process may have.
                    $limit: Quota,
                )?
                $(#[doc = $ns_doc] $ns: u64,)?
            },)*
        }

        impl Why {
            /// One word: kind (8 bits), limit (16 bits), time (40 bits, at most some 18 minutes).
            pub fn pack(self) -> u64 {
                match self {
                    $(Self::$name { $($limit,)? $($ns,)? } => {
                        $kind << 56 $(| u64::from($limit.get()) << 40)? $(| $ns.min(LONGEST))?
                    })*
                }
            }

            /// The reason that [`pack`](Self::pack) encoded in this word; `None` for any other word.
            pub fn unpack(word: u64) -> Option<Self> {
                let why = match word >> 56 {
                    $($kind => Self::$name {
                        $($limit: Quota::new((word >> 40 & 0xFFFF) as u16)?,)?
                        $($ns: word & LONGEST)?
                    },)*
                    _ => return None,
                };
                (why.pack() == word).then_some(why)
            }
        }
    };
}

const LONGEST: u64 = (1 << 40) - 1;

#[allow(clippy::cast_possible_truncation)] // 16 bits of a word
mod why {
    use super::{LONGEST, Quota};
    whys! {
        /// Credit was short for a moment: the helper thread had not let in yet what was there.
        0 Credit {}
        /// The daemon was asked for a token, and others have theirs.
        1 Token { asked_ns "How long ago it was asked." }
        /// The limit of the share is used up; the daemon gives the next token later.
        2 Throttled { [limit] left_ns "How long until then." }
        /// As much as may be queued on the device is queued.
        3 InFlight { bound_ns "How much that is, in predicted GPU time." }
        /// The token is given back when the device has done what is queued.
        4 Draining { queued_ns "How long that takes, as predicted." }
        /// The daemon has not said yet what becomes of this device.
        5 Attaching {}
        /// No daemon, and the policy is to launch nothing: launches fail later.
        6 Closed { left_ns "How long until then." }
        /// No daemon; the process keeps its limit by its own clock, and has used it up.
        7 LocalWindow { [limit] left_ns "How long until its next window." }
        /// No daemon, and nothing is decided yet.
        8 NoDaemon { retry_ns "How long until the next attempt to connect." }
        /// The cost of this function is being measured with the launch before.
        9 Measuring {}
        /// The daemon refuses the process or the device: launches fail later.
        10 Refused { left_ns "How long until then." }
    }
}
pub use why::Why;

impl Word for Why {
    fn put(self) -> u64 {
        self.pack()
    }
    fn take(word: u64) -> Option<Self> {
        Self::unpack(word)
    }
}

macro_rules! events {
    ($($(#[$doc:meta])* $kind:literal $lane:ident $category:ident $name:ident {
        $($(#[$field_doc:meta])* $field:ident: $ty:ty),* $(,)?
    })*) => {
        /// The event itself.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "event", rename_all = "snake_case"))]
        #[non_exhaustive]
        pub enum Event {
            $($(#[$doc])* $name { $($(#[$field_doc])* $field: $ty,)* },)*
        }

        impl Event {
            /// Kind and fields; fields that an event does not have are 0.
            pub(super) fn encode(self) -> (u8, [u64; 4]) {
                let mut fields = [0; 4];
                let kind = match self {
                    $(Self::$name { $($field,)* } => {
                        let values: &[u64] = &[$(Word::put($field)),*];
                        fields[..values.len()].copy_from_slice(values);
                        $kind
                    })*
                };
                (kind, fields)
            }

            /// `None` where no event is written like this.
            pub(super) fn decode(kind: u8, fields: [u64; 4]) -> Option<Self> {
                let mut rest = fields.into_iter();
                let event = match kind {
                    $($kind => Self::$name { $($field: Word::take(rest.next()?)?,)* },)*
                    _ => return None,
                };
                rest.all(|word| word == 0).then_some(event)
            }

            /// The ring that it goes into.
            pub const fn lane(&self) -> Lane {
                match self { $(Self::$name { .. } => Lane::$lane,)* }
            }

            /// The category that must be traced for the event to be written. Denials are written in any case.
            pub const fn category(&self) -> Category {
                match self { $(Self::$name { .. } => Category::$category,)* }
            }
        }
    };
}

events! {
    /// A launch has been waiting for a while, or waits for something else from now on.
    1 Often Gate Waiting {
        /// For what.
        why: Why,
        /// How long so far.
        waited_ns: u64,
    }
    /// A launch has waited.
    2 Often Gate Waited {
        /// For what, last.
        why: Why,
        /// How long.
        waited_ns: u64,
        /// Its predicted cost.
        cost_ns: u64,
        /// How that ended.
        end: End,
    }
    /// Memory was charged.
    3 Often Memory Charged {
        /// How much.
        bytes: u64,
        /// In use with it.
        used: u64,
        /// The limit; `u64::MAX` for none.
        limit: u64,
    }
    /// Memory was given back.
    4 Often Memory Released {
        /// How much.
        bytes: u64,
        /// In use without it.
        used: u64,
        /// The limit; `u64::MAX` for none.
        limit: u64,
    }
    /// An allocation was refused.
    5 Seldom Memory Denied {
        /// How much was asked for.
        bytes: u64,
        /// In use by this process.
        used: u64,
        /// The limit, which processes of one run share; `u64::MAX` for none.
        limit: u64,
        /// Why it was refused.
        denial: Denial,
    }
    /// The first use of a device has waited for the daemon's word.
    6 Seldom Gate DeviceAsked {
        /// How long.
        waited_ns: u64,
        /// The answer.
        answer: FromDaemon,
    }
    /// A connection was made, and the process has said who it is.
    7 Seldom Link Connected {}
    /// No daemon listens.
    8 Seldom Link NotConnected {
        /// The system's error number; 0 where it has none.
        errno: u64,
        /// How long until the next attempt.
        retry_ns: u64,
    }
    /// The daemon has let the process in.
    9 Seldom Link Welcome {
        /// Number of this run of the daemon.
        epoch: u64,
    }
    /// The connection is gone.
    10 Seldom Link Lost {
        /// Whether the daemon had let the process in.
        welcomed: bool,
        /// How long until the next attempt.
        retry_ns: u64,
    }
    /// The daemon has refused the process, or one device of it.
    11 Seldom Link Refused {
        /// Why it was refused.
        code: RefusalCode,
    }
    /// The daemon shares a device out to this process.
    12 Seldom Link Attached {
        /// Guaranteed share of its time.
        request: Quota,
        /// The most of its time.
        limit: Quota,
        /// Memory limit; `u64::MAX` for none.
        memory: u64,
        /// Time over which shares are settled.
        window_ns: u64,
    }
    /// The share is another one from now on.
    13 Seldom Link ShareChanged {
        /// Guaranteed share of the device's time.
        request: Quota,
        /// The most of its time.
        limit: Quota,
        /// Memory limit; `u64::MAX` for none.
        memory: u64,
    }
    /// A token was asked for.
    14 Often Link TokenRequested {}
    /// A token came, or the one that is held was extended.
    15 Often Link Granted {
        /// Its number.
        lease: u64,
        /// GPU time in all.
        budget_ns: u64,
        /// When it ends, ns of `CLOCK_MONOTONIC`.
        expires_ns: u64,
    }
    /// A token was given back.
    16 Often Link Returned {
        /// Its number.
        lease: u64,
        /// GPU time used.
        used_ns: u64,
        /// Whether another was asked for with it.
        again: bool,
    }
    /// The daemon has taken a token back.
    17 Often Link Revoked {
        /// Its number.
        lease: u64,
    }
    /// The daemon gives no token for a while: the limit is reached.
    18 Often Link Throttled {
        /// Until when, ns of `CLOCK_MONOTONIC`.
        until_ns: u64,
    }
    /// The process is not metered any more.
    19 Seldom Link StoodAside {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every word is either refused or one that a reason is packed to.
        #[test]
        fn reasons_are_read_as_they_are_written(kind in 0u64..12, limit in 0u64..=10_001, ns in 0u64..=LONGEST) {
            let word = kind << 56 | limit << 40 | ns;
            for word in [word, kind << 56 | ns, kind << 56] {
                if let Some(why) = Why::unpack(word) {
                    prop_assert_eq!(why.pack(), word);
                }
            }
        }

        #[test]
        fn events_are_read_as_they_are_written(kind in 0u8..24, fields in any::<[u64; 4]>(), small in any::<[bool; 4]>()) {
            let fields: [u64; 4] = std::array::from_fn(|i| if small[i] { fields[i] % 3 } else { fields[i] });
            if let Some(event) = Event::decode(kind, fields) {
                prop_assert_eq!(event.encode(), (kind, fields));
            }
        }
    }

    #[test]
    fn times_too_long_for_a_reason_are_cut() {
        let why = Why::Throttled { limit: Quota::WHOLE, left_ns: u64::MAX };
        assert_eq!(Why::unpack(why.pack()), Some(Why::Throttled { limit: Quota::WHOLE, left_ns: LONGEST }));
        assert_eq!(Why::unpack(Why::Credit {}.pack()), Some(Why::Credit {}));
        assert_eq!(Why::unpack(1), None, "a time where there is none");
    }
}
