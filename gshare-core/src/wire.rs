//! Wire format between a hooked process and its node daemon.
//!
//! # Problem
//! The hook lives inside other people's programs for months, and operators upgrade the daemon meanwhile. Neither may trust the
//! other's bytes, so a frame is small, versioned and bounded, and the receiver checks all of it before it uses any field.
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
//! Each direction of a connection numbers its frames from 0 without a gap ([`Sequence`]), so the receiver notices a replayed,
//! dropped or reordered frame at once. Texts are a length byte and UTF-8 of at most [`MAX_TEXT`] bytes. Times are
//! `CLOCK_MONOTONIC` nanoseconds, the same for all processes of one node. [`ToDaemon`] shows a whole conversation.
//!
//! # Time
//! `used` and `allowed` are totals since the process found the device, so a late or repeated frame is harmless. A **turn** begins
//! with an `Allow`. It ends when the client gives its token back, or when the daemon takes the token back by an `Allow` with an
//! `until` in the past. Both sides count the finished turns. An `Allow` of a finished turn is void, since it has crossed the end
//! of the turn on its way; of a `Use` of such a turn only the total counts.
//!
//! # Invariants
//! - `decode(encode(frame)) == frame`; every other byte string is an error, never a panic.
//! - Golden tests pin the bytes of each kind: a change of meaning needs a new [`VERSION`].
//!
//! # Cost
//! Encoding and decoding take a few dozen nanoseconds and allocate only for texts.

use crate::ids::{ClientId, DeviceUuid, GpuId, RunId};
pub use crate::reason::RefusalCode;
use crate::reason::{Fault, Obstacle, Reason, Wait};
use crate::resource::{MemoryRange, QuotaRange, ResourceSpec};
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

/// Why bytes are not a frame. The daemon counts dropped connections by [`WireError::reason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes are fewer than a header, or than the length in the header.
    #[error("truncated: {have} bytes of {need}")]
    Truncated {
        /// Bytes received.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// The bytes are more than the length in the header, or than [`MAX_FRAME`].
    #[error("oversized: {have} bytes, at most {limit}")]
    Oversized {
        /// Bytes received.
        have: usize,
        /// The most bytes allowed.
        limit: usize,
    },
    /// The frame has another version of the format.
    #[error("version {version} is not spoken here (this is {VERSION})")]
    Version {
        /// The version byte.
        version: u8,
    },
    /// The kind does not exist in this direction.
    #[error("unknown kind {kind}")]
    Kind {
        /// The kind byte.
        kind: u8,
    },
    /// The sequence number is not the next number of its direction.
    #[error("sequence {got} where {expected} was due")]
    Sequence {
        /// The number received.
        got: u32,
        /// The number due.
        expected: u32,
    },
    /// A field has an impossible value.
    #[error("field {field} has an impossible value")]
    Field {
        /// The name of the field.
        field: &'static str,
    },
}

impl WireError {
    /// The reason for the end of a connection after such bytes.
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

/// The behaviour of a client without its daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum OnDaemonLoss {
    /// The client keeps its last share by the local clock, since a restart of the daemon must not stop the work of a node.
    #[default]
    Open,
    /// The client launches nothing, and after a bounded wait its launches fail with a CUDA error.
    Closed,
}

/// The place of a client's movable memory. A client launches only while it is resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Residence {
    /// On the device.
    #[default]
    Resident,
    /// On its way to host memory.
    Parking,
    /// In host memory.
    Parked,
    /// In host memory, and a thread of the program waits for it.
    Missed,
    /// On its way back to the device.
    Returning,
}

/// The wait of a process for a lost or silent daemon, or for the end of a refusal: 200 ms to 600 s, 5 s by default.
///
/// After this wait launches fail under [`OnDaemonLoss::Closed`], and under either policy so do allocations that need the daemon's
/// answer. While a thread waits, the process probes a silent daemon after three fifths of the wait and gives it one fifth to greet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DaemonWait(Duration);

impl DaemonWait {
    /// The shortest wait: a daemon on a busy host may pause for less than this.
    pub const SHORTEST: Duration = Duration::from_millis(200);
    /// The longest wait.
    pub const LONGEST: Duration = Duration::from_secs(600);

    /// A wait of this length; `None` below [`SHORTEST`](Self::SHORTEST) and above [`LONGEST`](Self::LONGEST).
    pub fn new(length: Duration) -> Option<Self> {
        (Self::SHORTEST..=Self::LONGEST).contains(&length).then_some(Self(length))
    }

    /// The length of the wait.
    pub const fn get(self) -> Duration {
        self.0
    }

    /// The longest silence of a daemon before a probe, while a thread waits for its answer, in ns.
    pub const fn silence_ns(self) -> u64 {
        self.0.as_nanos() / 5 * 3
    }

    /// The longest wait for a daemon's greeting, in ns.
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

/// Why a text is not a [`DaemonWait`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseDaemonWaitError {
    /// The text is no length of time.
    #[error(transparent)]
    Malformed(#[from] crate::ParseUnitError),
    /// The length is below [`DaemonWait::SHORTEST`] or above [`DaemonWait::LONGEST`].
    #[error("need {} to {}", DaemonWait::SHORTEST, DaemonWait::LONGEST)]
    OutOfBounds,
}

/// A value on the wire, written by `put` and read back by `take`.
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

/// Fields around an integer: the first closure unwraps it, the second wraps it again or returns `None` for an impossible value.
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
    RefusalCode as u8: |code| code.code(), |raw| RefusalCode::from_code(raw);
    Obstacle as u8: |obstacle| obstacle.code(), |raw| Obstacle::from_code(raw);
    Wait as u8: |wait| wait.code(), |raw| Wait::from_code(raw);
}

/// Enums, each variant with its number.
macro_rules! numbered_fields {
    ($($ty:ident { $($number:literal $variant:ident),+ })*) => {$(
        impl Field for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(match self { $(Self::$variant => $number,)+ });
            }
            fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
                match u8::take(input, field)? {
                    $($number => Ok(Self::$variant),)+
                    _ => Err(WireError::Field { field }),
                }
            }
        }
    )*};
}
numbered_fields! {
    OnDaemonLoss { 0 Open, 1 Closed }
    UseState { 0 Idle, 1 Wants, 2 Holds, 3 Extends }
    ThrottleReason { 0 LimitReached }
    Residence { 0 Resident, 1 Parking, 2 Parked, 3 Missed, 4 Returning }
}

/// The 16 bytes of the UUID, then 1 for a MIG instance or 0 for a whole GPU.
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

/// `put` cuts a longer text at a character boundary: a name is for people, not a key to trust.
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

/// An older daemon or hook knows no guaranteed memory, so the bytes of a spec without it are the same as ever.
impl Field for ResourceSpec {
    fn put(&self, out: &mut Vec<u8>) {
        self.quota().request().put(out);
        self.quota().limit().put(out);
        self.sm().put(out);
        self.memory().unwrap_or(Bytes(u64::MAX)).put(out);
        let guaranteed = self.guaranteed();
        (u8::from(self.is_observed()) | u8::from(guaranteed.is_some()) << 1).put(out);
        if let Some(bytes) = guaranteed {
            bytes.put(out);
        }
    }
    fn take(input: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        let bad = |_| WireError::Field { field };
        let quota = QuotaRange::new(Quota::take(input, field)?, Quota::take(input, field)?).map_err(bad)?;
        let sm = SmShare::take(input, field)?;
        let memory = Some(Bytes::take(input, field)?).filter(|bytes| bytes.0 != u64::MAX);
        let spec = Self::new(quota, sm, memory).map_err(bad)?;
        match u8::take(input, field)? {
            0 => Ok(spec),
            1 => spec.observed().map_err(bad),
            2 => {
                let range = MemoryRange::new(Bytes::take(input, field)?, memory).map_err(bad)?;
                Ok(spec.with_memory(range))
            }
            _ => Err(WireError::Field { field }),
        }
    }
}

/// An optional value: byte 0 for `None`, or byte 1 and then the value.
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

/// Declares the messages of one direction with their kinds, and their coding as frames.
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
                // `put` cuts texts at MAX_TEXT, so no kind reaches MAX_FRAME, let alone 64 KiB.
                let length = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
                out[start + 2..start + 4].copy_from_slice(&length.to_le_bytes());
            }

            /// Reads one frame, which must fill `bytes` exactly, and returns its sequence number and its message.
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

/// Checks the header and returns the kind, the sequence number and the payload.
fn open(bytes: &[u8]) -> Result<(u8, u32, &[u8]), WireError> {
    if bytes.len() > MAX_FRAME {
        return Err(WireError::Oversized { have: bytes.len(), limit: MAX_FRAME });
    }
    let mut input = bytes;
    // The version is checked before the rest: a frame of another version may have another header.
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
    ///
    /// # Conversation
    /// ```text
    /// hook                                  daemon
    ///  Resume{uid, ticket}               ──▶                              first, if an earlier daemon gave a ticket
    ///  Hello{name, spec, ...}            ──▶
    ///                                    ◀──  Welcome{epoch}              or Refused or Unserved, and close
    ///                                    ◀──  Ticket{uid, ticket}         if the daemon sees the process's pid
    ///                                    ◀──  Class{class}                if the daemon's configuration names a class
    ///  Attach{ordinal, device, memory}   ──▶                              once per GPU, at its first context
    ///                                    ◀──  Attached{client, spec, window}   or for this GPU only: Refused or Unserved
    ///                                                                     with UnknownDevice or BadSpec
    ///  Use{client, turn, used, Wants}    ──▶
    ///                                    ◀──  Allow{client, turn, allowed, until}
    ///  Use{client, turn, used, ...}      ──▶                              reports, extensions, the end of the turn
    ///  Iteration                         ──▶                              after a Class
    ///  MemoryReserve{client, bytes}      ──▶
    ///                                    ◀──  MemoryGrant or MemoryDeny
    ///                                    ◀──  MemoryPart{client, bytes}   after Attached, and at each change
    ///                                    ◀──  MemoryAsk{client, round}    before a denial, or for the view of a sibling
    ///  MemoryUsed{client, round, used}   ──▶                              after a MemoryRelease, if slack was called back
    ///  MemoryQuery{client}               ──▶
    ///                                    ◀──  MemoryMember{client, pid, used} for each sibling, then MemoryView{client}
    ///  Waiting{client, reason}           ──▶                              a launch waits for 10 ms and more
    ///  Parking{client, residence, bytes} ──▶                              after Attached if its memory can move, and at each change
    ///                                    ◀──  Park{client, on}
    /// ```
    /// The daemon answers the Attaches of a connection in their order. After a reconnect the hook says Hello and Attach again, and
    /// `Attach` re-states the totals of the process: its allocated memory, its used GPU time, and its last `allowed`.
    ToDaemon;

    /// The first frame of a connection introduces the process. The daemon takes pid and uid from the socket, not from this frame.
    1 Hello {
        /// Start time of the process in clock ticks since boot (`/proc/self/stat`, field 22), against reused pids.
        pid_start: u64,
        /// The pid of the process in its own PID namespace, for its siblings' lists of processes.
        pid: u32,
        /// The number of the run. All processes of one `gshare run` share the number, one name and one share. Their starter draws
        /// the number; a process outside `gshare run` draws its own.
        run: RunId,
        /// Name of the instance.
        name: String,
        /// The program, for people (`comm`).
        program: String,
        /// The requested share, used where the daemon's configuration names no share.
        spec: ResourceSpec,
        /// The behaviour of the process without this daemon.
        on_loss: OnDaemonLoss,
    }
    /// The process has made its first context on a GPU.
    2 Attach {
        /// The process's own number of the device; echoed in `Attached`.
        ordinal: u32,
        /// UUID of the device (or MIG instance), its only name with the same meaning in all processes.
        device: DeviceUuid,
        /// Memory of the device.
        device_memory: Bytes,
        /// Memory of the process on the device: 0 at first, the current account after a reconnect.
        allocated: Bytes,
        /// The last daemon's bound for the memory of the process without a daemon. `None`: no daemon has named a bound, and the
        /// process may have siblings unknown to this daemon. The only process of a run owns all of any limit, so it states the
        /// memory of the device.
        part: Option<Bytes>,
        /// Total GPU time of the process on the device: 0 at first, the current total after a reconnect.
        used: Duration,
        /// The last total up to which the process was allowed to use the device. No daemon has charged a `used` beyond this total.
        allowed: Duration,
    }
    /// A client's use, its state and its counters.
    3 Use {
        /// The reporting client.
        client: ClientId,
        /// The number of the client's finished turns.
        turn: u32,
        /// Total GPU time used, work in flight included. The total never shrinks.
        used: Duration,
        /// Whether the client holds or wants a token.
        state: UseState,
        /// Kernels launched since the attach.
        launches: u64,
        /// Time spent by the client's threads in waits for a token.
        waited: Duration,
        /// Memory in use by the client.
        memory: Bytes,
        /// Memory in use times its time, in byte-seconds, since the process began to use the device.
        byte_seconds: u64,
    }
    /// Requests memory before its allocation.
    6 MemoryReserve {
        /// The client in need of memory.
        client: ClientId,
        /// The needed memory.
        bytes: Bytes,
        /// The welcome memory, for later small allocations without another request.
        wish: Bytes,
    }
    /// Gives memory back.
    7 MemoryRelease {
        /// The client with the memory.
        client: ClientId,
        /// The returned memory.
        bytes: Bytes,
    }
    /// The process has finished its work on this GPU.
    8 Detach {
        /// The leaving client.
        client: ClientId,
    }
    /// The service class requested by the process, sent after Hello and before the first Attach. A process without a class keeps
    /// its share for any need of its neighbours. An older daemon may not know this frame, so the hook sends it only where the user
    /// asked for a class.
    9 Class {
        /// Tolerance in basis points; 0 is best effort.
        class: ServiceClass,
    }
    /// An iteration of an SLO-sensitive client ended.
    10 Iteration {
        /// The client of the iteration.
        client: ClientId,
        /// Launch time of the iteration's first kernel.
        first_launch: Timestamp,
        /// Launch time of the iteration's last kernel.
        last_launch: Timestamp,
        /// Kernels launched in the iteration: the daemon compares iterations with about as many kernels.
        launches: u32,
    }
    /// Answers `MemoryAsk`. The client has released recalled slack before this frame.
    11 MemoryUsed {
        /// The answering client.
        client: ClientId,
        /// The number of the question.
        round: u32,
        /// Bytes in use by the program.
        used: Bytes,
    }
    /// Asks for the memory use of the instance's other processes on this GPU.
    12 MemoryQuery {
        /// The asking client.
        client: ClientId,
    }
    /// A launch of the client has waited for [`LONG_WAIT`](crate::reason::LONG_WAIT), or waits for another reason from now on. Only
    /// the daemon's answer to `gshare why` depends on this frame.
    13 Waiting {
        /// The client of the waiting launch.
        client: ClientId,
        /// The reason; `None` at the end of an announced wait.
        reason: Option<Wait>,
    }
    /// Before Hello: the user of the process when a daemon gave it this ticket. The process may have become another user since.
    14 Resume {
        /// The user.
        uid: u32,
        /// The proof, from [`ToClient::Ticket`].
        ticket: u128,
    }
    /// The place of the client's movable memory. An older daemon may not know this frame, so the hook sends it only where the user
    /// asked for a process that can be parked.
    15 Parking {
        /// The client with the memory.
        client: ClientId,
        /// The place of the memory.
        residence: Residence,
        /// Bytes that can move, or that have moved.
        bytes: Bytes,
        /// Why the last order of the daemon was not carried out, or why none of the client's memory can move.
        obstacle: Option<Obstacle>,
    }
}

messages! {
    /// Frames from a daemon to a hooked process.
    ToClient;

    /// The daemon accepts the process.
    1 Welcome {
        /// The number of this run of the daemon. A client registers again when the number changes.
        epoch: u64,
    }
    /// The daemon refuses the process, which then launches nothing, and the connection closes.
    2 Refused {
        /// The reason, for programs.
        code: RefusalCode,
        /// The reason for people, with field and bound.
        text: String,
    }
    /// The daemon serves the process on this device from now on.
    3 Attached {
        /// The process's own number of the device.
        ordinal: u32,
        /// The name of the new client.
        client: ClientId,
        /// The daemon's number of the device.
        gpu: GpuId,
        /// The share of the client.
        spec: ResourceSpec,
        /// Length of the window over which quotas are settled.
        window: Duration,
        /// The most GPU time to have in flight. A small bound lets the client give its token back soon.
        in_flight: Duration,
    }
    /// Lets the client launch until its total use reaches `allowed`; a smaller total than before asks for the token back. An `until` in
    /// the past ends the turn instead.
    4 Allow {
        /// The client with the permission.
        client: ClientId,
        /// The number of the client's finished turns, as known to the daemon. The frame is void if the client has finished another
        /// turn meanwhile.
        turn: u32,
        /// The total use at which the client must stop launching. The value replaces all earlier ones.
        allowed: Duration,
        /// The time at which the client must stop launching.
        until: Timestamp,
    }
    /// Tells the client to wait: it gets no token before `until`.
    6 Throttle {
        /// The waiting client.
        client: ClientId,
        /// The earliest time of the next grant.
        until: Timestamp,
        /// The reason, for programs.
        reason: ThrottleReason,
    }
    /// The client has another share from now on.
    7 ShareChanged {
        /// The client with the new share.
        client: ClientId,
        /// The new spec of the client.
        spec: ResourceSpec,
    }
    /// The daemon has reserved the memory: at least the needed bytes, at most the wished bytes.
    8 MemoryGrant {
        /// The client of the request.
        client: ClientId,
        /// The bytes added to the client's account.
        bytes: Bytes,
    }
    /// The daemon denies the memory, after any recall of slack.
    9 MemoryDeny {
        /// The client of the request.
        client: ClientId,
        /// The memory still free within the client's limit.
        free: Bytes,
    }
    /// The service class of the process, in place of its own request: an SLO-sensitive process reports its iterations. The daemon
    /// sends this frame only where its configuration names a class.
    10 Class {
        /// Tolerance in basis points; 0 is best effort.
        class: ServiceClass,
    }
    /// The most memory of the process without a daemon. The parts of an instance's processes add up to at most its limit, so the
    /// daemon sends a shrunken part before it gives the difference to another process.
    11 MemoryPart {
        /// The client with this part.
        client: ClientId,
        /// The most bytes in all, with the bytes of the client's current account, used or not.
        bytes: Bytes,
    }
    /// Asks for the memory use of the program; the client answers by `MemoryUsed`.
    12 MemoryAsk {
        /// The client to answer.
        client: ClientId,
        /// The number of the question, echoed in the answer.
        round: u32,
        /// Not 0: the client must release granted but unused memory before the answer.
        recall: u8,
    }
    /// Another process of the instance on this GPU. The daemon sends one of these frames per process before a `MemoryView`. A client whose
    /// memory can move gets one more, for all other instances: the rest of their memory parks for the client.
    13 MemoryMember {
        /// The client of the query.
        client: ClientId,
        /// The pid of the other process in its own PID namespace; 0 for all other instances.
        pid: u32,
        /// Bytes in use by the other process, or bytes of the device that other instances keep.
        used: Bytes,
    }
    /// Ends the answer to `MemoryQuery`, after all members.
    14 MemoryView {
        /// The client of the query.
        client: ClientId,
    }
    /// The daemon refuses the process or one of its devices, as with `Refused`, but the operator lets such processes run. The
    /// process keeps these limits by itself. An older client does not know this kind and treats it as the loss of its daemon.
    15 Unserved {
        /// The reason, for programs.
        code: RefusalCode,
        /// The reason for people, with field and bound.
        text: String,
        /// The limits to keep; `None` for the process's own limits.
        spec: Option<ResourceSpec>,
    }
    /// A ticket with which the process connects again as this user, also to a later daemon.
    16 Ticket {
        /// The user, as the kernel states it now.
        uid: u32,
        /// The proof for [`ToDaemon::Resume`].
        ticket: u128,
    }
    /// The place for the client's movable memory; the last order holds, and the client answers each by a `Parking`. A client without its daemon takes its memory back when a
    /// thread of the program waits for it.
    17 Park {
        /// The client with the memory.
        client: ClientId,
        /// Not 0: in host memory. 0: on the device, as soon as there is room.
        on: u8,
    }
}

impl ToDaemon {
    /// A report of time alone: no launches, no waits and no memory so far.
    pub fn use_of_time(client: ClientId, turn: u32, used: Duration, state: UseState) -> Self {
        let (launches, waited, memory, byte_seconds) = (0, Duration::ZERO, Bytes::ZERO, 0);
        Self::Use { client, turn, used, state, launches, waited, memory, byte_seconds }
    }
}

/// The sequence numbers of one direction of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sequence {
    next: u32,
}

impl Sequence {
    /// Takes the number for the next frame to send. The numbers wrap after 2^32 frames.
    pub fn stamp(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    /// Checks the number of a received frame.
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
                memory: Bytes(7),
                byte_seconds: 8,
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
            ToDaemon::Resume { uid: 3, ticket: 4 },
            ToDaemon::Parking {
                client,
                residence: Residence::Missed,
                bytes: Bytes(4),
                obstacle: Some(Obstacle::Capture),
            },
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
            ToClient::ShareChanged { client, spec: ResourceSpec::OBSERVED },
            ToClient::MemoryGrant { client, bytes: Bytes(1) },
            ToClient::MemoryDeny { client, free: Bytes(1) },
            ToClient::Class { class: sensitive() },
            ToClient::MemoryPart { client, bytes: Bytes(3) },
            ToClient::MemoryAsk { client, round: 3, recall: 1 },
            ToClient::MemoryMember { client, pid: 3, used: Bytes(4) },
            ToClient::MemoryView { client },
            ToClient::Unserved { code: RefusalCode::Full, text: "no".into(), spec: Some(spec()) },
            ToClient::Ticket { uid: 3, ticket: 4 },
            ToClient::Park { client, on: 1 },
            ToClient::ShareChanged {
                client,
                spec: ResourceSpec::UNLIMITED.with_memory(MemoryRange::new(Bytes(6), None).unwrap()),
            },
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A change of released bytes needs a new version, never an edit of this list.
    #[test]
    fn golden_bytes_of_version_4() {
        let spec = "b80b401f6009000000400000000000";
        let golden_to_daemon = [
            format!(
                "0401 4200 00000000 0700000000000000 08000000 09000000000000000000000000000000 {}{}{spec}01",
                "05616c696365", "07707974686f6e33"
            ),
            "0402 4600 01000000 01000000 30313233343536373839616263646566 01 0500000000000000 0400000000000000 01 0600000000000000 \
             0700000000000000 0800000000000000"
                .into(),
            "0403 3d00 02000000 0200000001000000 03000000 0400000000000000 03 0500000000000000 0600000000000000 \
             0700000000000000 0800000000000000"
                .into(),
            "0406 2000 03000000 0200000001000000 0100000000000000 0200000000000000".into(),
            "0407 1800 04000000 0200000001000000 0100000000000000".into(),
            "0408 1000 05000000 0200000001000000".into(),
            "0409 0a00 06000000 7017".into(),
            "040a 2400 07000000 0200000001000000 0300000000000000 0400000000000000 05000000".into(),
            "040b 1c00 08000000 0200000001000000 03000000 0400000000000000".into(),
            "040c 1000 09000000 0200000001000000".into(),
            "040d 1200 0a000000 0200000001000000 01 12".into(),
            "040d 1100 0b000000 0200000001000000 00".into(),
            "040e 1c00 0c000000 03000000 04000000000000000000000000000000".into(),
            "040f 1b00 0d000000 0200000001000000 03 0400000000000000 01 42".into(),
        ];
        for (n, (message, golden)) in to_daemon().iter().zip(golden_to_daemon).enumerate() {
            let mut bytes = Vec::new();
            message.encode(u32::try_from(n).unwrap(), &mut bytes);
            assert_eq!(hex(&bytes), golden.replace(' ', ""), "{message:?}");
        }
        let golden_to_client = [
            "0401 1000 00000000 0100000000000000",
            "0402 0c00 01000000 00 026e6f",
            "0403 3700 02000000 01000000 0200000001000000 01000000 0000102710 27ffffffffffffffff00 0100000000000000 0200000000000000",
            "0404 2400 03000000 0200000001000000 03000000 0400000000000000 0500000000000000",
            "0406 1900 04000000 0200000001000000 0500000000000000 00",
            "0407 1f00 05000000 0200000001000000 b80b401f6009000000400000000000",
            "0407 1f00 06000000 0200000001000000 0000102710 27ffffffffffffffff01",
            "0408 1800 07000000 0200000001000000 0100000000000000",
            "0409 1800 08000000 0200000001000000 0100000000000000",
            "040a 0a00 09000000 7017",
            "040b 1800 0a000000 0200000001000000 0300000000000000",
            "040c 1500 0b000000 0200000001000000 03000000 01",
            "040d 1c00 0c000000 0200000001000000 03000000 0400000000000000",
            "040e 1000 0d000000 0200000001000000",
            "040f 1c00 0e000000 02 026e6f 01 b80b401f6009000000400000000000",
            "0410 1c00 0f000000 03000000 04000000000000000000000000000000",
            "0411 1100 10000000 0200000001000000 01",
            "0407 2700 11000000 0200000001000000 0000102710 27ffffffffffffffff020600000000000000",
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
            kind in 0u8..18,
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
