//! Frames between a manager and a model process.
//!
//! They share a `SOCK_SEQPACKET` socket, which is the standard input of the model process: a frame is a packet, so nothing is
//! ever cut in two, and the end of either side is the end of the connection. Integers are little-endian.
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0 | version | 1 |
//! | 1 | kind | `Run` 1; `Ready` 16, `Failed` 17, `Done` 18 |
//! | 2..4 | more | `Run`: how many of the next frames run together with this one; else 0 |
//! | 4..8 | | 0 |
//! | 8..16 | request | `Run`, `Done`: its name; else 0 |
//! | 16..24 | value | `Ready`: bytes of GPU memory taken; `Done`: time of the run (of the whole batch) in ns; else 0 |
//! | 24.. | payload | `Run`: the input; `Done`: the output; `Failed`: why, UTF-8; at most [`MAX_PAYLOAD`] |
//!
//! A process loads its model when it starts, by what its command line says, and then says `Ready` or `Failed`. From then on it
//! answers each `Run` with a `Done`. It ends when the socket does. In Python: `socket.socket(fileno=0)`.

use gshare_core::{Bytes, Duration, RequestId};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;

/// Largest input or output of a request: what is larger goes through shared memory or a file, and its name through here.
pub const MAX_PAYLOAD: usize = 1 << 16;

const HEADER: usize = 24;
const VERSION: u8 = 1;

/// From a manager to a model process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToModel {
    /// Run a request.
    Run {
        /// The request to run.
        request: RequestId,
        /// How many of the next ones run together with it.
        more: u16,
        /// Its input.
        input: Vec<u8>,
    },
}

/// From a model process to its manager.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FromModel {
    /// The model is loaded.
    Ready {
        /// GPU memory it takes.
        memory: Bytes,
    },
    /// The model cannot be loaded; the process ends.
    Failed {
        /// Why it failed.
        reason: String,
    },
    /// A request is done.
    Done {
        /// The request that asked.
        request: RequestId,
        /// How long it ran; the whole batch, for each of a batch.
        took: Duration,
        /// Its output.
        output: Vec<u8>,
    },
}

/// Why a packet is no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Shorter than a header, or longer than a header and a payload.
    #[error("frame has {length} bytes: need {HEADER} to {}", HEADER + MAX_PAYLOAD)]
    Length {
        /// Its length.
        length: usize,
    },
    /// Another version of the protocol.
    #[error("version is {0}: need {VERSION}")]
    Version(u8),
    /// No such frame in this direction.
    #[error("kind is {0}: unknown in this direction")]
    Kind(u8),
    /// A field that must be 0, or a text that is not UTF-8.
    #[error("{0} is not what the kind allows")]
    Field(&'static str),
}

struct Header {
    kind: u8,
    more: u16,
    request: u64,
    value: u64,
}

fn encode(header: &Header, payload: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.extend([VERSION, header.kind]);
    out.extend(header.more.to_le_bytes());
    out.extend([0; 4]);
    out.extend(header.request.to_le_bytes());
    out.extend(header.value.to_le_bytes());
    out.extend(&payload[..payload.len().min(MAX_PAYLOAD)]);
}

fn decode(bytes: &[u8]) -> Result<(Header, &[u8]), FrameError> {
    let length = bytes.len();
    let (header, payload) = bytes.split_first_chunk::<HEADER>().ok_or(FrameError::Length { length })?;
    if payload.len() > MAX_PAYLOAD {
        return Err(FrameError::Length { length });
    }
    let [version, kind, m0, m1, z0, z1, z2, z3, numbers @ ..] = *header;
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    if [z0, z1, z2, z3] != [0; 4] {
        return Err(FrameError::Field("padding"));
    }
    let number =
        |at: usize| numbers[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let header = Header { kind, more: u16::from_le_bytes([m0, m1]), request: number(0), value: number(8) };
    Ok((header, payload))
}

fn zero(value: u64, field: &'static str) -> Result<(), FrameError> {
    if value == 0 { Ok(()) } else { Err(FrameError::Field(field)) }
}

impl ToModel {
    /// The frame, in place of what `out` held.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let Self::Run { request, more, input } = self;
        encode(&Header { kind: 1, more: *more, request: request.number(), value: 0 }, input, out);
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// When the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let (Header { kind, more, request, value }, payload) = decode(bytes)?;
        zero(value, "value")?;
        match kind {
            1 => Ok(Self::Run { request: RequestId::new(request), more, input: payload.to_vec() }),
            _ => Err(FrameError::Kind(kind)),
        }
    }
}

impl FromModel {
    /// The frame, in place of what `out` held.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let header = |kind, request, value| Header { kind, more: 0, request, value };
        match self {
            Self::Ready { memory } => encode(&header(16, 0, memory.0), &[], out),
            Self::Failed { reason } => {
                let mut end = reason.len().min(MAX_PAYLOAD);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                encode(&header(17, 0, 0), &reason.as_bytes()[..end], out);
            }
            Self::Done { request, took, output } => {
                encode(&header(18, request.number(), took.as_nanos()), output, out);
            }
        }
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// When the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let (Header { kind, more, request, value }, payload) = decode(bytes)?;
        zero(more.into(), "more")?;
        match kind {
            16 => {
                zero(request, "request")?;
                zero(payload.len() as u64, "payload")?;
                Ok(Self::Ready { memory: Bytes(value) })
            }
            17 => {
                zero(request | value, "request")?;
                let reason = String::from_utf8(payload.to_vec());
                Ok(Self::Failed { reason: reason.map_err(|_| FrameError::Field("payload"))? })
            }
            18 => Ok(Self::Done {
                request: RequestId::new(request),
                took: Duration::from_nanos(value),
                output: payload.to_vec(),
            }),
            _ => Err(FrameError::Kind(kind)),
        }
    }
}

/// The model process's end of its socket, for model processes in Rust.
#[derive(Debug)]
pub struct ModelPort {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl ModelPort {
    /// The standard input of this process, as a manager starts it.
    ///
    /// # Errors
    /// When it is closed.
    pub fn from_stdin() -> io::Result<Self> {
        Ok(Self::new(io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// One end of a `SOCK_SEQPACKET` pair.
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket, buffer: Vec::new() }
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// When the manager is gone.
    pub fn send(&mut self, frame: &FromModel) -> io::Result<()> {
        frame.encode(&mut self.buffer);
        Ok(retry(|| send(&self.socket, &self.buffer, SendFlags::NOSIGNAL)).map(|_| ())?)
    }

    /// Waits for the next frame; `None` when the manager is gone.
    ///
    /// # Errors
    /// When what comes is no frame, or the standard input is no such socket.
    pub fn receive(&mut self) -> io::Result<Option<ToModel>> {
        self.buffer.resize(HEADER + MAX_PAYLOAD + 1, 0);
        let (length, _) = match retry(|| recv(&self.socket, &mut self.buffer, RecvFlags::empty())) {
            Err(Errno::CONNRESET) => return Ok(None),
            other => other?,
        };
        if length == 0 {
            return Ok(None);
        }
        ToModel::decode(&self.buffer[..length]).map(Some).map_err(io::Error::other)
    }
}

impl AsFd for ModelPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// The next frame at the manager's end: `Ok(None)` when there is none now, `Err(None)` at the end of the connection.
pub(super) fn take(socket: &OwnedFd, buffer: &mut Vec<u8>) -> Result<Option<FromModel>, Option<FrameError>> {
    buffer.resize(HEADER + MAX_PAYLOAD + 1, 0);
    let length = match retry(|| recv(socket, &mut *buffer, RecvFlags::DONTWAIT)) {
        Err(Errno::AGAIN) => return Ok(None),
        Err(_) => return Err(None),
        Ok((0, _)) => return Err(None),
        Ok((length, _)) => length,
    };
    FromModel::decode(&buffer[..length]).map(Some).map_err(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = FromModel> {
        prop_oneof![
            any::<u64>().prop_map(|memory| FromModel::Ready { memory: Bytes(memory) }),
            ".{0,40}".prop_map(|reason| FromModel::Failed { reason }),
            (any::<u64>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..100)).prop_map(
                |(request, took, output)| FromModel::Done {
                    request: RequestId::new(request),
                    took: Duration::from_nanos(took),
                    output,
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_is_read_as_it_was_written(
            from in frames(), request: u64, more: u16, input in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut bytes = Vec::new();
            from.encode(&mut bytes);
            prop_assert_eq!(FromModel::decode(&bytes), Ok(from));
            let to = ToModel::Run { request: RequestId::new(request), more, input };
            to.encode(&mut bytes);
            prop_assert_eq!(ToModel::decode(&bytes), Ok(to));
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut again = Vec::new();
            if let Ok(frame) = FromModel::decode(&bytes) {
                frame.encode(&mut again);
                prop_assert_eq!(&again, &bytes);
            }
            if let Ok(frame) = ToModel::decode(&bytes) {
                frame.encode(&mut again);
                prop_assert_eq!(&again, &bytes);
            }
        }
    }

    #[test]
    fn a_bad_frame_is_an_error_that_names_the_field() {
        let error = |bytes: &[u8]| FromModel::decode(bytes).unwrap_err().to_string();
        assert_eq!(error(&[1; 23]), "frame has 23 bytes: need 24 to 65560");
        let mut bytes = Vec::new();
        FromModel::Ready { memory: Bytes(5) }.encode(&mut bytes);
        bytes[0] = 2;
        assert_eq!(error(&bytes), "version is 2: need 1");
        (bytes[0], bytes[1]) = (1, 1);
        assert_eq!(error(&bytes), "kind is 1: unknown in this direction");
        (bytes[1], bytes[5]) = (16, 1);
        assert_eq!(error(&bytes), "padding is not what the kind allows");
    }
}
