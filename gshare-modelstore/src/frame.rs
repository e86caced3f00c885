//! The frames between a store and its clients.
//!
//! # Problem
//! A store serves untrusted processes, and clients may be older or newer than the store. So a frame is small, versioned and
//! fully checked before use. Large data (manifests, headers, lists) never travels in a frame, but in memory files with
//! their descriptors attached.
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
//! `request` is a number that the client chooses, and the answer repeats it. A text is a length of two bytes followed by
//! UTF-8.
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
//! A store that refuses a connection sends `Refused` with the number 0 before it closes it. Requests with an answer never
//! have this number.
//!
//! The store closes a connection after any other frame.

use crate::bounds::{Exceeded, Resource};
use crate::store::{Access, ContentHash, MemoryTier, RefuseReason};

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
/// Most descriptors attached to a frame.
pub const MAX_DESCRIPTORS: usize = 2;

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is longer than allowed, or its length differs from its header.
    #[error("frame of {bytes} bytes: need {HEADER} to {MAX_FRAME}, and the length it says")]
    Length {
        /// Length of the frame.
        bytes: usize,
    },
    /// Another version.
    #[error("version {version}: this side speaks {VERSION}")]
    Version {
        /// The other side's version.
        version: u8,
    },
    /// The kind is unknown.
    #[error("kind {kind} is not known")]
    Kind {
        /// The received kind.
        kind: u8,
    },
    /// A field has an invalid value.
    #[error("field `{field}` has an invalid value")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
}

/// The requested model, by name or by content.
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
    /// Gives a reference back; has no answer.
    Release {
        /// The arena to give back.
        arena: u64,
    },
    /// Loads a safetensors file from the attached descriptor, and keeps the file as the model's source.
    PutFile {
        /// Tier for the model.
        tier: MemoryTier,
        /// The clients that may read it.
        access: Access,
        /// Name of the model.
        name: String,
    },
    /// Begins to write a model with the safetensors header in the attached descriptor.
    PutBegin {
        /// Tier for the model.
        tier: MemoryTier,
        /// The clients that may read it.
        access: Access,
        /// Bytes of the header's JSON, without its length field.
        header_bytes: u64,
        /// Name of the model.
        name: String,
    },
    /// Commits the model after its last write.
    Commit {
        /// The written arena.
        arena: u64,
    },
    /// Gives up the model before its commit.
    Abort {
        /// The abandoned arena.
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

/// The form in which an arena is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Handle {
    /// A sealed memory file to map, with the arena and then the manifest.
    HostFile,
    /// Two sealed memory files, for the manifest and for the arena. A model written by a client has this form, because its
    /// file was full before its hashes were known.
    HostFiles,
    /// A descriptor of GPU memory to import.
    CudaVmm,
}

/// From the store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// A reference was taken.
    Served {
        /// The referenced arena.
        arena: u64,
        /// Bytes of the arena.
        bytes: u64,
        /// Bytes of the manifest.
        manifest_bytes: u64,
        /// Hash of the model's content.
        content: ContentHash,
        /// Form in which the arena is handed out.
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
    /// JSON in the attached descriptor.
    Document {
        /// Length of the JSON.
        bytes: u64,
    },
    /// The store refuses the request.
    Refused {
        /// The reason as a code.
        code: Code,
        /// The reason as text.
        text: String,
    },
}

macro_rules! codes {
    ($($name:ident $code:literal,)*) => {
        /// The reason for a refusal, for programs.
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the fields of a frame by reference, of every type")]
impl Writer<'_> {
    fn cut(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.0.extend(u16::try_from(end).unwrap_or(0).to_le_bytes());
        self.0.extend(&text.as_bytes()[..end]);
    }

    fn text(&mut self, text: &str) {
        self.cut(text, MAX_TEXT);
    }

    fn name(&mut self, name: &str) {
        self.cut(name, MAX_NAME);
    }

    fn flag(&mut self, flag: &bool) {
        self.0.push(u8::from(*flag));
    }

    fn int(&mut self, value: &u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn long(&mut self, value: &u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn tier(&mut self, tier: &MemoryTier) {
        self.0.push(*tier as u8);
    }

    fn access(&mut self, access: &Access) {
        self.0.push(*access as u8);
    }

    fn content(&mut self, content: &ContentHash) {
        self.0.extend(content.0);
    }

    fn wanted(&mut self, wanted: &Wanted) {
        match wanted {
            Wanted::Name(name) => {
                self.0.push(0);
                self.name(name);
            }
            Wanted::Content(content) => {
                self.0.push(1);
                self.content(content);
            }
        }
    }

    fn handle(&mut self, handle: &Handle) {
        match handle {
            Handle::HostFile => self.0.push(0),
            Handle::CudaVmm => self.0.push(1),
            Handle::HostFiles => self.0.push(3),
        }
    }

    fn code(&mut self, code: &Code) {
        self.0.extend(code.number().to_le_bytes());
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
        self.one_of(&[false, true], field)
    }

    fn int(&mut self, field: &'static str) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.take(field)?))
    }

    fn long(&mut self, field: &'static str) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.take(field)?))
    }

    fn most(&mut self, field: &'static str, most: usize) -> Result<String, FrameError> {
        let length = usize::from(u16::from_le_bytes(self.take(field)?));
        let text: &'a [u8] =
            self.0.get(..length).filter(|_| length <= most).ok_or(FrameError::Field { field })?;
        self.0 = &self.0[length..];
        String::from_utf8(text.to_vec()).map_err(|_| FrameError::Field { field })
    }

    fn text(&mut self, field: &'static str) -> Result<String, FrameError> {
        self.most(field, MAX_TEXT)
    }

    fn name(&mut self, field: &'static str) -> Result<String, FrameError> {
        let name = self.most(field, MAX_NAME)?;
        let fine = !name.is_empty() && !name.chars().any(char::is_control);
        if fine { Ok(name) } else { Err(FrameError::Field { field }) }
    }

    /// Reads an enum with these values.
    fn one_of<T: Copy>(&mut self, all: &[T], field: &'static str) -> Result<T, FrameError> {
        all.get(usize::from(self.byte(field)?)).copied().ok_or(FrameError::Field { field })
    }

    fn tier(&mut self, field: &'static str) -> Result<MemoryTier, FrameError> {
        self.one_of(&MemoryTier::ALL, field)
    }

    fn access(&mut self, field: &'static str) -> Result<Access, FrameError> {
        self.one_of(&[Access::Private, Access::Group, Access::Public], field)
    }

    fn content(&mut self, field: &'static str) -> Result<ContentHash, FrameError> {
        self.take(field).map(ContentHash)
    }

    fn wanted(&mut self, field: &'static str) -> Result<Wanted, FrameError> {
        match self.byte(field)? {
            0 => self.name("name").map(Wanted::Name),
            1 => self.content("content").map(Wanted::Content),
            _ => Err(FrameError::Field { field }),
        }
    }

    fn handle(&mut self, field: &'static str) -> Result<Handle, FrameError> {
        match self.byte(field)? {
            0 => Ok(Handle::HostFile),
            1 => Ok(Handle::CudaVmm),
            3 => Ok(Handle::HostFiles),
            _ => Err(FrameError::Field { field }),
        }
    }

    fn code(&mut self, field: &'static str) -> Result<Code, FrameError> {
        Code::from_number(u16::from_le_bytes(self.take(field)?)).ok_or(FrameError::Field { field })
    }
}

/// Fills in the header of a frame.
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

/// Encodes and decodes the frames of one side, from their kinds and field formats.
macro_rules! frames {
    ($of:ident { $($kind:literal $name:ident { $($field:ident: $written:ident),* },)+ }) => {
        impl $of {
            /// Appends the frame. A text that is too long is truncated; the store refuses a truncated name as unknown.
            pub fn encode(&self, request: u32, out: &mut Vec<u8>) {
                let start = out.len();
                out.extend([0; HEADER]);
                let mut to = Writer(out);
                let kind = match self {
                    $(Self::$name { $($field),* } => {
                        $(to.$written($field);)*
                        $kind
                    })+
                };
                seal(&mut out[start..], kind, request);
            }

            /// Request number and content.
            ///
            /// # Errors
            /// The invalid field. Anything other than the output of [`Self::encode`] is an error.
            pub fn decode(bytes: &[u8]) -> Result<(u32, Self), FrameError> {
                let (kind, request, mut from) = open(bytes)?;
                let message = match kind {
                    $($kind => Self::$name { $($field: from.$written(stringify!($field))?),* },)+
                    kind => return Err(FrameError::Kind { kind }),
                };
                if from.0.is_empty() { Ok((request, message)) } else { Err(FrameError::Field { field: "end" }) }
            }
        }
    };
}
frames!(Request {
    1 Get { tier: tier, timeout_ms: int, wanted: wanted },
    2 Release { arena: long },
    3 PutFile { tier: tier, access: access, name: name },
    4 PutBegin { tier: tier, access: access, header_bytes: long, name: name },
    5 Commit { arena: long },
    6 Abort { arena: long },
    7 Pin { pinned: flag, name: name },
    8 Evict { forget: flag, name: name },
    9 Verify { name: name },
    10 List {},
    11 Stat {},
    12 Status {},
});
frames!(Answer {
    129 Served { arena: long, bytes: long, manifest_bytes: long, content: content, handle: handle },
    130 Writable { arena: long, bytes: long, manifest_bytes: long },
    131 Stored { content: content, bytes: long },
    132 Done {},
    133 Progress { done: long, total: long },
    134 Document { bytes: long },
    135 Refused { code: code, text: text },
});

impl Request {
    /// Number of descriptors that must be attached.
    pub const fn descriptors(&self) -> usize {
        match self {
            Self::PutFile { .. } | Self::PutBegin { .. } => 1,
            _ => 0,
        }
    }
}

impl Answer {
    /// Number of attached descriptors.
    pub const fn descriptors(&self) -> usize {
        match self {
            Self::Served { handle: Handle::HostFile, .. } | Self::Document { .. } => 1,
            Self::Served { .. } | Self::Writable { .. } => 2,
            _ => 0,
        }
    }
}
