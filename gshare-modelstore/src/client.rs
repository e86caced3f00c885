//! A client of the store.
//!
//! ```no_run
//! use gshare_modelstore::client::{Client, GetOptions};
//! let client = Client::connect("/run/gshare/store.sock")?;
//! let model = client.get("resnet50", &GetOptions::default())?;
//! for tensor in model.manifest()?.iter() {
//!     println!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape().collect::<Vec<_>>());
//! }
//! let weights: &[u8] = model.bytes_of("conv1.weight")?;
//! # let _ = weights;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! A [`Model`] holds one reference, and gives it back on drop. It reads memory that all clients share and no process can
//! write. It stays readable even if the store is gone.
//!
//! A get takes the reference and the descriptors in one request and one answer. The files are mapped at the first access to
//! the manifest or a tensor, after a check that no process can write to them or truncate them. So a process that only
//! forwards a descriptor, or imports it into a GPU, maps no more than it needs.

use crate::arena_fill::{LoadError, layout_of_header};
use crate::frame::{Answer, Code, FrameError, Handle, MAX_FRAME, Request, Wanted};
use crate::manifest::{Layout, Manifest, ManifestError};
use crate::map::SealedMap;
use crate::packet::{self, Descriptors};
use crate::safetensors::{Dtype, Header};
use crate::status::Status;
use crate::store::{Access, ContentHash, MemoryTier};
use parking_lot::Mutex;
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The store refused.
    #[error("{text}")]
    Refused {
        /// The reason as a code.
        code: Code,
        /// The reason as text.
        text: String,
    },
    /// The store is gone; existing maps stay valid.
    #[error("the store is gone")]
    Gone,
    /// The answer does not fit the request.
    #[error("the store's answer does not fit the request")]
    Unexpected,
    /// The store's frame is invalid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The store's manifest is invalid.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The file or the data is not a model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model has no such tensor.
    #[error("the model has no tensor `{name}`")]
    NoTensor {
        /// Name of the tensor.
        name: String,
    },
    /// The model is in GPU memory, which this process cannot read.
    #[error("the model is not in host memory")]
    NotInHostMemory,
    /// The system's error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Options of a get.
#[derive(Debug, Clone)]
pub struct GetOptions {
    /// Tier of memory. Default: host.
    pub tier: MemoryTier,
    /// Longest wait for a load. Default 60 s.
    pub timeout: Duration,
}

impl Default for GetOptions {
    fn default() -> Self {
        Self { tier: MemoryTier::Host, timeout: Duration::from_secs(60) }
    }
}

/// A connection to a store. Clones share it, and their requests take turns.
#[derive(Debug, Clone)]
pub struct Client(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    turn: Mutex<u32>,
}

type Answered = (Answer, Descriptors);

impl Client {
    /// Connects to the store at a socket.
    ///
    /// # Errors
    /// If no store listens there.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ClientError> {
        let address = SocketAddrUnix::new(path.as_ref()).map_err(io::Error::from)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(io::Error::from)?;
        connect(&socket, &address).map_err(io::Error::from)?;
        Ok(Self(Arc::new(Connection { socket, turn: Mutex::new(0) })))
    }

    /// Takes a reference to a model by name, and loads it if necessary.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get(&self, name: &str, options: &GetOptions) -> Result<Model, ClientError> {
        self.want(Wanted::Name(name.to_owned()), options)
    }

    /// Takes a reference to any readable model with this content.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get_content(&self, content: ContentHash, options: &GetOptions) -> Result<Model, ClientError> {
        self.want(Wanted::Content(content), options)
    }

    fn want(&self, wanted: Wanted, options: &GetOptions) -> Result<Model, ClientError> {
        let timeout_ms = u32::try_from(options.timeout.as_millis()).unwrap_or(u32::MAX);
        let (answer, descriptors) =
            self.ask(&Request::Get { tier: options.tier, timeout_ms, wanted }, None)?;
        let Answer::Served { arena, bytes, manifest_bytes, content, handle } = answer else {
            return Err(ClientError::Unexpected);
        };
        // The reference exists from here on, so a later failure must give it back.
        let reference = Reference { connection: self.0.clone(), arena };
        let [first, second] = descriptors.0;
        let (manifest, memory) = match handle {
            Handle::HostFile => (None, first),
            Handle::HostFiles | Handle::CudaVmm => (first, second),
        };
        let files = Files { manifest, memory, bytes, manifest_bytes, content, handle };
        Ok(Model { maps: OnceLock::new(), files, _reference: reference })
    }

    /// Has the store load a safetensors file, which becomes the model's source. `progress` gets the loaded bytes and the
    /// total.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put_file(
        &self,
        name: &str,
        access: Access,
        tier: MemoryTier,
        file: &File,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Stored, ClientError> {
        let request = Request::PutFile { tier, access, name: name.to_owned() };
        match self.ask_with(&request, Some(file.as_fd()), &mut progress)?.0 {
            Answer::Stored { content, bytes } => Ok(Stored { content, bytes }),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Begins to write a model with these tensors (name, type, dimensions).
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put(
        &self,
        name: &str,
        access: Access,
        tier: MemoryTier,
        tensors: &[(&str, Dtype, &[u64])],
    ) -> Result<Put, ClientError> {
        let header = Header::encode(tensors);
        let header_bytes = header.len() as u64 - 8;
        let file = crate::backend::sealed("gshare-header", &header[8..])?;
        let (layout, ()) = layout_of_header(&File::from(file.try_clone()?), header_bytes, |_| Ok(()))?;
        let request = Request::PutBegin { tier, access, header_bytes, name: name.to_owned() };
        let (answer, descriptors) = self.ask(&request, Some(file.as_fd()))?;
        let Answer::Writable { arena, bytes, .. } = answer else { return Err(ClientError::Unexpected) };
        let mut begun = Put { client: self.clone(), arena, layout, file: None };
        // The manifest repeats facts that this side knows already.
        let [_, file] = descriptors.0;
        let (Some(file), true) = (file, bytes == begun.layout.arena_bytes) else {
            return Err(ClientError::Unexpected);
        };
        begun.file = Some(file.into());
        Ok(begun)
    }

    /// Stores a single tensor under an id (FaST-GShare, section 3.5: STORE).
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn store(&self, id: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Result<Stored, ClientError> {
        let mut put = self.put(id, Access::Group, MemoryTier::Host, &[(TENSOR, dtype, shape)])?;
        put.write(TENSOR, 0, bytes)?;
        put.commit()
    }

    /// Takes a reference to a tensor that was stored under an id (FaST-GShare, section 3.5: GET); its name is `tensor`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get_tensor(&self, id: &str) -> Result<Model, ClientError> {
        self.get(id, &GetOptions::default())
    }

    /// Pins a model in memory, or unpins it. A pin on an absent model takes effect with its next load.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn pin(&self, name: &str, pinned: bool) -> Result<(), ClientError> {
        self.done(&Request::Pin { pinned, name: name.to_owned() })
    }

    /// Evicts a model from memory; with `forget`, its name becomes free.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn evict(&self, name: &str, forget: bool) -> Result<(), ClientError> {
        self.done(&Request::Evict { forget, name: name.to_owned() })
    }

    /// Has the store hash a model again.
    ///
    /// # Errors
    /// [`Code::Corrupt`] if the hash has changed; see [`ClientError`].
    pub fn verify(&self, name: &str) -> Result<(), ClientError> {
        self.done(&Request::Verify { name: name.to_owned() })
    }

    /// The readable models, as JSON.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&self) -> Result<serde_json::Value, ClientError> {
        self.document(&Request::List)
    }

    /// The store's figures, as JSON.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stat(&self) -> Result<serde_json::Value, ClientError> {
        self.document(&Request::Stat)
    }

    /// Arenas, models and clients of the store, exact to the byte.
    ///
    /// # Errors
    /// [`ClientError::Gone`] if the store is older than this request; see [`ClientError`].
    pub fn status(&self) -> Result<Status, ClientError> {
        self.document(&Request::Status)
    }

    fn done(&self, request: &Request) -> Result<(), ClientError> {
        match self.ask(request, None)?.0 {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    fn document<T: DeserializeOwned>(&self, request: &Request) -> Result<T, ClientError> {
        let (answer, mut descriptors) = self.ask(request, None)?;
        let (Answer::Document { bytes }, Some(file)) = (answer, descriptors.next()) else {
            return Err(ClientError::Unexpected);
        };
        let text = SealedMap::new(&file, bytes)?;
        serde_json::from_slice(&text).map_err(|_| ClientError::Unexpected)
    }

    fn ask(&self, request: &Request, descriptor: Option<BorrowedFd<'_>>) -> Result<Answered, ClientError> {
        self.ask_with(request, descriptor, &mut |_, _| {})
    }

    fn ask_with(
        &self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Answered, ClientError> {
        let mut turn = self.0.turn.lock();
        // Number 0 is for releases, and for refusals of the connection itself.
        *turn = turn.checked_add(1).unwrap_or(1);
        let number = *turn;
        match self.0.send(number, request, descriptor) {
            // A store that refuses the connection answers and closes it without reading.
            Ok(()) | Err(ClientError::Gone) => {}
            Err(error) => return Err(error),
        }
        let mut reset = false;
        let mut bytes = [0; MAX_FRAME + 1];
        loop {
            let (length, descriptors) = match packet::receive(&self.0.socket, &mut bytes) {
                Ok((0, _)) => return Err(ClientError::Gone),
                Ok(received) => received,
                // The reset is reported once, before the store's last packet can be read.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !reset => {
                    reset = true;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(ClientError::Gone);
                }
                Err(error) => return Err(error.into()),
            };
            let (answered, answer) = Answer::decode(&bytes[..length])?;
            let refused = answered == 0 && matches!(answer, Answer::Refused { .. });
            if answered != number && !refused {
                continue;
            }
            if answer.descriptors() != descriptors.count() {
                return Err(ClientError::Unexpected);
            }
            match answer {
                Answer::Progress { done, total } => progress(done, total),
                Answer::Refused { code, text } => return Err(ClientError::Refused { code, text }),
                answer => return Ok((answer, descriptors)),
            }
        }
    }
}

impl Connection {
    fn send(
        &self,
        number: u32,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), ClientError> {
        let mut bytes = Vec::with_capacity(64);
        request.encode(number, &mut bytes);
        match packet::send(&self.socket, &bytes, descriptor.as_slice(), true) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                Err(ClientError::Gone)
            }
            result => Ok(result?),
        }
    }
}

/// Name of the tensor that [`Client::store`] stores.
pub const TENSOR: &str = "tensor";

/// The result of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Hash of the model's content.
    pub content: ContentHash,
    /// Bytes of its arena.
    pub bytes: u64,
}

#[derive(Debug)]
struct Reference {
    connection: Arc<Connection>,
    arena: u64,
}

impl Drop for Reference {
    fn drop(&mut self) {
        // A store that is gone has also forgotten the reference.
        let _ = self.connection.send(0, &Request::Release { arena: self.arena }, None);
    }
}

/// The descriptors and facts from the answer to a get.
#[derive(Debug)]
struct Files {
    /// `None` if the manifest is behind the arena.
    manifest: Option<OwnedFd>,
    /// Descriptor of the arena, if there is one.
    memory: Option<OwnedFd>,
    bytes: u64,
    manifest_bytes: u64,
    content: ContentHash,
    handle: Handle,
}

#[derive(Debug)]
enum Maps {
    /// The arena with the manifest behind it.
    One(SealedMap),
    /// The manifest, and the arena if it is in host memory.
    Two { manifest: SealedMap, arena: Option<SealedMap> },
}

impl Files {
    /// Maps the files after a check of their seals, and compares them with the store's answer.
    fn map(&self) -> Result<Maps, ClientError> {
        let map = |file: &Option<OwnedFd>, bytes| {
            let file = file.as_ref().ok_or(ClientError::Unexpected)?;
            Ok::<_, ClientError>(SealedMap::new(file, bytes)?)
        };
        let maps = match self.handle {
            Handle::HostFile => {
                let whole = self.bytes.checked_add(self.manifest_bytes).ok_or(ClientError::Unexpected)?;
                Maps::One(map(&self.memory, whole)?)
            }
            Handle::HostFiles => Maps::Two {
                manifest: map(&self.manifest, self.manifest_bytes)?,
                arena: Some(map(&self.memory, self.bytes)?),
            },
            _ => Maps::Two { manifest: map(&self.manifest, self.manifest_bytes)?, arena: None },
        };
        let read = Manifest::open(maps.manifest(self.bytes))?;
        if read.arena_bytes() != self.bytes || read.content() != self.content {
            return Err(ClientError::Unexpected);
        }
        Ok(maps)
    }
}

impl Maps {
    fn manifest(&self, arena_bytes: u64) -> &[u8] {
        match self {
            Self::One(map) => {
                usize::try_from(arena_bytes).ok().and_then(|at| map.get(at..)).unwrap_or_default()
            }
            Self::Two { manifest, .. } => manifest,
        }
    }

    fn arena(&self, bytes: u64) -> Option<&[u8]> {
        match self {
            Self::One(map) => map.get(..usize::try_from(bytes).ok()?),
            Self::Two { arena, .. } => arena.as_deref(),
        }
    }
}

/// A model in memory, for the life of this value.
#[derive(Debug)]
pub struct Model {
    /// Filled at the first access.
    maps: OnceLock<Maps>,
    files: Files,
    // Declared after the maps, so that they are dropped before the reference.
    _reference: Reference,
}

impl Model {
    fn maps(&self) -> Result<&Maps, ClientError> {
        match self.maps.get() {
            Some(maps) => Ok(maps),
            // Two threads may both get here; the second map is dropped again.
            None => self.files.map().map(|maps| self.maps.get_or_init(|| maps)),
        }
    }

    /// Names, types, shapes and places of the tensors. Maps the model at the first call.
    ///
    /// # Errors
    /// If the store's files are not sealed, are too short, or hold no manifest of this model, or if the system refuses the
    /// map.
    pub fn manifest(&self) -> Result<Manifest<'_>, ClientError> {
        Ok(Manifest::open(self.maps()?.manifest(self.files.bytes))?)
    }

    /// Hash of the model's content.
    pub const fn content(&self) -> ContentHash {
        self.files.content
    }

    /// Bytes of its arena.
    pub const fn arena_bytes(&self) -> u64 {
        self.files.bytes
    }

    /// The arena. Maps the model at the first call.
    ///
    /// # Errors
    /// [`ClientError::NotInHostMemory`]; otherwise as [`Self::manifest`].
    pub fn memory(&self) -> Result<&[u8], ClientError> {
        self.maps()?.arena(self.files.bytes).ok_or(ClientError::NotInHostMemory)
    }

    /// Form in which the arena was handed out, and its descriptor if there is one.
    pub fn handle(&self) -> (Handle, Option<BorrowedFd<'_>>) {
        (self.files.handle, self.files.memory.as_ref().map(|descriptor| descriptor.as_fd()))
    }

    /// The bytes of a tensor. Maps the model at the first call.
    ///
    /// # Errors
    /// [`ClientError::NoTensor`]; otherwise as [`Self::memory`].
    pub fn bytes_of(&self, tensor: &str) -> Result<&[u8], ClientError> {
        let missing = || ClientError::NoTensor { name: tensor.to_owned() };
        let entry = self.manifest()?.tensor(tensor).ok_or_else(missing)?;
        let begin = usize::try_from(entry.offset).map_err(|_| missing())?;
        let bytes = usize::try_from(entry.bytes).map_err(|_| missing())?;
        self.memory()?.get(begin..begin + bytes).ok_or_else(missing)
    }
}

/// A model that is being written. Dropping it aborts the put.
#[derive(Debug)]
pub struct Put {
    client: Client,
    arena: u64,
    layout: Layout,
    file: Option<File>,
}

impl Put {
    /// Writes bytes of a tensor.
    ///
    /// # Errors
    /// If there is no such tensor, or the bytes exceed its end.
    pub fn write(&mut self, tensor: &str, offset: u64, bytes: &[u8]) -> Result<(), ClientError> {
        let place = self.layout.places.binary_search_by(|place| place.name.as_str().cmp(tensor));
        let place = place.ok().map(|at| &self.layout.places[at]);
        let end = offset.checked_add(bytes.len() as u64);
        match (place, &self.file) {
            (Some(place), Some(file)) if end.is_some_and(|end| end <= place.bytes) => {
                Ok(file.write_all_at(bytes, place.offset + offset)?)
            }
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{tensor}` has no such bytes"))
                    .into())
            }
        }
    }

    /// The arena's file, for a caller that writes through a map. Unmap it before the commit.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    /// Places of the tensors.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Commits the model, which is never written again.
    ///
    /// # Errors
    /// [`Code::StillMapped`] while a process maps it for writing; see [`ClientError`].
    pub fn commit(mut self) -> Result<Stored, ClientError> {
        self.file = None;
        match self.client.ask(&Request::Commit { arena: self.arena }, None)?.0 {
            Answer::Stored { content, bytes } => Ok(Stored { content, bytes }),
            _ => Err(ClientError::Unexpected),
        }
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        // The file is still there, so nothing was committed.
        if self.file.take().is_some() {
            let _ = self.client.ask(&Request::Abort { arena: self.arena }, None);
        }
    }
}
