//! Connections: the identity of clients, their requests, and the answers.

use super::locked_state::{Kind, Open, Served, Shared, refusal};
use crate::arena_fill::{LoadError, Source, layout_of_header};
use crate::bounds::{Booked, Exceeded, Ledger, Resource, Whose};
use crate::frame::{Answer, Code, MAX_DESCRIPTORS, MAX_FRAME, Request, Wanted, renumber};
use crate::manifest::Layout;
use crate::packet;
use crate::store::{Access, MemoryTier, StoreEvent};
use gshare_core::{ArenaId, Bytes, ClientId, Duration, GroupId, ModelId, TenantId};
use parking_lot::Mutex;
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_send_buffer_size, socket_peercred};
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use serde_json::json;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Longest answer to a get, in bytes.
const SERVED: usize = 160;

/// Requested buffer for unread answers of one connection, which the kernel doubles: room for small answers to all open
/// requests.
const SEND_BUFFER: usize = 32 << 10;

/// A client's connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) client: ClientId,
    socket: OwnedFd,
    /// Number of unanswered requests.
    pub(super) waiting: AtomicU32,
    pub(super) uid: u32,
    gid: u32,
    /// Answers with descriptors that the client may not have read, the oldest first.
    sent: Mutex<VecDeque<Sent>>,
    _booked: Admitted,
}

/// The resources that a connection takes from its uid's bounds.
#[derive(Debug)]
struct Admitted {
    _connection: Booked,
    _memory: Booked,
}

impl Admitted {
    fn new(shared: &Shared, uid: u32) -> Result<Self, Exceeded> {
        let _connection = shared.book(uid, Resource::Connections, 1)?;
        let _memory = shared.book(uid, Resource::Memory, 2 * SEND_BUFFER as u64)?;
        Ok(Self { _connection, _memory })
    }
}

/// The resources that an answer takes from its uid's bounds until it is read.
#[derive(Debug)]
struct Sent {
    _descriptors: Booked,
    _memory: Option<Booked>,
}

impl Conn {
    /// Sends an answer without waiting: a client that does not read its answers loses its connection.
    pub(super) fn answer(&self, request: u32, answer: &Answer) {
        if packet::send(&self.socket, &encoded(request, answer), &[], false).is_err() {
            self.hang_up();
        }
    }

    /// Sends the progress of a load, unless the client does not read.
    pub(super) fn progress(&self, request: u32, answer: &Answer) {
        let _ = packet::send(&self.socket, &encoded(request, answer), &[], false);
    }

    /// Answers a get with the answer that was prepared when the model was complete.
    pub(super) fn serve(&self, ledger: &Ledger, request: u32, served: &Served) -> Result<(), Exceeded> {
        let mut bytes = [0; SERVED];
        let Some(frame) = bytes.get_mut(..served.frame.len()) else {
            self.hang_up();
            return Ok(());
        };
        frame.copy_from_slice(&served.frame);
        renumber(frame, request);
        self.send(ledger, frame, &served.files, 0)
    }

    /// Sends an answer with descriptors, which account for `memory` until it is read.
    pub(super) fn deliver(
        &self,
        ledger: &Ledger,
        request: u32,
        answer: &Answer,
        descriptors: &[Arc<OwnedFd>],
        memory: u64,
    ) -> Result<(), Exceeded> {
        self.send(ledger, &encoded(request, answer), descriptors, memory)
    }

    fn send(
        &self,
        ledger: &Ledger,
        bytes: &[u8],
        descriptors: &[Arc<OwnedFd>],
        memory: u64,
    ) -> Result<(), Exceeded> {
        let mut borrowed: [BorrowedFd<'_>; MAX_DESCRIPTORS] = [self.socket.as_fd(); MAX_DESCRIPTORS];
        for (to, from) in borrowed.iter_mut().zip(descriptors) {
            *to = from.as_fd();
        }
        let borrowed = &borrowed[..descriptors.len().min(MAX_DESCRIPTORS)];
        let asked = borrowed.len() as u64;
        let mut sent = self.sent.lock();
        self.forget_read(&mut sent);
        let booked = Sent {
            _descriptors: ledger.take(self.uid, Resource::Unread, asked)?,
            _memory: (memory > 0).then(|| ledger.take(self.uid, Resource::Memory, memory)).transpose()?,
        };
        match packet::send(&self.socket, bytes, borrowed, false) {
            Ok(()) => sent.push_back(booked),
            // The kernel's own bound, which also counts other processes of the store's user.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::TOOMANYREFS) => {
                let (uid, resource, whose) = (self.uid, Resource::Unread, Whose::All);
                let held = ledger.read(|bounds| bounds.total(resource));
                return Err(Exceeded::Held { resource, uid, whose, asked, held, bound: held });
            }
            Err(_) => self.hang_up(),
        }
        Ok(())
    }

    /// Releases the resources of answers that were read. Packets are read in order, so the unread answers are the last.
    fn forget_read(&self, sent: &mut VecDeque<Sent>) {
        if !sent.is_empty()
            && let Ok(unread) = packet::unread(&self.socket)
        {
            sent.drain(..sent.len().saturating_sub(unread));
        }
    }

    /// Releases the resources of answers that were read. Returns whether all were.
    pub(super) fn settle(&self) -> bool {
        let mut sent = self.sent.lock();
        self.forget_read(&mut sent);
        sent.is_empty()
    }

    fn refuse(&self, request: u32, code: Code, text: impl Into<String>) {
        self.answer(request, &Answer::Refused { code, text: text.into() });
    }

    pub(super) fn hang_up(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

fn encoded(request: u32, answer: &Answer) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    answer.encode(request, &mut bytes);
    bytes
}

/// Accepts clients until the store stops.
pub(super) fn accept(listener: &OwnedFd, shared: &Arc<Shared>) {
    while !shared.stopping() {
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => admit(socket, shared),
            Err(Errno::INVAL) => return,
            // Out of descriptors, or the client left already: a pause is better than a busy loop.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
    }
}

/// Gives a client a thread if its uid may have another connection; otherwise tells it the bound. A refused connection gets
/// number 0, since there is no request.
fn admit(socket: OwnedFd, shared: &Arc<Shared>) {
    let Ok(credentials) = socket_peercred(&socket) else { return };
    let (uid, gid) = (credentials.uid.as_raw(), credentials.gid.as_raw());
    let booked = match Admitted::new(shared, uid) {
        Ok(booked) => booked,
        Err(exceeded) => {
            let (code, text) = refusal(exceeded);
            let frame = encoded(0, &Answer::Refused { code, text });
            // A client that cannot be told sees its socket close.
            let _ = packet::send(&socket, &frame, &[], false);
            return;
        }
    };
    // If the kernel refuses, its default buffer stays: enough for fewer unread answers.
    let _ = set_socket_send_buffer_size(&socket, SEND_BUFFER);
    let make = move |client| {
        let (waiting, sent) = (AtomicU32::new(0), Mutex::default());
        Arc::new(Conn { client, socket, waiting, uid, gid, sent, _booked: booked })
    };
    let shared = shared.clone();
    // If no thread can be started, the client's socket closes.
    let _ = std::thread::Builder::new().name("store-client".into()).stack_size(256 << 10).spawn(move || {
        if let Ok(conn) = shared.with(|core| core.join(make, uid, gid)) {
            serve(&conn, &shared);
        }
    });
}

/// Serves a client from its first packet until its socket closes.
fn serve(conn: &Arc<Conn>, shared: &Arc<Shared>) {
    if !shared.stopping() {
        let mut bytes = [0; MAX_FRAME + 1];
        while let Ok((length @ 1.., mut descriptors)) = packet::receive(&conn.socket, &mut bytes) {
            let Ok((request, message)) = Request::decode(&bytes[..length]) else { break };
            if message.descriptors() != descriptors.count() {
                break;
            }
            handle(conn, shared, request, message, descriptors.next());
        }
    }
    shared.with(|core| core.leave(conn.client));
}

fn handle(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    message: Request,
    descriptor: Option<OwnedFd>,
) {
    let client = conn.client;
    let open = |kind| Open { conn: conn.clone(), request, kind };
    match message {
        Request::Get { tier, timeout_ms, wanted } => get(conn, shared, request, tier, timeout_ms, &wanted),
        Request::Release { arena } => {
            // The release of an arena that the client does not hold has no effect, and no answer could report it.
            let event = StoreEvent::Released { client, arena: ArenaId::from(arena) };
            let _ = shared.with(|core| core.tell(event, None));
        }
        Request::PutFile { tier, access, name } => {
            let Some(file) = descriptor else { return };
            put_file(conn, shared, request, (tier, access, name), file.into());
        }
        Request::PutBegin { tier, access, header_bytes, name } => {
            let Some(file) = descriptor else { return };
            let admit = |bytes| admit_header(conn, shared, bytes);
            let read = layout_of_header(&File::from(file), header_bytes, admit);
            let (layout, booked) = match read.and_then(|read| book_model(conn, shared, read, 0)) {
                Ok((layout, booked)) => (Arc::new(layout), booked),
                Err(error) => return refuse_load(conn, request, &error),
            };
            shared.with(|core| {
                if core.names.has(conn.uid, &name) {
                    return core.refuse(&open(Kind::Plain), Code::NameTaken, format!("`{name}` is taken"));
                }
                let bytes = Bytes(layout.arena_bytes);
                let model = core.name(&name, None, access, conn.uid, booked);
                let put = |ticket| StoreEvent::PutBegun { client, ticket, model, tier, bytes, access };
                core.ask(open(Kind::PutBegin(layout)), put);
                if !core.engine.knows(model) {
                    core.unname(model);
                }
            });
        }
        Request::Commit { arena } => {
            let commits = |ticket| StoreEvent::PutCommitted { client, ticket, arena: ArenaId::from(arena) };
            shared.with(|core| core.ask(open(Kind::Commit), commits));
        }
        Request::Abort { arena } => {
            let event = StoreEvent::PutAborted { client, arena: ArenaId::from(arena) };
            match shared.with(|core| core.tell(event, None)) {
                Ok(()) => conn.answer(request, &Answer::Done),
                Err(error) => conn.refuse(request, Code::BadRequest, error.to_string()),
            }
        }
        Request::Pin { pinned, name } => {
            let asked = |ticket, model| StoreEvent::PinAsked { client, ticket, model, pinned };
            by_name(conn, shared, request, &name, asked);
        }
        Request::Evict { forget, name } => {
            let asked = |ticket, model| StoreEvent::EvictAsked { client, ticket, model, forget };
            by_name(conn, shared, request, &name, asked);
        }
        Request::Verify { name } => match shared.verify(conn, &name) {
            None => {
                conn.refuse(request, Code::NotResident, format!("`{name}` is not in memory, or not for you"));
            }
            Some(Ok(true)) => conn.answer(request, &Answer::Done),
            Some(Ok(false)) => {
                let text = format!("`{name}` has changed since it was loaded");
                conn.refuse(request, Code::Corrupt, text);
            }
            Some(Err(error)) => conn.refuse(request, Code::Io, error.to_string()),
        },
        Request::List => document(conn, shared, request, &shared.list(client)),
        Request::Stat => document(conn, shared, request, &shared.stat()),
        Request::Status => document(conn, shared, request, &json!(shared.status(conn))),
    }
}

fn document(conn: &Conn, shared: &Arc<Shared>, request: u32, value: &serde_json::Value) {
    let text = value.to_string();
    let bytes = text.len() as u64;
    match crate::backend::sealed("gshare-document", text.as_bytes()) {
        Ok(file) => {
            // `deliver` reports a failure to the client itself.
            let _ = shared.deliver(conn, request, &Answer::Document { bytes }, &[Arc::new(file)], bytes);
        }
        Err(error) => conn.refuse(request, Code::Io, error.to_string()),
    }
}

fn by_name(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    name: &str,
    event: impl FnOnce(gshare_core::TicketId, ModelId) -> StoreEvent,
) {
    shared.with(|core| {
        let open = Open { conn: conn.clone(), request, kind: Kind::Plain };
        let Some(model) = core.named(conn, name) else {
            return core.refuse(&open, Code::UnknownModel, format!("no model `{name}`"));
        };
        core.ask(open, |ticket| event(ticket, model));
    });
}

fn get(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    tier: MemoryTier,
    timeout_ms: u32,
    wanted: &Wanted,
) {
    let client = conn.client;
    let served = shared.with(|core| {
        let model = match wanted {
            Wanted::Name(name) => core.named(conn, name),
            Wanted::Content(content) => (core.models.keys().copied()).find(|&model| {
                core.engine.content_of(model) == Some(*content) && core.engine.may_read(client, model)
            }),
        };
        let Some(model) = model else {
            let what = match wanted {
                Wanted::Name(name) => format!("no model `{name}`"),
                Wanted::Content(content) => format!("no model of content {content}"),
            };
            let open = Open { conn: conn.clone(), request, kind: Kind::Plain };
            core.refuse(&open, Code::UnknownModel, what);
            return None;
        };
        core.get(conn, request, model, tier, Duration::from_millis(timeout_ms.into()))
    });
    if let Some(served) = served {
        shared.serve(conn, request, &served);
    }
}

/// Bytes of memory per byte of a header during its parse. The worst are tensors of 54 bytes with short names: they take 10
/// times that, and the allocator adds some.
const HEADER_FACTOR: u64 = 12;

/// Checks a uid's rate of header work for `bytes`, and takes the memory for the parse.
fn admit_header(conn: &Conn, shared: &Shared, bytes: u64) -> Result<Booked, LoadError> {
    let booked = shared.book(conn.uid, Resource::Memory, bytes.saturating_mul(HEADER_FACTOR))?;
    shared.ledger.work(shared.now(), conn.uid, bytes)?;
    Ok(booked)
}

/// Exchanges the memory of the parse for the model's own memory, and takes the `descriptors` of its source.
fn book_model<T: AsRef<Layout>>(
    conn: &Conn,
    shared: &Shared,
    (parsed, parse): (T, Booked),
    descriptors: u64,
) -> Result<(T, Vec<Booked>), LoadError> {
    drop(parse);
    let bytes = parsed.as_ref().footprint();
    let each = [(Resource::Models, 1), (Resource::Memory, bytes), (Resource::Descriptors, descriptors)];
    let booked: Result<Vec<Booked>, Exceeded> =
        each.into_iter().map(|(resource, amount)| shared.book(conn.uid, resource, amount)).collect();
    Ok((parsed, booked?))
}

fn refuse_load(conn: &Conn, request: u32, error: &LoadError) {
    let code = match error {
        LoadError::Io(_) => Code::Io,
        LoadError::TooLarge => Code::ModelTooLarge,
        LoadError::Bound(exceeded) => Code::from(exceeded),
        _ => Code::BadHeader,
    };
    conn.refuse(request, code, error.to_string());
}

/// Longest wait of a put by file; a longer load goes on without its client.
const PUT_TIMEOUT: Duration = Duration::from_secs(3_600);

fn put_file(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    (tier, access, name): (MemoryTier, Access, String),
    file: File,
) {
    let read = Source::open_within(file, |bytes| admit_header(conn, shared, bytes));
    let (source, booked) = match read.and_then(|read| book_model(conn, shared, read, 1)) {
        Ok((source, booked)) => (Arc::new(source), booked),
        Err(error) => return refuse_load(conn, request, &error),
    };
    let client = conn.client;
    shared.with(|core| {
        let open = |kind| Open { conn: conn.clone(), request, kind };
        if core.names.has(conn.uid, &name) {
            return core.refuse(&open(Kind::Plain), Code::NameTaken, format!("`{name}` is taken"));
        }
        let bytes = Bytes(source.layout.arena_bytes);
        let reload = core.reload_time(bytes);
        let model = core.name(&name, Some(source), access, conn.uid, booked);
        let (owner, group) = (TenantId::new(conn.uid), GroupId::new(conn.gid));
        if let Err(error) =
            core.tell(StoreEvent::ModelAdded { model, owner, group, access, bytes, reload }, None)
        {
            core.unname(model);
            let code = match error {
                crate::store::StoreError::TooManyModels { .. } => Code::TooManyModels,
                _ => Code::ModelTooLarge,
            };
            return core.refuse(&open(Kind::Plain), code, error.to_string());
        }
        let deadline = core.now().saturating_add(PUT_TIMEOUT);
        let asked = |ticket| StoreEvent::Asked { client, ticket, model, tier, deadline };
        core.ask(open(Kind::PutFile(model)), asked);
    });
}
