//! Why a node refuses a process, or what it asked for.

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
    /// A message that comes before another one that it needs, or after.
    #[error("{0}")]
    OutOfTurn(&'static str),
    /// A name that could forge what a terminal or a log shows.
    #[error("name `{name}` has characters that cannot be printed")]
    UnprintableName {
        /// The name, with escapes.
        name: String,
    },
    /// Another run has the name, while any of its processes lives.
    #[error("name `{name}` is in use by another run (pid {pid}); choose another")]
    NameInUse {
        /// The name.
        name: String,
        /// One of its processes.
        pid: i32,
    },
    /// The configuration reserves the name for another user.
    #[error("name `{name}` belongs to user {owner}, not {uid}")]
    NameOfAnother {
        /// The name.
        name: String,
        /// Its user.
        owner: u32,
        /// The user who asked.
        uid: u32,
    },
    /// The name is not listed, and the configuration lets only listed ones in.
    #[error("client `{name}` is not in the configuration (allow_unlisted = false)")]
    Unlisted {
        /// The name.
        name: String,
    },
    /// A device that is not in the configuration.
    #[error("this daemon does not manage {0}")]
    UnknownDevice(DeviceUuid),
    /// A second client of one process on one device.
    #[error("{0} is attached already")]
    AttachedAlready(DeviceUuid),
    /// A spec that the device cannot hold.
    #[error("{0}")]
    BadSpec(SpecError),
    /// A process that says that it holds more memory than there is.
    #[error("{allocated} allocated is more than the device has: {device}")]
    MoreThanTheDevice {
        /// Bytes that the process says it holds.
        allocated: Bytes,
        /// The device's memory.
        device: Bytes,
    },
    /// More processes than their share has basis points.
    #[error("{quota} divided by {processes} processes is less than 0.01%")]
    TooManyProcesses {
        /// The share of the instance.
        quota: QuotaRange,
        /// Its processes on the device.
        processes: usize,
    },
    /// A request for time that cannot be met beside those of others. See [admission](super#admission).
    #[error(
        "request {request} does not fit: {taken} taken, {reserved} reserved for listed names, bound 100% (or ask for 0:LIMIT)"
    )]
    Overcommitted {
        /// The request.
        request: Quota,
        /// Sum of the requests of clients that are there.
        taken: Percent,
        /// Sum of the requests of listed names that are not there.
        reserved: Percent,
    },
    /// As many clients as configured.
    #[error("{limit} {what} are served already (max_clients)")]
    Full {
        /// The things that are limited, in the plural.
        what: &'static str,
        /// The bound.
        limit: u32,
    },
    /// A device that only the client names, from a user who has brought many.
    #[error(
        "user {uid} has brought {own} devices, and {taken} of {most} are in use: the rest is for others ([[device]])"
    )]
    TooManyDevices {
        /// The user.
        uid: u32,
        /// Devices of the user's processes that neither the configuration nor the driver knows.
        own: usize,
        /// Devices in use, of all users.
        taken: usize,
        /// The bound, which follows from `max_clients`.
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
            | Self::Overcommitted { .. } => RefusalCode::BadSpec,
            Self::Full { .. } | Self::TooManyDevices { .. } | Self::Scheduler => RefusalCode::Full,
        }
    }

    /// Until when the refusal stands, for people.
    pub const fn until(&self) -> &'static str {
        match self {
            Self::NameInUse { .. } => "until the last process of that run is gone",
            Self::NameOfAnother { .. } | Self::Unlisted { .. } | Self::UnknownDevice(_) => {
                "until the configuration says otherwise"
            }
            Self::TooManyProcesses { .. } => "until fewer processes of the instance are there",
            Self::Overcommitted { .. } => "until requests of others leave, or the request is smaller",
            Self::Full { .. } | Self::TooManyDevices { .. } | Self::Scheduler => "until a client leaves",
            _ => "for good: the process has to ask for something else",
        }
    }
}

/// A sum of shares in basis points, which may be more than the whole; printed in per cent.
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
