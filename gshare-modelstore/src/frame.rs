//! The frames between a store and its clients.
//!
//! # Problem
//! A store serves processes that it does not trust, and clients outlive the store they were built for. So a frame is small,
//! versioned and checked before any of it is believed, and large things (manifests, headers, lists) never travel in a frame: they
//! are memory files whose descriptors do.
//!
//! # Terms
//! One frame is one packet of a `SOCK_SEQPACKET` Unix socket, at most [`MAX_FRAME`] bytes, little-endian:
//!
//! ```text
//!  0        1        2                4                8
//! +--------+--------+----------------+----------------+----- - -
//! |version | kind   | length (whole) | request        | payload
//! +--------+--------+----------------+----------------+----- - -
//! ```
//! `request` is the client's number for it; the answer carries the same. A text is a length of two bytes and UTF-8.
//!
//! # Conversation
//! ```text
//! client                                          store
//!  Get{tier, timeout, name or hash}        ──▶
//!                                          ◀──  Served{arena, ...}    + what `handle` says: manifest, arena, or both in one
//!  Release{arena}                          ──▶                        no answer
//!  PutFile{tier, access, name}    + file   ──▶
//!                                          ◀──  Progress*, Stored{content, ...}
//!  PutBegin{tier, access, header, name} + header ──▶
//!                                          ◀──  Writable{arena, ...}  + manifest, + arena, to be written
//!  Commit{arena} or Abort{arena}           ──▶
//!                                          ◀──  Stored or Done
//!  Pin, Evict, Verify                      ──▶
//!                                          ◀──  Done
//!  List, Stat, Status                      ──▶
//!                                          ◀──  Document{bytes}       + JSON
//! any of them                              ◀──  Refused{code, text}
//! ```
//! A store that does not take a connection says so before it closes it: `Refused` with the number 0, which no request has that is
//! answered.
//!
//! The store drops a connection that sends anything else.

use crate::bounds::{Exceeded, Resource};
use gshare_core::store::{Access, ContentHash, MemoryTier, RefuseReason};

/// Version of the format; the first byte of every frame.
pub const VERSION: u8 = 1;
/// Bytes of the header.
pub const HEADER: usize = 8;
/// The longest frame in bytes.
pub const MAX_FRAME: usize = 1024;
/// The longest name of a model in bytes.
pub const MAX_NAME: usize = 255;
/// The longest text of a refusal in bytes.
pub const MAX_TEXT: usize = 400;
/// Most descriptors that come with a frame.
pub const MAX_DESCRIPTORS: usize = 2;

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not as long as it says, or longer than allowed.
    #[error("frame of {bytes} bytes: need {HEADER} to {MAX_FRAME}, and the length it says")]
    Length {
        /// Its length.
        bytes: usize,
    },
    /// Another version.
    #[error("version {version}: this side speaks {VERSION}")]
    Version {
        /// The other side's version.
        version: u8,
    },
    /// No such kind.
    #[error("kind {kind} is not known")]
    Kind {
        /// The kind that came.
        kind: u8,
    },
    /// A field that cannot be.
    #[error("field `{field}` cannot be what it is")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
}

/// The model that is asked for, by name or by content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// A model by its name.
    Name(String),
    /// Any model of this content that the client may read.
    Content(ContentHash),
}

/// From a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request {
    /// A reference to a model.
    Get {
        /// The tier of memory it should be in.
        tier: MemoryTier,
        /// How long to wait for a load.
        timeout_ms: u32,
        /// The name or hash of the model.
        wanted: Wanted,
    },
    /// Gives a reference back; not answered.
    Release {
        /// The arena to give back.
        arena: u64,
    },
    /// Loads a safetensors file, whose descriptor comes with it, and keeps it as the model's source.
    PutFile {
        /// Where to.
        tier: MemoryTier,
        /// The clients that may read it.
        access: Access,
        /// Name of the model.
        name: String,
    },
    /// Begins to write a model whose safetensors header comes as a descriptor.
    PutBegin {
        /// Where to.
        tier: MemoryTier,
        /// The clients that may read it.
        access: Access,
        /// Bytes of the header, its length not counted.
        header_bytes: u64,
        /// Name of the model.
        name: String,
    },
    /// The model that was begun is written.
    Commit {
        /// The arena that was written.
        arena: u64,
    },
    /// The model that was begun is given up.
    Abort {
        /// The arena that is given up.
        arena: u64,
    },
    /// Keeps a model in memory, or no longer.
    Pin {
        /// True to keep it, false to let it go.
        pinned: bool,
        /// Name of the model to pin, or to unpin.
        name: String,
    },
    /// Takes a model out of memory.
    Evict {
        /// Forget its source as well.
        forget: bool,
        /// Name of the model to evict.
        name: String,
    },
    /// Hashes a model again.
    Verify {
        /// Name of the model to hash.
        name: String,
    },
    /// All models that the client may read.
    List,
    /// The store's figures.
    Stat,
    /// Arenas, models and clients of the store: a [`Status`](crate::status::Status).
    Status,
}

/// How an arena is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Handle {
    /// A sealed memory file, to be mapped: the arena, and the manifest behind it.
    HostFile,
    /// Two of them: the manifest's, and the arena's. So it is with a model that a client wrote, whose file was full before its
    /// hashes were known.
    HostFiles,
    /// A descriptor of GPU memory, to be imported.
    CudaVmm,
    /// 64 bytes, to be opened with `cuIpcOpenMemHandle`.
    CudaIpc([u8; 64]),
}

/// From the store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// A reference was taken.
    Served {
        /// To which arena.
        arena: u64,
        /// Bytes of the arena.
        bytes: u64,
        /// Bytes of the manifest.
        manifest_bytes: u64,
        /// Hash of the model's content.
        content: ContentHash,
        /// How the arena is handed out.
        handle: Handle,
    },
    /// The arena may be written.
    Writable {
        /// The arena to write to.
        arena: u64,
        /// Bytes of the arena.
        bytes: u64,
        /// Bytes of the manifest.
        manifest_bytes: u64,
    },
    /// The model is there.
    Stored {
        /// Hash of the model's content.
        content: ContentHash,
        /// Bytes of its arena.
        bytes: u64,
    },
    /// The request is done.
    Done,
    /// A load goes on.
    Progress {
        /// Bytes loaded.
        done: u64,
        /// Bytes of the whole load.
        total: u64,
    },
    /// JSON in the descriptor that comes with it.
    Document {
        /// How long.
        bytes: u64,
    },
    /// No, from the store.
    Refused {
        /// Why, for programs.
        code: Code,
        /// Why, for people.
        text: String,
    },
}

macro_rules! codes {
    ($($name:ident $code:literal,)*) => {
        /// Why the store refuses, for programs.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "those of the engine, and a few of the server; the text says more")]
        #[non_exhaustive]
        pub enum Code { $($name,)* }

        impl Code {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its number.
            pub const fn number(self) -> u16 {
                match self { $(Self::$name => $code,)* }
            }

            fn from_number(number: u16) -> Option<Self> {
                match number { $($code => Some(Self::$name),)* _ => None }
            }
        }
    };
}
codes! {
    UnknownModel 1,
    NotAllowed 2,
    NameTaken 3,
    ModelTooLarge 4,
    StoreFull 5,
    TenantBytes 6,
    TenantModels 7,
    TenantLoads 8,
    NotResident 9,
    LoadFailed 10,
    TimedOut 11,
    InUse 12,
    TooManyModels 13,
    BadHeader 14,
    BadRequest 15,
    StillMapped 16,
    Corrupt 17,
    Io 18,
    UidConnections 19,
    UidDescriptors 20,
    UidUnread 21,
    UidMemory 22,
    UidModels 23,
    HeaderWork 24,
}

impl From<&Exceeded> for Code {
    fn from(exceeded: &Exceeded) -> Self {
        match exceeded {
            Exceeded::Work { .. } => Self::HeaderWork,
            Exceeded::Held { resource, .. } => match resource {
                Resource::Connections => Self::UidConnections,
                Resource::Descriptors => Self::UidDescriptors,
                Resource::Unread => Self::UidUnread,
                Resource::Models => Self::UidModels,
                Resource::Memory => Self::UidMemory,
            },
        }
    }
}

impl From<RefuseReason> for Code {
    fn from(reason: RefuseReason) -> Self {
        match reason {
            RefuseReason::UnknownModel => Self::UnknownModel,
            RefuseReason::NotAllowed => Self::NotAllowed,
            RefuseReason::NameTaken => Self::NameTaken,
            RefuseReason::ModelTooLarge => Self::ModelTooLarge,
            RefuseReason::StoreFull => Self::StoreFull,
            RefuseReason::TenantBytes => Self::TenantBytes,
            RefuseReason::TenantModels => Self::TenantModels,
            RefuseReason::TenantLoads => Self::TenantLoads,
            RefuseReason::NotResident => Self::NotResident,
            RefuseReason::TimedOut => Self::TimedOut,
            RefuseReason::InUse => Self::InUse,
            RefuseReason::TooManyModels => Self::TooManyModels,
            _ => Self::LoadFailed,
        }
    }
}

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn text(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.0.extend(u16::try_from(end).unwrap_or(0).to_le_bytes());
        self.0.extend(&text.as_bytes()[..end]);
    }

    fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Field { field })?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self, field: &'static str) -> Result<u8, FrameError> {
        Ok(self.take::<1>(field)?[0])
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.byte(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Field { field }),
        }
    }

    fn long(&mut self, field: &'static str) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.take(field)?))
    }

    fn text(&mut self, field: &'static str, most: usize) -> Result<String, FrameError> {
        let length = usize::from(u16::from_le_bytes(self.take(field)?));
        let text: &'a [u8] =
            self.0.get(..length).filter(|_| length <= most).ok_or(FrameError::Field { field })?;
        self.0 = &self.0[length..];
        String::from_utf8(text.to_vec()).map_err(|_| FrameError::Field { field })
    }

    fn name(&mut self) -> Result<String, FrameError> {
        let name = self.text("name", MAX_NAME)?;
        let fine = !name.is_empty() && !name.chars().any(char::is_control);
        if fine { Ok(name) } else { Err(FrameError::Field { field: "name" }) }
    }

    fn tier(&mut self) -> Result<MemoryTier, FrameError> {
        let tier = usize::from(self.byte("tier")?);
        MemoryTier::ALL.get(tier).copied().ok_or(FrameError::Field { field: "tier" })
    }

    fn access(&mut self) -> Result<Access, FrameError> {
        let all = [Access::Private, Access::Group, Access::Public];
        all.get(usize::from(self.byte("access")?)).copied().ok_or(FrameError::Field { field: "access" })
    }
}

/// Fills in the head of a frame that begins at `start`.
fn seal(out: &mut [u8], kind: u8, request: u32) {
    let length = u16::try_from(out.len()).unwrap_or(u16::MAX);
    out[0] = VERSION;
    out[1] = kind;
    out[2..4].copy_from_slice(&length.to_le_bytes());
    out[4..8].copy_from_slice(&request.to_le_bytes());
}

/// Gives an encoded frame another number.
pub(crate) fn renumber(frame: &mut [u8], request: u32) {
    if let Some(number) = frame.get_mut(4..HEADER) {
        number.copy_from_slice(&request.to_le_bytes());
    }
}

/// Kind, request and payload.
fn open(bytes: &[u8]) -> Result<(u8, u32, Reader<'_>), FrameError> {
    let length = FrameError::Length { bytes: bytes.len() };
    let (head, payload) = bytes.split_first_chunk::<HEADER>().ok_or(length)?;
    if head[0] != VERSION {
        return Err(FrameError::Version { version: head[0] });
    }
    if bytes.len() > MAX_FRAME || usize::from(u16::from_le_bytes([head[2], head[3]])) != bytes.len() {
        return Err(length);
    }
    Ok((head[1], u32::from_le_bytes([head[4], head[5], head[6], head[7]]), Reader(payload)))
}

fn complete<T>(value: T, rest: &Reader<'_>) -> Result<T, FrameError> {
    if rest.0.is_empty() { Ok(value) } else { Err(FrameError::Field { field: "end" }) }
}

impl Request {
    /// Appends the frame. A name that is too long is cut, and will be refused as unknown.
    pub fn encode(&self, request: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEADER]);
        let mut to = Writer(out);
        let kind = match self {
            Self::Get { tier, timeout_ms, wanted } => {
                to.0.push(*tier as u8);
                to.0.extend(timeout_ms.to_le_bytes());
                match wanted {
                    Wanted::Name(name) => {
                        to.0.push(0);
                        to.text(name, MAX_NAME);
                    }
                    Wanted::Content(content) => {
                        to.0.push(1);
                        to.0.extend(content.0);
                    }
                }
                1
            }
            Self::Release { arena } => {
                to.long(*arena);
                2
            }
            Self::PutFile { tier, access, name } => {
                to.0.extend([*tier as u8, *access as u8]);
                to.text(name, MAX_NAME);
                3
            }
            Self::PutBegin { tier, access, header_bytes, name } => {
                to.0.extend([*tier as u8, *access as u8]);
                to.long(*header_bytes);
                to.text(name, MAX_NAME);
                4
            }
            Self::Commit { arena } => {
                to.long(*arena);
                5
            }
            Self::Abort { arena } => {
                to.long(*arena);
                6
            }
            Self::Pin { pinned, name } => {
                to.0.push(u8::from(*pinned));
                to.text(name, MAX_NAME);
                7
            }
            Self::Evict { forget, name } => {
                to.0.push(u8::from(*forget));
                to.text(name, MAX_NAME);
                8
            }
            Self::Verify { name } => {
                to.text(name, MAX_NAME);
                9
            }
            Self::List => 10,
            Self::Stat => 11,
            Self::Status => 12,
        };
        seal(&mut out[start..], kind, request);
    }

    /// Request number and request.
    ///
    /// # Errors
    /// The field that cannot be; everything that was not encoded by [`Request::encode`] is an error.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), FrameError> {
        let (kind, request, mut from) = open(bytes)?;
        let message = match kind {
            1 => {
                let tier = from.tier()?;
                let timeout_ms = u32::from_le_bytes(from.take("timeout_ms")?);
                let wanted = match from.byte("wanted")? {
                    0 => Wanted::Name(from.name()?),
                    1 => Wanted::Content(ContentHash(from.take("content")?)),
                    _ => return Err(FrameError::Field { field: "wanted" }),
                };
                Self::Get { tier, timeout_ms, wanted }
            }
            2 => Self::Release { arena: from.long("arena")? },
            3 => Self::PutFile { tier: from.tier()?, access: from.access()?, name: from.name()? },
            4 => {
                let (tier, access) = (from.tier()?, from.access()?);
                Self::PutBegin { tier, access, header_bytes: from.long("header_bytes")?, name: from.name()? }
            }
            5 => Self::Commit { arena: from.long("arena")? },
            6 => Self::Abort { arena: from.long("arena")? },
            7 => Self::Pin { pinned: from.flag("pinned")?, name: from.name()? },
            8 => Self::Evict { forget: from.flag("forget")?, name: from.name()? },
            9 => Self::Verify { name: from.name()? },
            10 => Self::List,
            11 => Self::Stat,
            12 => Self::Status,
            kind => return Err(FrameError::Kind { kind }),
        };
        complete((request, message), &from)
    }

    /// How many descriptors must come with it.
    pub const fn descriptors(&self) -> usize {
        match self {
            Self::PutFile { .. } | Self::PutBegin { .. } => 1,
            _ => 0,
        }
    }
}

impl Answer {
    /// Appends the frame.
    pub fn encode(&self, request: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEADER]);
        let mut to = Writer(out);
        let kind = match self {
            Self::Served { arena, bytes, manifest_bytes, content, handle } => {
                [*arena, *bytes, *manifest_bytes].into_iter().for_each(|value| to.long(value));
                to.0.extend(content.0);
                match handle {
                    Handle::HostFile => to.0.push(0),
                    Handle::HostFiles => to.0.push(3),
                    Handle::CudaVmm => to.0.push(1),
                    Handle::CudaIpc(handle) => {
                        to.0.push(2);
                        to.0.extend(handle);
                    }
                }
                129
            }
            Self::Writable { arena, bytes, manifest_bytes } => {
                [*arena, *bytes, *manifest_bytes].into_iter().for_each(|value| to.long(value));
                130
            }
            Self::Stored { content, bytes } => {
                to.0.extend(content.0);
                to.long(*bytes);
                131
            }
            Self::Done => 132,
            Self::Progress { done, total } => {
                [*done, *total].into_iter().for_each(|value| to.long(value));
                133
            }
            Self::Document { bytes } => {
                to.long(*bytes);
                134
            }
            Self::Refused { code, text } => {
                to.0.extend(code.number().to_le_bytes());
                to.text(text, MAX_TEXT);
                135
            }
        };
        seal(&mut out[start..], kind, request);
    }

    /// Request number and answer.
    ///
    /// # Errors
    /// As [`Request::decode`].
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), FrameError> {
        let (kind, request, mut from) = open(bytes)?;
        let message = match kind {
            129 => {
                let (arena, bytes) = (from.long("arena")?, from.long("bytes")?);
                let manifest_bytes = from.long("manifest_bytes")?;
                let content = ContentHash(from.take("content")?);
                let handle = match from.byte("handle")? {
                    0 => Handle::HostFile,
                    3 => Handle::HostFiles,
                    1 => Handle::CudaVmm,
                    2 => Handle::CudaIpc(from.take("handle")?),
                    _ => return Err(FrameError::Field { field: "handle" }),
                };
                Self::Served { arena, bytes, manifest_bytes, content, handle }
            }
            130 => {
                let (arena, bytes) = (from.long("arena")?, from.long("bytes")?);
                Self::Writable { arena, bytes, manifest_bytes: from.long("manifest_bytes")? }
            }
            131 => Self::Stored { content: ContentHash(from.take("content")?), bytes: from.long("bytes")? },
            132 => Self::Done,
            133 => Self::Progress { done: from.long("done")?, total: from.long("total")? },
            134 => Self::Document { bytes: from.long("bytes")? },
            135 => {
                let code = Code::from_number(u16::from_le_bytes(from.take("code")?));
                let code = code.ok_or(FrameError::Field { field: "code" })?;
                Self::Refused { code, text: from.text("text", MAX_TEXT)? }
            }
            kind => return Err(FrameError::Kind { kind }),
        };
        complete((request, message), &from)
    }

    /// How many descriptors come with it.
    pub const fn descriptors(&self) -> usize {
        match self {
            Self::Served { handle: Handle::CudaIpc(_) | Handle::HostFile, .. } | Self::Document { .. } => 1,
            Self::Served { .. } | Self::Writable { .. } => 2,
            _ => 0,
        }
    }
}
