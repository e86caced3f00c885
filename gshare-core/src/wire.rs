//! Wire format between a hooked process and its node daemon.
//!
//! # Problem
//! The hook lives inside other people's programs for months; the daemon is upgraded under it. Neither may trust the
//! other's bytes. So a frame is small, versioned, bounded and fully checked before any of it is believed.
//!
//! # Terms
//! One **frame** is one packet of a `SOCK_SEQPACKET` socket, at most [`MAX_FRAME`] bytes, little-endian:
//!
//! ```text
//!  0        1        2                4                                8
//! +--------+--------+----------------+--------------------------------+----------- - -
//! |version | kind   | length (whole) | sequence (from 0, one by one)  | payload
//! +--------+--------+----------------+--------------------------------+----------- - -
//! ```
//!
//! Each direction of a connection numbers its frames from 0 without a gap ([`Sequence`]); a frame that is replayed,
//! dropped or reordered is seen at once. Texts are a length byte and UTF-8 of at most [`MAX_TEXT`] bytes. Times are
//! `CLOCK_MONOTONIC` nanoseconds, the same for all processes of one node.
//!
//! # Conversation
//! ```text
//! hook                                    daemon
//!  Hello{name, spec, ...}            ──▶
//!                                    ◀──  Welcome{epoch}              or Refused or Unserved, and close
//!                                    ◀──  Class{class}                where the daemon's configuration has one
//!  Attach{ordinal, device, memory}   ──▶                             once per GPU, at its first context
//!                                    ◀──  Attached{client, spec, window}   or Refused, Unserved{UnknownDevice, BadSpec}: this GPU only
//!  Use{client, turn, used, Wants}    ──▶
//!                                    ◀──  Allow{client, turn, allowed, until}
//!  Use{client, turn, used, ...}      ──▶                             reports, extensions, the end of the turn
//!  Iteration                         ──▶                             after a Class
//!  MemoryReserve{client, bytes}      ──▶
//!                                    ◀──  MemoryGrant or MemoryDeny
//!                                    ◀──  MemoryPart{client, bytes}   after Attached, and when it changes
//!                                    ◀──  MemoryAsk{client, round}    before a denial, or for the view of a sibling
//!  MemoryUsed{client, round, used}   ──▶                             after a MemoryRelease, if slack was called back
//!  MemoryQuery{client}               ──▶
//!                                    ◀──  MemoryMember{client, pid, used} for each sibling, then MemoryView{client}
//!  Waiting{client, reason}           ──▶                             a launch waits for 10 ms and more
//! ```
//! Attaches are answered in their order. After a reconnect the hook says Hello and Attach again, and `Attach` re-states its totals:
//! the memory that it has allocated, the GPU time that it has used, and the time up to which the last daemon allowed it.
//!
//! # Time
//! `used` and `allowed` are totals since the process found the device, so a frame that is late or doubled is harmless. A **turn** is
//! the time from an `Allow` to the moment at which the client gives its token back, or the daemon takes it back by an `Allow` whose
//! `until` has passed. Both count the turns that are over. An `Allow` of a turn that is over is void: it has crossed the end of the
//! turn on its way. Of a `Use` of such a turn only the total counts.
//!
//! # Invariants
//! - `decode(encode(frame)) == frame`; every other byte string is an error, never a panic.
//! - The bytes of each kind are pinned by golden tests: a change of meaning is a new [`VERSION`].
//!
//! # Cost
//! Encoding and decoding are a few dozen nanoseconds and allocate only for texts.

use crate::ids::{ClientId, DeviceUuid, GpuId, RunId};
pub use crate::reason::RefusalCode;
use crate::reason::{Fault, Reason, Wait};
use crate::resource::{QuotaRange, ResourceSpec};
use crate::service_class::ServiceClass;
use crate::token::{ThrottleReason, UseState};
use crate::units::{BasisPoints, Bytes, Duration, Quota, SmShare, Timestamp};

/// Version of the format; the first byte of every frame.
pub const VERSION: u8 = 4;
/// Length of the header in bytes.
pub const HEADER: usize = 8;
/// The longest frame in bytes, header included.
pub const MAX_FRAME: usize = 512;
/// The longest text in bytes.
pub const MAX_TEXT: usize = 120;

/// Why bytes are not a frame. The daemon counts drops by [`WireError::reason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Fewer bytes than a header, or than the header says.
    #[error("truncated: {have} bytes of {need}")]
    Truncated {
        /// Bytes received.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// More bytes than the header says, or than any frame has.
    #[error("oversized: {have} bytes, at most {limit}")]
    Oversized {
        /// Bytes received.
        have: usize,
        /// The most there may be.
        limit: usize,
    },
    /// A version that is not spoken here.
    #[error("version {version} is not spoken here (this is {VERSION})")]
    Version {
        /// The version byte.
        version: u8,
    },
    /// A kind that does not exist in this direction.
    #[error("unknown kind {kind}")]
    Kind {
        /// The kind byte.
        kind: u8,
    },
    /// A sequence number that was not due.
    #[error("sequence {got} where {expected} was due")]
    Sequence {
        /// The number received.
        got: u32,
        /// The number due.
        expected: u32,
    },
    /// A field with an impossible value.
    #[error("field {field} has an impossible value")]
    Field {
        /// The field.
        field: &'static str,
    },
}

impl WireError {
    /// The reason for which a connection with such bytes ends.
    pub const fn reason(&self) -> Reason {
        Reason::Fault(match self {
            Self::Truncated { .. } => Fault::Truncated,
            Self::Oversized { .. } => Fault::Oversized,
            Self::Version { .. } => Fault::Version,
            Self::Kind { .. } => Fault::Kind,
            Self::Sequence { .. } => Fault::Sequence,
            Self::Field { .. } => Fault::Field,
        })
    }
}

/// The behaviour of a client whose daemon is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum OnDaemonLoss {
    /// Keep the last share by the local clock: a restart of the daemon must not stop the work of a node.
    #[default]
    Open,
    /// Launch nothing; after a bounded wait launches fail with a CUDA error.
    Closed,
}

/// How long a process waits for a daemon that is gone, says nothing, or may take back a refusal: 200 ms to 600 s, 5 s by default.
///
/// Under [`OnDaemonLoss::Closed`] launches fail then, and with either policy allocations for which a daemon has to be asked. A daemon
/// that keeps a thread waiting is probed after three fifths of it, and has one fifth to greet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DaemonWait(Duration);

impl DaemonWait {
    /// The shortest one: less is within the pauses of a daemon on a busy host.
    pub const SHORTEST: Duration = Duration::from_millis(200);
    /// The longest one.
    pub const LONGEST: Duration = Duration::from_secs(600);

    /// A wait of this length; `None` below [`SHORTEST`](Self::SHORTEST) and above [`LONGEST`](Self::LONGEST).
    pub fn new(length: Duration) -> Option<Self> {
        (Self::SHORTEST..=Self::LONGEST).contains(&length).then_some(Self(length))
    }

    /// The length of the wait.
    pub const fn get(self) -> Duration {
        self.0
    }

    /// How long a daemon may say nothing while a thread waits for it before it is probed, in ns.
    pub const fn silence_ns(self) -> u64 {
        self.0.as_nanos() / 5 * 3
    }

    /// How long a daemon may take to greet, in ns.
    pub const fn greeting_ns(self) -> u64 {
        self.0.as_nanos() / 5
    }
}

impl Default for DaemonWait {
    fn default() -> Self {
        Self(Duration::from_secs(5))
    }
}

impl core::fmt::Display for DaemonWait {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl core::str::FromStr for DaemonWait {
    type Err = ParseDaemonWaitError;
    fn from_str(text: &str) -> Result<Self, ParseDaemonWaitError> {
        Self::new(text.parse()?).ok_or(ParseDaemonWaitError::OutOfBounds)
    }
}

/// A text that is no [`DaemonWait`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseDaemonWaitError {
    /// The text is no length of time.
    #[error(transparent)]
    Malformed(#[from] crate::ParseUnitError),
    /// The length is below [`DaemonWait::SHORTEST`] or above [`DaemonWait::LONGEST`].
    #[error("need {} to {}", DaemonWait::SHORTEST, DaemonWait::LONGEST)]
    OutOfBounds,
}

/// A value of the wire: how it is written and read back.
trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError>;
}

fn take_bytes<'a>(input: &mut &'a [u8], n: usize) -> Result<&'a [u8], WireError> {
    match input.split_at_checked(n) {
        Some((head, tail)) => {
            *input = tail;
            Ok(head)
        }
        None => Err(WireError::Truncated { have: input.len(), need: n }),
    }
}

macro_rules! integer_fields {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
                let bytes = take_bytes(input, size_of::<$ty>())?;
                bytes.try_into().map(Self::from_le_bytes).map_err(|_| WireError::Field { field })
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64, u128);

/// Fields that are a wrapped integer: how to unwrap, and how to wrap again if the value is possible.
macro_rules! wrapped_fields {
    ($($ty:ty as $raw:ty: |$value:ident| $get:expr, |$bits:ident| $make:expr;)*) => {$(
        impl Field for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                let $value = *self;
                let raw: $raw = $get;
                raw.put(out);
            }
            fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
                let $bits = <$raw>::take(input, field)?;
                let value: Option<$ty> = $make;
                value.ok_or(WireError::Field { field })
            }
        }
    )*};
}
wrapped_fields! {
    ClientId as u64: |id| id.into(), |raw| Some(ClientId::from(raw));
    GpuId as u32: |id| id.number(), |raw| Some(GpuId::new(raw));
    RunId as u128: |id| id.bits(), |raw| Some(RunId::new(raw));
    Duration as u64: |time| time.as_nanos(), |raw| Some(Duration::from_nanos(raw));
    Timestamp as u64: |time| time.as_nanos(), |raw| Some(Timestamp::from_nanos(raw));
    Bytes as u64: |bytes| bytes.0, |raw| Some(Bytes(raw));
    Quota as u16: |share| share.get(), |raw| Quota::new(raw);
    SmShare as u16: |share| share.get(), |raw| SmShare::new(raw);
    ServiceClass as u16: |class| match class {
        ServiceClass::SloSensitive { tolerance } => tolerance.get(),
        ServiceClass::BestEffort => 0,
    }, |raw| match BasisPoints::new(raw) {
        Some(BasisPoints::ZERO) => Some(ServiceClass::BestEffort),
        Some(tolerance) => Some(ServiceClass::SloSensitive { tolerance }),
        None => None,
    };
    OnDaemonLoss as u8: |policy| match policy {
        OnDaemonLoss::Open => 0,
        OnDaemonLoss::Closed => 1,
    }, |raw| match raw {
        0 => Some(OnDaemonLoss::Open),
        1 => Some(OnDaemonLoss::Closed),
        _ => None,
    };
    UseState as u8: |state| match state {
        UseState::Idle => 0,
        UseState::Wants => 1,
        UseState::Holds => 2,
        UseState::Extends => 3,
    }, |raw| match raw {
        0 => Some(UseState::Idle),
        1 => Some(UseState::Wants),
        2 => Some(UseState::Holds),
        3 => Some(UseState::Extends),
        _ => None,
    };
    ThrottleReason as u8: |reason| match reason {
        ThrottleReason::LimitReached => 0,
    }, |raw| match raw {
        0 => Some(ThrottleReason::LimitReached),
        _ => None,
    };
    RefusalCode as u8: |code| code.code(), |raw| RefusalCode::from_code(raw);
    Wait as u8: |wait| wait.code(), |raw| Wait::from_code(raw);
}

/// Its bytes, then 1 for a MIG instance, else 0.
impl Field for DeviceUuid {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes());
        out.push(self.is_mig().into());
    }
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        let bytes = take_bytes(input, 16)?.try_into().map_err(|_| WireError::Field { field })?;
        match u8::take(input, field)? {
            0 => Ok(Self::gpu(bytes)),
            1 => Ok(Self::mig(bytes)),
            _ => Err(WireError::Field { field }),
        }
    }
}

/// Longer texts are cut at a character boundary when written: a name is for people, not a key to trust.
impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        let end = (0..=MAX_TEXT.min(self.len())).rev().find(|at| self.is_char_boundary(*at)).unwrap_or(0);
        let text = &self[..end];
        out.push(u8::try_from(text.len()).unwrap_or(0));
        out.extend_from_slice(text.as_bytes());
    }
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        let length = usize::from(u8::take(input, field)?);
        if length > MAX_TEXT {
            return Err(WireError::Field { field });
        }
        let bytes = take_bytes(input, length)?;
        core::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::Field { field })
    }
}

impl Field for ResourceSpec {
    fn put(&self, out: &mut Vec<u8>) {
        self.quota().request().put(out);
        self.quota().limit().put(out);
        self.sm().put(out);
        self.memory().unwrap_or(Bytes(u64::MAX)).put(out);
    }
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        let bad = |_| WireError::Field { field };
        let quota = QuotaRange::new(Quota::take(input, field)?, Quota::take(input, field)?).map_err(bad)?;
        let sm = SmShare::take(input, field)?;
        let memory = Some(Bytes::take(input, field)?).filter(|bytes| bytes.0 != u64::MAX);
        Self::new(quota, sm, memory).map_err(bad)
    }
}

/// A value that may be left out: a byte that says so, then the value.
impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            None => out.push(0),
            Some(value) => {
                out.push(1);
                value.put(out);
            }
        }
    }
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        match u8::take(input, field)? {
            0 => Ok(None),
            1 => T::take(input, field).map(Some),
            _ => Err(WireError::Field { field }),
        }
    }
}

/// Declares the messages of one direction with their kinds, and the coder between them and frames.
macro_rules! messages {
    (
        $(#[$enum_doc:meta])* $name:ident;
        $($(#[$doc:meta])* $kind:literal $variant:ident {
            $($(#[$field_doc:meta])* $field:ident: $ty:ty),* $(,)?
        })*
    ) => {
        $(#[$enum_doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant { $($(#[$field_doc])* $field: $ty),* },)*
        }

        impl $name {
            /// Appends the frame with this sequence number to `out`.
            pub fn encode(&self, sequence: u32, out: &mut Vec<u8>) {
                let start = out.len();
                let kind: u8 = match self { $(Self::$variant { .. } => $kind,)* };
                out.extend_from_slice(&[VERSION, kind, 0, 0]);
                sequence.put(out);
                match self {
                    $(Self::$variant { $($field),* } => { $($field.put(out);)* })*
                }
                // No kind reaches MAX_FRAME, let alone 64 KiB: texts are cut at MAX_TEXT.
                let length = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
                out[start + 2..start + 4].copy_from_slice(&length.to_le_bytes());
            }

            /// Reads one frame that fills `bytes` exactly; gives its sequence number and its message.
            pub fn decode(bytes: &[u8]) -> Result<(u32, Self), WireError> {
                let (kind, sequence, mut payload) = open(bytes)?;
                let input = &mut payload;
                let message = match kind {
                    $($kind => Self::$variant { $($field: Field::take(input, stringify!($field))?),* },)*
                    _ => return Err(WireError::Kind { kind }),
                };
                if !payload.is_empty() {
                    return Err(WireError::Oversized { have: bytes.len(), limit: bytes.len() - payload.len() });
                }
                Ok((sequence, message))
            }

            /// Name of the message, for logs and counters.
            pub const fn label(&self) -> &'static str {
                match self { $(Self::$variant { .. } => stringify!($variant),)* }
            }
        }
    };
}

/// Checks the header and gives kind, sequence and payload.
fn open(bytes: &[u8]) -> Result<(u8, u32, &[u8]), WireError> {
    if bytes.len() > MAX_FRAME {
        return Err(WireError::Oversized { have: bytes.len(), limit: MAX_FRAME });
    }
    let mut input = bytes;
    // The version comes first and alone: a frame of another version may have another header.
    let version = u8::take(&mut input, "version")?;
    if version != VERSION {
        return Err(WireError::Version { version });
    }
    if bytes.len() < HEADER {
        return Err(WireError::Truncated { have: bytes.len(), need: HEADER });
    }
    let kind = u8::take(&mut input, "kind")?;
    let length = usize::from(u16::take(&mut input, "length")?);
    let sequence = u32::take(&mut input, "sequence")?;
    if length > bytes.len() {
        return Err(WireError::Truncated { have: bytes.len(), need: length });
    }
    if length < bytes.len() {
        return Err(WireError::Oversized { have: bytes.len(), limit: length });
    }
    Ok((kind, sequence, input))
}

messages! {
    /// Frames from a hooked process to its daemon.
    ToDaemon;

    /// First frame of a connection: who is calling. The daemon takes pid and uid from the socket, not from here.
    1 Hello {
        /// Start time of the process in clock ticks since boot (`/proc/self/stat`, field 22), against reused pids.
        pid_start: u64,
        /// Its number of itself, in its own PID namespace: what its siblings list it as.
        pid: u32,
        /// One number for all processes of one `gshare run`, which share one name and one share; drawn by the process that
        /// started them, or by the process itself.
        run: RunId,
        /// Name of the instance.
        name: String,
        /// The program, for people (`comm`).
        program: String,
        /// The share that it asks for, where the daemon's configuration does not say.
        spec: ResourceSpec,
        /// The behaviour that it will show when this daemon is gone.
        on_loss: OnDaemonLoss,
    }
    /// The process has made its first context on a GPU.
    2 Attach {
        /// The process's own number of the device; echoed in `Attached`.
        ordinal: u32,
        /// UUID of the device (or MIG instance): the only name that all processes share.
        device: DeviceUuid,
        /// Memory of the device.
        device_memory: Bytes,
        /// Memory already allocated there: 0 at first, the account to be re-stated after a reconnect.
        allocated: Bytes,
        /// The most that it may hold without a daemon, as the last daemon said; `None` where none did, and it has siblings that
        /// the daemon may not know. The only process of a run says the memory of the device: all of any limit is its own.
        part: Option<Bytes>,
        /// GPU time that it has used there in all: 0 at first, re-stated after a reconnect.
        used: Duration,
        /// The total up to which it was last allowed to use the device. A `used` beyond it is overuse that no daemon has charged.
        allowed: Duration,
    }
    /// GPU time used, what the client wants, and its counters.
    3 Use {
        /// The client that used it.
        client: ClientId,
        /// How many of its turns are over.
        turn: u32,
        /// GPU time used in all, work in flight included; a total that never shrinks.
        used: Duration,
        /// Whether it holds a token or wants one.
        state: UseState,
        /// Kernels launched since it attached.
        launches: u64,
        /// Time that its threads have waited for a token.
        waited: Duration,
    }
    /// Asks for memory before it is allocated.
    6 MemoryReserve {
        /// The client that wants it.
        client: ClientId,
        /// How much is needed.
        bytes: Bytes,
        /// How much would be welcome, to serve small allocations without asking again.
        wish: Bytes,
    }
    /// Gives memory back.
    7 MemoryRelease {
        /// The client that held it.
        client: ClientId,
        /// How much.
        bytes: Bytes,
    }
    /// The process is done with this GPU.
    8 Detach {
        /// The client that leaves.
        client: ClientId,
    }
    /// How the process wants to be treated beside others; after Hello, before the first Attach. A process that says
    /// nothing keeps its share for any need of its neighbours, so the frame is not sent to a daemon that may not know it
    /// unless the user asked for a class.
    9 Class {
        /// Tolerance in basis points; 0 is best effort.
        class: ServiceClass,
    }
    /// An iteration of an SLO-sensitive client ended.
    10 Iteration {
        /// The client that finished one.
        client: ClientId,
        /// When its first kernel was launched.
        first_launch: Timestamp,
        /// When its last kernel was launched.
        last_launch: Timestamp,
        /// Kernels launched in it: iterations are compared with those of about as many.
        launches: u32,
    }
    /// Answers `MemoryAsk`. Slack that was called back has been released before.
    11 MemoryUsed {
        /// The client that uses it.
        client: ClientId,
        /// The number of the question.
        round: u32,
        /// Bytes in use by the program.
        used: Bytes,
    }
    /// Asks what the other processes of the instance use on this GPU.
    12 MemoryQuery {
        /// The client that asks.
        client: ClientId,
    }
    /// A launch of the client has waited for [`LONG_WAIT`](crate::reason::LONG_WAIT), or waits for another reason from now on. Said for the daemon's answer to
    /// `gshare why`; nothing depends on it.
    13 Waiting {
        /// The client whose launch waits.
        client: ClientId,
        /// The reason; `None`: the wait that was said before is over.
        reason: Option<Wait>,
    }
}

messages! {
    /// Frames from a daemon to a hooked process.
    ToClient;

    /// The process is let in.
    1 Welcome {
        /// Number of this run of the daemon: a client that sees it change re-registers.
        epoch: u64,
    }
    /// The process is turned away, and launches nothing; the connection closes.
    2 Refused {
        /// The reason, for programs.
        code: RefusalCode,
        /// The same for people: it names field and bound.
        text: String,
    }
    /// The client is known from now on.
    3 Attached {
        /// The process's own number of the device.
        ordinal: u32,
        /// Its name from now on.
        client: ClientId,
        /// The daemon's number of the device.
        gpu: GpuId,
        /// The share that it may take.
        spec: ResourceSpec,
        /// Length of the window over which quotas are settled.
        window: Duration,
        /// The most GPU time it should have in flight, so that a lease can be given back soon.
        in_flight: Duration,
    }
    /// Launch until the total of the client's use reaches `allowed`. With an `until` that has passed: stop, the turn is over.
    4 Allow {
        /// The client that may launch.
        client: ClientId,
        /// How many of its turns were over when the daemon said this; void for a client that has ended another one since.
        turn: u32,
        /// The total of its use up to which it may launch. It replaces any earlier one.
        allowed: Duration,
        /// Until when.
        until: Timestamp,
    }
    /// Wait: there will be no token before `until`.
    6 Throttle {
        /// The client that has to wait.
        client: ClientId,
        /// The earliest time of the next grant.
        until: Timestamp,
        /// The reason, for programs.
        reason: ThrottleReason,
    }
    /// Another share from now on.
    7 ShareChanged {
        /// The client whose share changes.
        client: ClientId,
        /// The new spec.
        spec: ResourceSpec,
    }
    /// The memory is reserved: at least what was needed, at most what was wished.
    8 MemoryGrant {
        /// The client that wanted it.
        client: ClientId,
        /// How much was added to its account.
        bytes: Bytes,
    }
    /// The memory is not there.
    9 MemoryDeny {
        /// The client that wanted it.
        client: ClientId,
        /// How much is still free within its limit.
        free: Bytes,
    }
    /// How the process is treated beside others, in place of what it said itself: an SLO-sensitive one reports its iterations.
    /// Said only where the daemon's configuration names a class.
    10 Class {
        /// Tolerance in basis points; 0 is best effort.
        class: ServiceClass,
    }
    /// The most that the process may hold while no daemon is there. Parts of an instance's processes add up to its limit
    /// at most; a part that shrinks is sent before another process is given the difference.
    11 MemoryPart {
        /// The client whose part it is.
        client: ClientId,
        /// Bytes that it may hold in all, those that it holds now included, used or not.
        bytes: Bytes,
    }
    /// Asks how much memory the program uses, to be answered by `MemoryUsed`.
    12 MemoryAsk {
        /// The client that is asked.
        client: ClientId,
        /// Number of the question, to be echoed.
        round: u32,
        /// Not 0: what was granted and is not used must be released before the answer.
        recall: u8,
    }
    /// Another process of the instance on this GPU. One for each comes before a `MemoryView`.
    13 MemoryMember {
        /// The client that asked.
        client: ClientId,
        /// The other process, by its own number of itself.
        pid: u32,
        /// Bytes that it uses.
        used: Bytes,
    }
    /// Answers `MemoryQuery`: all members have been sent.
    14 MemoryView {
        /// The client that asked.
        client: ClientId,
    }
    /// The daemon refuses the process or one of its devices, as with `Refused`, and the operator lets such processes run: within
    /// these limits, kept by the process itself. A client that does not know this kind takes it for the loss of its daemon.
    15 Unserved {
        /// The reason, for programs.
        code: RefusalCode,
        /// The same for people: it names field and bound.
        text: String,
        /// The limits that hold; `None`: those that the process has of its own.
        spec: Option<ResourceSpec>,
    }
}

/// The sequence numbers of one direction of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sequence {
    next: u32,
}

impl Sequence {
    /// The number for the next frame sent. Wraps after 2^32 frames.
    pub fn stamp(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    /// Checks the number of a frame received.
    pub fn check(&mut self, got: u32) -> Result<(), WireError> {
        if got != self.next {
            return Err(WireError::Sequence { got, expected: self.next });
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec() -> ResourceSpec {
        let quota = "0.3:0.8".parse().unwrap();
        ResourceSpec::new(quota, SmShare::from_percent(24).unwrap(), Some(Bytes::from_gib(1))).unwrap()
    }

    fn sensitive() -> ServiceClass {
        ServiceClass::SloSensitive { tolerance: BasisPoints::from_percent(60).unwrap() }
    }

    fn to_daemon() -> Vec<ToDaemon> {
        let client = ClientId::new(2, 1);
        vec![
            ToDaemon::Hello {
                pid_start: 7,
                pid: 8,
                run: RunId::new(9),
                name: "alice".into(),
                program: "python3".into(),
                spec: spec(),
                on_loss: OnDaemonLoss::Closed,
            },
            ToDaemon::Attach {
                ordinal: 1,
                device: DeviceUuid::mig(*b"0123456789abcdef"),
                device_memory: Bytes(5),
                allocated: Bytes(4),
                part: Some(Bytes(6)),
                used: Duration::from_nanos(7),
                allowed: Duration::from_nanos(8),
            },
            ToDaemon::Use {
                client,
                turn: 3,
                used: Duration::from_nanos(4),
                state: UseState::Extends,
                launches: 5,
                waited: Duration::from_nanos(6),
            },
            ToDaemon::MemoryReserve { client, bytes: Bytes(1), wish: Bytes(2) },
            ToDaemon::MemoryRelease { client, bytes: Bytes(1) },
            ToDaemon::Detach { client },
            ToDaemon::Class { class: sensitive() },
            ToDaemon::Iteration {
                client,
                first_launch: Timestamp::from_nanos(3),
                last_launch: Timestamp::from_nanos(4),
                launches: 5,
            },
            ToDaemon::MemoryUsed { client, round: 3, used: Bytes(4) },
            ToDaemon::MemoryQuery { client },
            ToDaemon::Waiting { client, reason: Some(Wait::Draining) },
            ToDaemon::Waiting { client, reason: None },
        ]
    }

    fn to_client() -> Vec<ToClient> {
        let client = ClientId::new(2, 1);
        vec![
            ToClient::Welcome { epoch: 1 },
            ToClient::Refused { code: RefusalCode::DuplicateName, text: "no".into() },
            ToClient::Attached {
                ordinal: 1,
                client,
                gpu: GpuId::new(1),
                spec: ResourceSpec::UNLIMITED,
                window: Duration::from_nanos(1),
                in_flight: Duration::from_nanos(2),
            },
            ToClient::Allow {
                client,
                turn: 3,
                allowed: Duration::from_nanos(4),
                until: Timestamp::from_nanos(5),
            },
            ToClient::Throttle {
                client,
                until: Timestamp::from_nanos(5),
                reason: ThrottleReason::LimitReached,
            },
            ToClient::ShareChanged { client, spec: spec() },
            ToClient::MemoryGrant { client, bytes: Bytes(1) },
            ToClient::MemoryDeny { client, free: Bytes(1) },
            ToClient::Class { class: sensitive() },
            ToClient::MemoryPart { client, bytes: Bytes(3) },
            ToClient::MemoryAsk { client, round: 3, recall: 1 },
            ToClient::MemoryMember { client, pid: 3, used: Bytes(4) },
            ToClient::MemoryView { client },
            ToClient::Unserved { code: RefusalCode::Full, text: "no".into(), spec: Some(spec()) },
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A change here is a new version, never an edit of this list.
    #[test]
    fn golden_bytes_of_version_4() {
        let spec = "b80b401f60090000004000000000";
        let golden_to_daemon = [
            format!(
                "0401 4100 00000000 0700000000000000 08000000 09000000000000000000000000000000 {}{}{spec}01",
                "05616c696365", "07707974686f6e33"
            ),
            "0402 4600 01000000 01000000 30313233343536373839616263646566 01 0500000000000000 0400000000000000 01 0600000000000000 \
             0700000000000000 0800000000000000"
                .into(),
            "0403 2d00 02000000 0200000001000000 03000000 0400000000000000 03 0500000000000000 0600000000000000".into(),
            "0406 2000 03000000 0200000001000000 0100000000000000 0200000000000000".into(),
            "0407 1800 04000000 0200000001000000 0100000000000000".into(),
            "0408 1000 05000000 0200000001000000".into(),
            "0409 0a00 06000000 7017".into(),
            "040a 2400 07000000 0200000001000000 0300000000000000 0400000000000000 05000000".into(),
            "040b 1c00 08000000 0200000001000000 03000000 0400000000000000".into(),
            "040c 1000 09000000 0200000001000000".into(),
            "040d 1200 0a000000 0200000001000000 01 12".into(),
            "040d 1100 0b000000 0200000001000000 00".into(),
        ];
        for (n, (message, golden)) in to_daemon().iter().zip(golden_to_daemon).enumerate() {
            let mut bytes = Vec::new();
            message.encode(u32::try_from(n).unwrap(), &mut bytes);
            assert_eq!(hex(&bytes), golden.replace(' ', ""), "{message:?}");
        }
        let golden_to_client = [
            "0401 1000 00000000 0100000000000000",
            "0402 0c00 01000000 00 026e6f",
            "0403 3600 02000000 01000000 0200000001000000 01000000 0000102710 27ffffffffffffffff 0100000000000000 0200000000000000",
            "0404 2400 03000000 0200000001000000 03000000 0400000000000000 0500000000000000",
            "0406 1900 04000000 0200000001000000 0500000000000000 00",
            "0407 1e00 05000000 0200000001000000 b80b401f60090000004000000000",
            "0408 1800 06000000 0200000001000000 0100000000000000",
            "0409 1800 07000000 0200000001000000 0100000000000000",
            "040a 0a00 08000000 7017",
            "040b 1800 09000000 0200000001000000 0300000000000000",
            "040c 1500 0a000000 0200000001000000 03000000 01",
            "040d 1c00 0b000000 0200000001000000 03000000 0400000000000000",
            "040e 1000 0c000000 0200000001000000",
            "040f 1b00 0d000000 02 026e6f 01 b80b401f60090000004000000000",
        ];
        for (n, (message, golden)) in to_client().iter().zip(golden_to_client).enumerate() {
            let mut bytes = Vec::new();
            message.encode(u32::try_from(n).unwrap(), &mut bytes);
            assert_eq!(hex(&bytes), golden.replace(' ', ""), "{message:?}");
        }
    }

    #[test]
    fn every_message_comes_back_as_it_was_sent() {
        for message in to_daemon() {
            let mut bytes = Vec::new();
            message.encode(77, &mut bytes);
            assert!(bytes.len() <= MAX_FRAME);
            assert_eq!(ToDaemon::decode(&bytes), Ok((77, message)));
        }
        for message in to_client() {
            let mut bytes = Vec::new();
            message.encode(77, &mut bytes);
            assert_eq!(ToClient::decode(&bytes), Ok((77, message)));
        }
    }

    #[test]
    fn every_cut_and_every_extension_of_a_frame_is_refused() {
        for message in to_daemon() {
            let mut bytes = Vec::new();
            message.encode(0, &mut bytes);
            for cut in 0..bytes.len() {
                assert!(ToDaemon::decode(&bytes[..cut]).is_err(), "{message:?} cut to {cut}");
            }
            bytes.push(0);
            assert!(matches!(ToDaemon::decode(&bytes), Err(WireError::Oversized { .. })));
        }
        assert!(matches!(ToDaemon::decode(&[VERSION; MAX_FRAME + 1]), Err(WireError::Oversized { .. })));
        assert_eq!(ToDaemon::decode(&[9; HEADER]), Err(WireError::Version { version: 9 }));
    }

    #[test]
    fn a_long_name_is_cut_at_a_character() {
        let mut bytes = Vec::new();
        ToClient::Refused { code: RefusalCode::Full, text: "é".repeat(100) }.encode(0, &mut bytes);
        let (_, message) = ToClient::decode(&bytes).unwrap();
        assert_eq!(message, ToClient::Refused { code: RefusalCode::Full, text: "é".repeat(60) });
    }

    #[test]
    fn a_replayed_or_skipped_frame_is_seen() {
        let (mut sender, mut receiver) = (Sequence::default(), Sequence::default());
        let (first, second) = (sender.stamp(), sender.stamp());
        assert_eq!(receiver.check(first), Ok(()));
        assert_eq!(receiver.check(first), Err(WireError::Sequence { got: 0, expected: 1 }));
        assert_eq!(receiver.check(second), Ok(()));
        assert!(receiver.check(7).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_decodes_encodes_to_the_same_bytes(
            mut bytes in prop::collection::vec(any::<u8>(), 0..80),
            kind in 0u8..16,
        ) {
            if bytes.len() >= HEADER {
                let length = u16::try_from(bytes.len()).unwrap().to_le_bytes();
                bytes[..4].copy_from_slice(&[VERSION, kind, length[0], length[1]]);
            }
            if let Ok((sequence, message)) = ToDaemon::decode(&bytes) {
                let mut again = Vec::new();
                message.encode(sequence, &mut again);
                prop_assert_eq!(&again, &bytes);
            }
            if let Ok((sequence, message)) = ToClient::decode(&bytes) {
                let mut again = Vec::new();
                message.encode(sequence, &mut again);
                prop_assert_eq!(&again, &bytes);
            }
        }
    }
}
