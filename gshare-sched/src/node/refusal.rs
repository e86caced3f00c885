//! The reasons of a node for refusing a process or one of its requests.

use super::DeviceUuid;
use gshare_core::wire::RefusalCode;
use gshare_core::{Bytes, Quota, QuotaRange, SpecError};

/// A refusal, with its figures. The text names the field and the bound, and fits into a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A second Hello.
    #[error("Hello was said already")]
    SecondHello,
    /// A message too early, before another message it needs, or too late.
    #[error("{0}")]
    OutOfTurn(&'static str),
    /// A name with characters that could forge the output of a terminal or a log.
    #[error("name `{name}` has characters that cannot be printed")]
    UnprintableName {
        /// The name, with escapes.
        name: String,
    },
    /// Another run has the name as long as any of its processes lives.
    #[error("name `{name}` is in use by another run (pid {pid}); choose another")]
    NameInUse {
        /// The name.
        name: String,
        /// The pid of one process of the other run.
        pid: i32,
    },
    /// The configuration reserves the name for another user.
    #[error("name `{name}` belongs to user {owner}, not {uid}")]
    NameOfAnother {
        /// The name.
        name: String,
        /// The owner of the name.
        owner: u32,
        /// The user of the refused process.
        uid: u32,
    },
    /// The name is not listed, and the configuration lets only listed names in.
    #[error("client `{name}` is not in the configuration (allow_unlisted = false)")]
    Unlisted {
        /// The name.
        name: String,
    },
    /// A device missing from the configuration.
    #[error("this daemon does not manage {0}")]
    UnknownDevice(DeviceUuid),
    /// A second client of one process on one device.
    #[error("{0} is attached already")]
    AttachedAlready(DeviceUuid),
    /// A spec too large for the device.
    #[error("{0}")]
    BadSpec(SpecError),
    /// A process with more allocated memory, by its own statement, than the device has.
    #[error("{allocated} allocated is more than the device has: {device}")]
    MoreThanTheDevice {
        /// Bytes of the process, by its own statement.
        allocated: Bytes,
        /// The device's memory.
        device: Bytes,
    },
    /// More processes than basis points in their share.
    #[error("{quota} divided by {processes} processes is less than 0.01%")]
    TooManyProcesses {
        /// The share of the instance.
        quota: QuotaRange,
        /// The processes of the instance on the device.
        processes: usize,
    },
    /// A request for time too large beside the requests of others. See [admission](super#admission).
    #[error(
        "request {request} does not fit: {taken} taken, {reserved} reserved for listed names, bound 100% (or ask for 0:LIMIT)"
    )]
    Overcommitted {
        /// The request.
        request: Quota,
        /// The sum of the requests of present clients.
        taken: Percent,
        /// The sum of the requests of absent listed names.
        reserved: Percent,
    },
    /// The device cannot guarantee so much memory.
    #[error(
        "guaranteed memory {asked} does not fit: {taken} of {most} are guaranteed or cannot move (or ask for less:MOST)"
    )]
    MemoryTaken {
        /// The guaranteed memory.
        asked: Bytes,
        /// The memory that is guaranteed to others or cannot move.
        taken: Bytes,
        /// The memory of the device, less its headroom.
        most: Bytes,
    },
    /// The configured number of clients or of instances is reached.
    #[error("{limit} {what} are served already (max_clients)")]
    Full {
        /// The limited things, in the plural.
        what: &'static str,
        /// The bound.
        limit: u32,
    },
    /// A device known from its client only, for a user with many such devices already.
    #[error(
        "user {uid} has brought {own} devices, and {taken} of {most} are in use: the rest is for others ([[device]])"
    )]
    TooManyDevices {
        /// The user.
        uid: u32,
        /// Devices of the user's processes unknown to both the configuration and the driver.
        own: usize,
        /// Devices in use, of all users.
        taken: usize,
        /// The bound on devices in use, which follows from `max_clients`.
        most: u32,
    },
    /// The token scheduler refuses the client.
    #[error("the token engine takes no more clients or devices")]
    Scheduler,
}

impl Refusal {
    /// The code of the frame.
    pub const fn code(&self) -> RefusalCode {
        match self {
            Self::SecondHello | Self::OutOfTurn(_) | Self::AttachedAlready(_) => RefusalCode::Protocol,
            Self::NameInUse { .. } => RefusalCode::DuplicateName,
            Self::NameOfAnother { .. } | Self::Unlisted { .. } => RefusalCode::NotAllowed,
            Self::UnknownDevice(_) => RefusalCode::UnknownDevice,
            Self::UnprintableName { .. }
            | Self::BadSpec(_)
            | Self::MoreThanTheDevice { .. }
            | Self::TooManyProcesses { .. }
            | Self::Overcommitted { .. }
            | Self::MemoryTaken { .. } => RefusalCode::BadSpec,
            Self::Full { .. } | Self::TooManyDevices { .. } | Self::Scheduler => RefusalCode::Full,
        }
    }

    /// The end of the refusal, as a text for people.
    pub const fn until(&self) -> &'static str {
        match self {
            Self::NameInUse { .. } => "until the last process of that run is gone",
            Self::NameOfAnother { .. } | Self::Unlisted { .. } | Self::UnknownDevice(_) => {
                "until the configuration says otherwise"
            }
            Self::TooManyProcesses { .. } => "until fewer processes of the instance are there",
            Self::Overcommitted { .. } => "until requests of others leave, or the request is smaller",
            Self::Full { .. } | Self::TooManyDevices { .. } | Self::Scheduler | Self::MemoryTaken { .. } => {
                "until a client leaves"
            }
            _ => "for good: the process has to ask for something else",
        }
    }
}

/// A sum of shares in basis points, which may exceed the whole. The text form is in per cent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(pub u32);

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 % 100 {
            0 => write!(f, "{}%", self.0 / 100),
            rest => write!(f, "{}.{rest:02}%", self.0 / 100),
        }
    }
}
