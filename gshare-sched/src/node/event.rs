//! The events that a node is told, and its answers: actions, notes for observers, errors.

use super::{NodeConfig, Refusal};
use gshare_core::reason::Wait;
use gshare_core::wire::{RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConfigError, ConnId, DeviceUuid, Duration, GpuId, Quota, QuotaRange, TimeWentBack,
    Timestamp, TokenAction, TokenError, TokenEvent,
};

/// The process at the other end of a connection, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Peer {
    /// Its process; 0 where its PID namespace cannot be seen from here.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// The event itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum NodeEvent {
    /// A frame came. A connection is known from its accepted Hello on.
    Received {
        /// On which connection.
        conn: ConnId,
        /// The process that sent it.
        peer: Peer,
        /// The message; serialised as the hexadecimal digits of its wire encoding with sequence number 0.
        #[cfg_attr(feature = "serde", serde(with = "to_daemon_hex"))]
        frame: ToDaemon,
    },
    /// A connection is gone, or its process is, or the host has carried out a [`NodeAction::Drop`].
    Closed {
        /// The connection that is gone.
        conn: ConnId,
    },
    /// Another configuration from now on.
    Reloaded {
        /// The new one.
        config: Box<NodeConfig>,
    },
    /// The driver knows a device of the node. Told before a process attaches to it, or when the driver comes up.
    DeviceFound {
        /// Its UUID, written as the driver does.
        uuid: DeviceUuid,
        /// Its memory.
        memory: Bytes,
    },
    /// The operator asks what all clients use of their memory.
    UseAsked {
        /// The host's number of the question; [`NodeAction::UseKnown`] repeats it.
        question: u32,
    },
    /// [`Engine::next_deadline`](gshare_core::Engine::next_deadline) has come.
    DeadlineReached,
}

/// An order for the host. Orders are carried out in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
pub enum NodeAction {
    /// Send a frame.
    Send {
        /// On which connection.
        conn: ConnId,
        /// The frame; serialised as the hexadecimal digits of its wire encoding with sequence number 0.
        #[cfg_attr(feature = "serde", serde(serialize_with = "to_client_hex::serialize"))]
        frame: ToClient,
    },
    /// Close the connection after what was sent before, and report that as [`NodeEvent::Closed`].
    Drop {
        /// The connection to close.
        conn: ConnId,
        /// Why it is closed.
        reason: RefusalCode,
    },
    /// All answers about memory in use that will come are in: the question can be answered from
    /// [`Node::clients`](super::Node::clients).
    UseKnown {
        /// Which question.
        question: u32,
    },
    /// A remark for observers (journal, metrics, log). A host need not do anything.
    Note(Note),
}

/// A step inside a node, with its figures. Token events and orders name tenants: one instance on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "note", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Note {
    /// The token scheduler has taken an event. Its orders follow, each as a [`Note::TokenOrder`].
    TokenEvent {
        /// The event.
        token: TokenEvent,
    },
    /// An order of the token scheduler.
    TokenOrder {
        /// The order.
        order: TokenAction,
    },
    /// The token scheduler has refused an event.
    TokenRefused {
        /// The event.
        token: TokenEvent,
        /// Why it was refused.
        fault: TokenFault,
    },
    /// The event has changed nothing: a replay does not need it.
    NoEffect,
    /// A process has attached to a device.
    Admitted {
        /// Its connection.
        conn: ConnId,
        /// Its name as the process knows it.
        client: ClientId,
        /// Its tenant: the client of the token scheduler.
        tenant: ClientId,
        /// The device.
        gpu: GpuId,
        /// Name of its instance.
        name: String,
        /// The process.
        pid: i32,
    },
    /// A client has left a device.
    Left {
        /// The client that left.
        client: ClientId,
        /// Its tenant.
        tenant: ClientId,
    },
    /// A process, or what it asked for, was refused.
    Refused {
        /// Its connection.
        conn: ConnId,
        /// Name of its instance.
        name: String,
        /// Why it was refused.
        refusal: Refusal,
    },
    /// The connection broke the protocol and is dropped.
    Violation {
        /// Its connection.
        conn: ConnId,
        /// Which rule was broken, for people.
        what: &'static str,
    },
    /// A launch of a client waits long, or waits for another reason, or does so no more.
    Waiting {
        /// The client.
        client: ClientId,
        /// The reason, as its process says; `None`: the wait is over.
        reason: Option<Wait>,
    },
    /// A client asked for a token and waits until the debt of its name is paid back.
    DebtWait {
        /// The client that waits.
        client: ClientId,
        /// Until when.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// The overuse that is left.
        #[cfg_attr(feature = "serde", serde(rename = "owed_ns"))]
        owed: Duration,
        /// The share of time that pays it back.
        limit: Quota,
    },
    /// A tenant has reached its limit: no token before `until`.
    Throttled {
        /// Which tenant.
        tenant: ClientId,
        /// Until when.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// GPU time used in this window, overuse of earlier ones included.
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
        /// Its limit.
        limit: Quota,
        /// The window.
        #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
        window: Duration,
    },
    /// A reservation of memory was denied.
    MemoryDenied {
        /// The client that wanted it.
        client: ClientId,
        /// Bytes that it needs.
        #[cfg_attr(feature = "serde", serde(rename = "asked_bytes"))]
        asked: Bytes,
        /// Bytes that are free for it.
        #[cfg_attr(feature = "serde", serde(rename = "free_bytes"))]
        free: Bytes,
        /// The limit that is in the way.
        of: MemoryBound,
        /// The bound.
        #[cfg_attr(feature = "serde", serde(rename = "limit_bytes"))]
        limit: Bytes,
        /// Bytes held under that limit.
        #[cfg_attr(feature = "serde", serde(rename = "held_bytes"))]
        held: Bytes,
    },
    /// The overuse of a tenant that left is kept for the next tenant of its name.
    DebtKept {
        /// The tenant.
        tenant: ClientId,
        /// Name of its instance.
        name: String,
        /// The overuse.
        #[cfg_attr(feature = "serde", serde(rename = "owed_ns"))]
        owed: Duration,
        /// The share of time that pays it back.
        limit: Quota,
    },
    /// A tenant takes no part in vertical scaling: its share is fixed.
    NotScaled {
        /// The tenant that is not scaled.
        tenant: ClientId,
        /// Name of its instance.
        name: String,
        /// Its share.
        quota: QuotaRange,
        /// Why it is not scaled.
        why: String,
    },
}

/// The limit that is in the way of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum MemoryBound {
    /// The limit of the instance.
    Instance,
    /// The memory of the device, less its headroom.
    Device,
}

/// Kinds of [`TokenError`], each with its short, fixed name.
macro_rules! token_faults {
    ($($fault:ident $label:literal),+) => {
        /// Why the token scheduler refused an event.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
        #[non_exhaustive]
        #[expect(missing_docs, reason = "those of TokenError")]
        pub enum TokenFault {
            $($fault,)+
            Other,
        }

        impl TokenFault {
            /// A short, fixed name for counters.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$fault => $label,)+
                    Self::Other => "other",
                }
            }
        }

        impl From<&TokenError> for TokenFault {
            fn from(error: &TokenError) -> Self {
                match error {
                    $(TokenError::$fault { .. } => Self::$fault,)+
                    _ => Self::Other,
                }
            }
        }
    };
}

token_faults!(
    UsageShrank "usage_shrank", UnknownClient "unknown_client", ClientExists "client_exists",
    TooManyClients "too_many_clients", UnknownGpu "unknown_gpu", BadShare "bad_share", TimeWentBack "time_went_back"
);

/// Why a node refused an event. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// A connection without an accepted Hello: `frame` is not one. The host drops the connection.
    #[error("{conn} is unknown: {frame} before Hello")]
    UnknownConnection {
        /// The connection.
        conn: ConnId,
        /// Name of the message, or `Closed`.
        frame: &'static str,
    },
    /// A configuration that cannot be put in force.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Frames as the hexadecimal digits of their wire encoding.
#[cfg(feature = "serde")]
fn hex_of(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(feature = "serde")]
mod to_client_hex {
    use gshare_core::wire::ToClient;
    use serde::Serializer;

    pub(super) fn serialize<S: Serializer>(frame: &ToClient, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = Vec::new();
        frame.encode(0, &mut bytes);
        serializer.serialize_str(&super::hex_of(&bytes))
    }
}

#[cfg(feature = "serde")]
mod to_daemon_hex {
    use gshare_core::wire::ToDaemon;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(frame: &ToDaemon, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = Vec::new();
        frame.encode(0, &mut bytes);
        serializer.serialize_str(&super::hex_of(&bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ToDaemon, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let digit = |at: usize| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(digit).collect();
        let bytes = bytes.ok_or_else(|| D::Error::custom("a frame is pairs of hexadecimal digits"))?;
        ToDaemon::decode(&bytes).map(|(_, frame)| frame).map_err(D::Error::custom)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Refusal {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;
        let mut fields = serializer.serialize_struct("Refusal", 2)?;
        fields.serialize_field("code", &self.code())?;
        fields.serialize_field("text", &self.to_string())?;
        fields.end()
    }
}
