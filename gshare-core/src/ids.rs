//! Ids: small `Copy` names, each with a type of its own.
//!
//! The id of a thing with an end carries a generation. A table reuses a slot, but never with the same generation, so an engine
//! recognises and refuses a late answer to a departed client or a second release of an old placement. Ids are ordered by slot,
//! then by generation, and this order is the last tie-break of every decision.

use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::str::FromStr;

macro_rules! plain_id {
    ($(#[$doc:meta])* $name:ident($number:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $name($number);

        impl $name {
            /// The id with this number.
            pub const fn new(number: $number) -> Self {
                Self(number)
            }

            /// The number of this id.
            pub const fn number(self) -> $number {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

macro_rules! index {
    ($($name:ident)*) => {$(
        impl $name {
            /// The number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

macro_rules! generational_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        ///
        /// Serialised as one integer: `generation << 32 | slot`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "serde", serde(from = "u64", into = "u64"))]
        pub struct $name {
            slot: u32,
            generation: u32,
        }

        impl $name {
            /// The `generation`-th use of `slot`.
            pub const fn new(slot: u32, generation: u32) -> Self {
                Self { slot, generation }
            }

            /// The slot of the table entry, reused after the end of its holder.
            pub const fn slot(self) -> u32 {
                self.slot
            }

            /// The number of earlier uses of the slot.
            pub const fn generation(self) -> u32 {
                self.generation
            }

            /// The slot as an index into a table.
            pub const fn index(self) -> usize {
                self.slot as usize
            }
        }

        impl From<$name> for u64 {
            fn from(id: $name) -> u64 {
                u64::from(id.generation) << 32 | u64::from(id.slot)
            }
        }

        impl From<u64> for $name {
            #[expect(clippy::cast_possible_truncation, reason = "the two halves of the integer")]
            fn from(raw: u64) -> Self {
                Self { slot: raw as u32, generation: (raw >> 32) as u32 }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}.{}"), self.slot, self.generation)
            }
        }
    };
}

plain_id! {
    /// One GPU (or one MIG instance) of a node or pool, numbered by the host.
    GpuId(u32), "gpu"
}

plain_id! {
    /// A deployed function, the unit of scaling. Numbered by the host.
    FunctionId(u32), "fn"
}

plain_id! {
    /// A model, the unit of loading. Numbered by the host.
    ModelId(u32), "model"
}

plain_id! {
    /// One instance of a function. A scaler or platform never uses an id twice.
    InstanceId(u64), "instance"
}

plain_id! {
    /// A request, named by the host; the name is free again after the request's completion or rejection.
    RequestId(u64), "request"
}

plain_id! {
    /// The sender of requests. Numbered by the host.
    TenantId(u32), "tenant"
}

plain_id! {
    /// A group of clients, numbered by the host (the gid, for a host with a Unix socket).
    GroupId(u32), "group"
}

plain_id! {
    /// A machine with its GPUs and their common host memory. Numbered by the host.
    NodeId(u32), "node"
}

plain_id! {
    /// GPUs of equal speed and memory. Numbered by the host from 0; at most 63.
    GpuKind(u8), "kind"
}

plain_id! {
    /// Index of a MIG profile in the table of its GPU model.
    ProfileId(u8), "profile"
}

plain_id! {
    /// One request of a client of the model store, numbered by the host; the number is free again after the answer or the client's
    /// departure.
    TicketId(u64), "ticket"
}

index! { GpuId FunctionId ModelId NodeId GpuKind ProfileId }

/// The number of a run. Processes with one number belong together, under one name and one share. The starter of a run draws
/// the number from the kernel's random numbers, so no other process can compute it. 0 means no number.
///
/// `Display` writes the number as 32 hexadecimal digits, and `Debug` leaves them out, so that no log reveals them.
///
/// ```
/// use gshare_core::RunId;
///
/// let run: RunId = "2a".parse()?;
/// assert_eq!((run, run.to_string()), (RunId::new(42), format!("{:030}2a", 0)));
/// assert_eq!(format!("{run:?}"), "RunId(..)");
/// assert!("0".parse::<RunId>().is_err() && "-1".parse::<RunId>().is_err());
/// # Ok::<(), gshare_core::ParseRunIdError>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct RunId(u128);

/// The text is not the number of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the number of a run has 1 to 32 hexadecimal digits and is not 0")]
pub struct ParseRunIdError;

impl RunId {
    /// The number of a process outside every run.
    pub const NONE: Self = Self(0);

    /// The number with these bits.
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    /// The 128 bits.
    pub const fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunId(..)")
    }
}

impl FromStr for RunId {
    type Err = ParseRunIdError;

    fn from_str(text: &str) -> Result<Self, ParseRunIdError> {
        let digits = text.len() <= 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let bits = u128::from_str_radix(text, 16).ok().filter(|bits| digits && *bits != 0);
        bits.map(Self).ok_or(ParseRunIdError)
    }
}

#[cfg(feature = "serde")]
impl TryFrom<String> for RunId {
    type Error = ParseRunIdError;

    fn try_from(text: String) -> Result<Self, ParseRunIdError> {
        // The number of a process outside every run is written as 0 too.
        if text.bytes().all(|digit| digit == b'0') { Ok(Self::NONE) } else { text.parse() }
    }
}

#[cfg(feature = "serde")]
impl From<RunId> for String {
    fn from(run: RunId) -> Self {
        run.to_string()
    }
}

/// A device's name in all processes: the UUID of a GPU or of a MIG instance, in the form of `nvidia-smi -L`.
///
/// Two names are equal if their bytes are equal: the kind of device decides only the written form.
///
/// ```
/// use gshare_core::DeviceUuid;
///
/// let slice: DeviceUuid = "MIG-00112233-4455-6677-8899-aabbccddeeff".parse()?;
/// assert_eq!(slice.to_string(), "MIG-00112233-4455-6677-8899-aabbccddeeff");
/// assert_eq!(slice, DeviceUuid::gpu(slice.bytes()));
/// assert!("GPU-0011".parse::<DeviceUuid>().is_err());
/// # Ok::<(), gshare_core::ParseUuidError>(())
/// ```
#[derive(Clone, Copy, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct DeviceUuid {
    bytes: [u8; 16],
    mig: bool,
}

/// The text is not the UUID of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a UUID such as `GPU-00112233-4455-6677-8899-aabbccddeeff`")]
pub struct ParseUuidError(String);

impl DeviceUuid {
    /// A whole GPU.
    pub const fn gpu(bytes: [u8; 16]) -> Self {
        Self { bytes, mig: false }
    }

    /// A MIG instance.
    pub const fn mig(bytes: [u8; 16]) -> Self {
        Self { bytes, mig: true }
    }

    /// The 16 bytes of the UUID.
    pub const fn bytes(self) -> [u8; 16] {
        self.bytes
    }

    /// Whether the written form is a MIG instance.
    pub const fn is_mig(self) -> bool {
        self.mig
    }

    /// Whether the device is simulated: the simulated driver gives UUIDs of version 8 (RFC 9562, section 5.8) with `sim` at
    /// their end, and NVIDIA's driver does not.
    pub fn is_simulated(self) -> bool {
        self.bytes[6] >> 4 == 8 && self.bytes.ends_with(b"sim")
    }
}

impl PartialEq for DeviceUuid {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl PartialOrd for DeviceUuid {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DeviceUuid {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes.cmp(&other.bytes)
    }
}

impl Hash for DeviceUuid {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.mig { "MIG" } else { "GPU" })?;
        for (n, byte) in self.bytes.iter().enumerate() {
            let dash = if matches!(n, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceUuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, ParseUuidError> {
        let error = || ParseUuidError(text.to_owned());
        let slice = text.strip_prefix("MIG-");
        let bare = slice.or_else(|| text.strip_prefix("GPU-")).unwrap_or(text);
        let digits: Vec<u8> = bare.bytes().filter(|byte| *byte != b'-').collect();
        if digits.len() != 32 {
            return Err(error());
        }
        let mut bytes = [0u8; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let pair = core::str::from_utf8(pair).map_err(|_| error())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
        }
        Ok(Self { bytes, mig: slice.is_some() })
    }
}

#[cfg(feature = "serde")]
impl TryFrom<String> for DeviceUuid {
    type Error = ParseUuidError;

    fn try_from(text: String) -> Result<Self, ParseUuidError> {
        text.parse()
    }
}

#[cfg(feature = "serde")]
impl From<DeviceUuid> for String {
    fn from(uuid: DeviceUuid) -> Self {
        uuid.to_string()
    }
}

generational_id! {
    /// A client: one hooked process on one GPU, named by the node.
    ClientId, "client"
}

generational_id! {
    /// A connection of a process to its node, named by the node.
    ConnId, "conn"
}

generational_id! {
    /// A placement of a demand on a GPU, named by the packer.
    PlacementId, "placement"
}

generational_id! {
    /// An arena of the model store: memory with the content of one model. Named by the store.
    ArenaId, "arena"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generational_id_survives_its_integer_form() {
        let id = ClientId::new(7, 3);
        assert_eq!(ClientId::from(u64::from(id)), id);
        assert_eq!(id.to_string(), "client7.3");
        assert_ne!(id, ClientId::new(7, 4), "the slot is reused, the id is not");
    }
}
