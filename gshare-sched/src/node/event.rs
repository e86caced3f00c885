//! The events of a node, and its answers: actions, notes for observers, and errors.

use super::{NodeConfig, Refusal, Usage};
use gshare_core::reason::{Obstacle, Wait};
use gshare_core::wire::{RefusalCode, Residence, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConfigError, ConnId, DeviceUuid, Duration, GpuId, Quota, QuotaRange, TimeWentBack,
    Timestamp, TokenAction, TokenError, TokenEvent,
};

/// The process at the other end of a connection, as the kernel states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Peer {
    /// The process number; 0 if its PID namespace cannot be seen from here.
    pub pid: i32,
    /// The user of the process.
    pub uid: u32,
}

/// An input of the node: a frame, a change of its surroundings, or a question.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum NodeEvent {
    /// A frame arrived. The node knows a connection from its accepted Hello on.
    Received {
        /// The connection of the frame.
        conn: ConnId,
        /// The sender.
        peer: Peer,
        /// The message; serialised as the hexadecimal digits of its wire encoding with sequence number 0.
        #[cfg_attr(feature = "serde", serde(with = "to_daemon_hex"))]
        frame: ToDaemon,
    },
    /// A connection or its process is gone, or the host has carried out a [`NodeAction::Drop`].
    Closed {
        /// The closed connection.
        conn: ConnId,
    },
    /// Another configuration is in force from now on.
    Reloaded {
        /// The new configuration.
        config: Box<NodeConfig>,
    },
    /// The driver knows a device of the node. The host says so before a process attaches to the device, or when the driver comes up.
    DeviceFound {
        /// The device's UUID, in the driver's spelling.
        uuid: DeviceUuid,
        /// The device's memory.
        memory: Bytes,
    },
    /// The operator asks for the memory in use by all clients.
    UseAsked {
        /// The host's number of the question; [`NodeAction::UseKnown`] repeats it.
        question: u32,
    },
    /// A user asks for the memory of an instance to go to host memory, or to come back. [`Node::can_park`](super::Node::can_park) tells
    /// beforehand whether it can.
    ParkAsked {
        /// The name of the instance.
        name: String,
        /// The asking user; 0 may ask for every instance.
        uid: u32,
        /// Whether to host memory.
        on: bool,
        /// Whether the memory stays there until it is asked back, even if the program misses it.
        #[cfg_attr(feature = "serde", serde(default))]
        holds: bool,
    },
    /// [`Engine::next_deadline`](gshare_core::Engine::next_deadline) has come.
    DeadlineReached,
}

/// An order for the host, which carries out its orders in sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
pub enum NodeAction {
    /// Send a frame.
    Send {
        /// The connection of the frame.
        conn: ConnId,
        /// The frame; serialised as the hexadecimal digits of its wire encoding with sequence number 0.
        #[cfg_attr(feature = "serde", serde(serialize_with = "to_client_hex::serialize"))]
        frame: ToClient,
    },
    /// Close the connection after all earlier frames are sent, and report [`NodeEvent::Closed`].
    Drop {
        /// The connection to close.
        conn: ConnId,
        /// The reason for the peer.
        reason: RefusalCode,
    },
    /// No more answers about memory in use will come: the host can now answer the question from [`Node::clients`](super::Node::clients).
    UseKnown {
        /// The number of the question.
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
    /// The token scheduler has accepted an event. Its orders follow, each as a [`Note::TokenOrder`].
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
        /// The reason for the refusal.
        fault: TokenFault,
    },
    /// The event has changed nothing, so a replay does not need it.
    NoEffect,
    /// A process has attached to a device.
    Admitted {
        /// The connection of the process.
        conn: ConnId,
        /// The client's id, as the process knows it.
        client: ClientId,
        /// The client's tenant, which is a client of the token scheduler.
        tenant: ClientId,
        /// The device.
        gpu: GpuId,
        /// The name of the instance.
        name: String,
        /// The process.
        pid: i32,
    },
    /// A client has left a device.
    Left {
        /// The departed client.
        client: ClientId,
        /// The client's tenant.
        tenant: ClientId,
        /// The client's use of the device.
        usage: Usage,
    },
    /// The node has refused a process or one of its requests.
    Refused {
        /// The connection of the process.
        conn: ConnId,
        /// The name of the instance.
        name: String,
        /// The reason for the refusal.
        refusal: Refusal,
    },
    /// A connection has broken the protocol, and the node drops it.
    Violation {
        /// The connection of the process.
        conn: ConnId,
        /// The broken rule, as a text for people.
        what: &'static str,
    },
    /// A launch of a client begins a long wait, changes the reason for it, or ends it.
    Waiting {
        /// The client.
        client: ClientId,
        /// The reason, as the process states it; `None`: the wait is over.
        reason: Option<Wait>,
    },
    /// The place of a client's movable memory, as its process states it.
    Parking {
        /// The client.
        client: ClientId,
        /// The place.
        residence: Residence,
        /// Bytes that can move, or that have moved.
        bytes: Bytes,
        /// Why the last move failed, or why no byte can move.
        obstacle: Option<Obstacle>,
    },
    /// The node has ordered a client's memory to host memory, or back.
    ParkOrdered {
        /// The client.
        client: ClientId,
        /// Whether to host memory.
        on: bool,
        /// Bytes to be moved.
        bytes: Bytes,
        /// The client that needs the memory; `None` for an order of a user, and for a return.
        ordered_for: Option<ClientId>,
    },
    /// A client has asked for a token, and waits until the debt of its name is paid.
    DebtWait {
        /// The waiting client.
        client: ClientId,
        /// The end of the wait.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// The overuse still to be paid.
        #[cfg_attr(feature = "serde", serde(rename = "owed_ns"))]
        owed: Duration,
        /// The share of time by which the overuse is paid.
        limit: Quota,
    },
    /// A tenant has reached its limit and gets no token before `until`.
    Throttled {
        /// The throttled tenant.
        tenant: ClientId,
        /// The end of the wait.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// GPU time used in this window, with the overuse of earlier windows.
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
        /// The tenant's limit.
        limit: Quota,
        /// The length of the window.
        #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
        window: Duration,
    },
    /// The node has denied a reservation of memory.
    MemoryDenied {
        /// The client of the reservation.
        client: ClientId,
        /// Bytes needed by the client.
        #[cfg_attr(feature = "serde", serde(rename = "asked_bytes"))]
        asked: Bytes,
        /// Bytes free for the client.
        #[cfg_attr(feature = "serde", serde(rename = "free_bytes"))]
        free: Bytes,
        /// The kind of the limit in the way.
        of: MemoryBound,
        /// The size of the limit.
        #[cfg_attr(feature = "serde", serde(rename = "limit_bytes"))]
        limit: Bytes,
        /// Bytes held under that limit.
        #[cfg_attr(feature = "serde", serde(rename = "held_bytes"))]
        held: Bytes,
    },
    /// The overuse of a departed tenant stays as a debt for the next tenant of its name.
    DebtKept {
        /// The departed tenant.
        tenant: ClientId,
        /// The name of the instance.
        name: String,
        /// The overuse.
        #[cfg_attr(feature = "serde", serde(rename = "owed_ns"))]
        owed: Duration,
        /// The share of time by which the overuse is paid.
        limit: Quota,
    },
    /// A tenant takes no part in vertical scaling, so its share is fixed.
    NotScaled {
        /// The tenant with the fixed share.
        tenant: ClientId,
        /// The name of the instance.
        name: String,
        /// The tenant's share.
        quota: QuotaRange,
        /// The reason, from the vertical scaler.
        why: String,
    },
}

/// The kind of limit in the way of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum MemoryBound {
    /// The limit of the instance.
    Instance,
    /// The memory of the device, less its headroom.
    Device,
    /// The device's memory less the guaranteed memory of others, where memory is asked for that cannot move.
    Guaranteed,
    /// The device's memory, where other clients may not be parked yet.
    Residents,
    /// The host memory of the user of the clients that would have to park.
    ParkMemory {
        /// The user.
        uid: u32,
    },
}

/// Kinds of [`TokenError`], each with its short, fixed name.
macro_rules! token_faults {
    ($($fault:ident $label:literal),+) => {
        /// The reason of the token scheduler for refusing an event.
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

/// The reason of a node for refusing an event, which then has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// `now` is earlier than at the event before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// `frame` came on a connection without an accepted Hello, and is none itself. The host drops the connection.
    #[error("{conn} is unknown: {frame} before Hello")]
    UnknownConnection {
        /// The connection.
        conn: ConnId,
        /// The name of the message, or `Closed`.
        frame: &'static str,
    },
    /// The configuration cannot be put in force.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The hexadecimal digits of a frame's wire encoding.
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
