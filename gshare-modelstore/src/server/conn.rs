//! Connections: who a client is, what it asks, and what it is answered.

use super::core::{Kind, Open, Served, Shared, reload_time};
use crate::frame::{Answer, Code, MAX_DESCRIPTORS, MAX_FRAME, Request, Wanted, renumber};
use crate::load::{LoadError, Source, layout_of_header};
use crate::packet;
use gshare_core::request::TenantId;
use gshare_core::store::{Access, GroupId, MemoryTier, ModelStore as _, StoreEvent};
use gshare_core::{ArenaId, Bytes, ClientId, Duration, ModelId};
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// The longest answer to a get in bytes.
const SERVED: usize = 160;

/// A client's connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) client: ClientId,
    socket: OwnedFd,
    /// Requests that were not answered.
    pub(super) waiting: AtomicU32,
    uid: u32,
    gid: u32,
}

impl Conn {
    /// Answers without ever waiting: a client that does not read what it asked for loses its connection.
    pub(super) fn answer(&self, request: u32, answer: &Answer, descriptors: &[Arc<OwnedFd>]) {
        let mut bytes = Vec::with_capacity(128);
        answer.encode(request, &mut bytes);
        self.send(&bytes, descriptors);
    }

    /// Answers a get with what was prepared when the model was complete.
    pub(super) fn serve(&self, request: u32, served: &Served) {
        let mut bytes = [0; SERVED];
        let Some(frame) = bytes.get_mut(..served.frame.len()) else { return self.hang_up() };
        frame.copy_from_slice(&served.frame);
        renumber(frame, request);
        self.send(frame, &served.files);
    }

    fn send(&self, bytes: &[u8], descriptors: &[Arc<OwnedFd>]) {
        let mut borrowed: [BorrowedFd<'_>; MAX_DESCRIPTORS] = [self.socket.as_fd(); MAX_DESCRIPTORS];
        for (to, from) in borrowed.iter_mut().zip(descriptors) {
            *to = from.as_fd();
        }
        let borrowed = &borrowed[..descriptors.len().min(MAX_DESCRIPTORS)];
        if packet::send(&self.socket, bytes, borrowed, false).is_err() {
            self.hang_up();
        }
    }

    fn refuse(&self, request: u32, code: Code, text: impl Into<String>) {
        self.answer(request, &Answer::Refused { code, text: text.into() }, &[]);
    }

    pub(super) fn hang_up(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Lets clients in until the store stops.
pub(super) fn accept(listener: &OwnedFd, shared: &Arc<Shared>) {
    while !shared.stopping() {
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                let shared = shared.clone();
                // A thread that cannot be started is a client that is not let in: its socket closes.
                let _ = std::thread::Builder::new()
                    .name("store-client".into())
                    .stack_size(256 << 10)
                    .spawn(move || serve(socket, &shared));
            }
            Err(rustix::io::Errno::INVAL) => return,
            // Out of descriptors, or a client that went again: later is better than a busy loop.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
    }
}

/// One client, from its first packet to the end of its socket.
fn serve(socket: OwnedFd, shared: &Arc<Shared>) {
    let Ok(credentials) = socket_peercred(&socket) else { return };
    let (uid, gid) = (credentials.uid.as_raw(), credentials.gid.as_raw());
    let make = |client| Arc::new(Conn { client, socket, waiting: AtomicU32::new(0), uid, gid });
    let Ok(conn) = shared.with(|core| core.join(make, uid, gid)) else { return };
    if !shared.stopping() {
        let mut bytes = [0; MAX_FRAME + 1];
        while let Ok((length @ 1.., mut descriptors)) = packet::receive(&conn.socket, &mut bytes) {
            let Ok((request, message)) = Request::decode(&bytes[..length]) else { break };
            if message.descriptors() != descriptors.count() {
                break;
            }
            handle(&conn, shared, request, message, descriptors.next());
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
            // Of nothing that it holds: nothing changes, and there is no answer that could say so.
            let event = StoreEvent::Released { client, arena: ArenaId::from(arena) };
            let _ = shared.with(|core| core.tell(event, None));
        }
        Request::PutFile { tier, access, name } => {
            let Some(file) = descriptor else { return };
            put_file(conn, shared, request, (tier, access, name), file.into());
        }
        Request::PutBegin { tier, access, header_bytes, name } => {
            let Some(file) = descriptor else { return };
            let layout = match layout_of_header(&File::from(file), header_bytes) {
                Ok(layout) => Arc::new(layout),
                Err(error) => return refuse_load(conn, request, &error),
            };
            shared.with(|core| {
                if core.names.contains_key(&name) {
                    return core.refuse(&open(Kind::Plain), Code::NameTaken, format!("`{name}` is taken"));
                }
                let bytes = Bytes(layout.arena_bytes);
                let model = core.name(&name, None, access, conn.uid);
                let ticket = core.ticket(open(Kind::PutBegin(layout)));
                let event = StoreEvent::PutBegun { client, ticket, model, tier, bytes, access };
                if let Err(error) = core.tell(event, None) {
                    core.misused(ticket, error.to_string());
                }
                if !core.engine.knows(model) {
                    core.unname(model);
                }
            });
        }
        Request::Commit { arena } => shared.with(|core| {
            let ticket = core.ticket(open(Kind::Commit));
            let event = StoreEvent::PutCommitted { client, ticket, arena: ArenaId::from(arena) };
            if let Err(error) = core.tell(event, None) {
                core.misused(ticket, error.to_string());
            }
        }),
        Request::Abort { arena } => {
            let event = StoreEvent::PutAborted { client, arena: ArenaId::from(arena) };
            match shared.with(|core| core.tell(event, None)) {
                Ok(()) => conn.answer(request, &Answer::Done, &[]),
                Err(error) => conn.refuse(request, Code::BadRequest, error.to_string()),
            }
        }
        Request::Pin { pinned, name } => {
            by_name(conn, shared, request, &name, |ticket, model| StoreEvent::PinAsked {
                client,
                ticket,
                model,
                pinned,
            });
        }
        Request::Evict { forget, name } => {
            by_name(conn, shared, request, &name, |ticket, model| StoreEvent::EvictAsked {
                client,
                ticket,
                model,
                forget,
            });
        }
        Request::Verify { name } => match shared.verify(client, &name) {
            None => {
                conn.refuse(request, Code::NotResident, format!("`{name}` is not in memory, or not for you"));
            }
            Some(Ok(true)) => conn.answer(request, &Answer::Done, &[]),
            Some(Ok(false)) => {
                conn.refuse(
                    request,
                    Code::Corrupt,
                    format!("`{name}` is not what it was when it was loaded"),
                );
            }
            Some(Err(error)) => conn.refuse(request, Code::Io, error.to_string()),
        },
        Request::List => document(conn, request, &shared.list(client)),
        Request::Stat => document(conn, request, &shared.stat()),
    }
}

fn document(conn: &Conn, request: u32, value: &serde_json::Value) {
    let text = value.to_string();
    match crate::backend::sealed("gshare-document", text.as_bytes()) {
        Ok(file) => conn.answer(request, &Answer::Document { bytes: text.len() as u64 }, &[Arc::new(file)]),
        Err(error) => conn.refuse(request, Code::Io, error.to_string()),
    }
}

fn by_name(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    name: &str,
    event: impl FnOnce(gshare_core::store::TicketId, ModelId) -> StoreEvent,
) {
    shared.with(|core| {
        let open = Open { conn: conn.clone(), request, kind: Kind::Plain };
        let Some(&model) = core.names.get(name) else {
            return core.refuse(&open, Code::UnknownModel, format!("no model `{name}`"));
        };
        let ticket = core.ticket(open);
        if let Err(error) = core.tell(event(ticket, model), None) {
            core.misused(ticket, error.to_string());
        }
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
            Wanted::Name(name) => core.names.get(name).copied(),
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
        conn.serve(request, &served);
    }
}

fn refuse_load(conn: &Conn, request: u32, error: &LoadError) {
    let code = match error {
        LoadError::Io(_) => Code::Io,
        LoadError::TooLarge => Code::ModelTooLarge,
        _ => Code::BadHeader,
    };
    conn.refuse(request, code, error.to_string());
}

/// A put by file waits this long; a load that takes longer goes on without it.
const PUT_TIMEOUT: Duration = Duration::from_secs(3_600);

fn put_file(
    conn: &Arc<Conn>,
    shared: &Arc<Shared>,
    request: u32,
    (tier, access, name): (MemoryTier, Access, String),
    file: File,
) {
    let source = match Source::open(file) {
        Ok(source) => Arc::new(source),
        Err(error) => return refuse_load(conn, request, &error),
    };
    let client = conn.client;
    shared.with(|core| {
        let open = |kind| Open { conn: conn.clone(), request, kind };
        if core.names.contains_key(&name) {
            return core.refuse(&open(Kind::Plain), Code::NameTaken, format!("`{name}` is taken"));
        }
        let bytes = Bytes(source.layout.arena_bytes);
        let reload = reload_time(bytes, core.disk_rate());
        let model = core.name(&name, Some(source), access, conn.uid);
        let (owner, group) = (TenantId(conn.uid), GroupId(conn.gid));
        if let Err(error) =
            core.tell(StoreEvent::ModelAdded { model, owner, group, access, bytes, reload }, None)
        {
            core.unname(model);
            let code = match error {
                gshare_core::store::StoreError::TooManyModels { .. } => Code::TooManyModels,
                _ => Code::ModelTooLarge,
            };
            return core.refuse(&open(Kind::Plain), code, error.to_string());
        }
        let deadline = core.now().saturating_add(PUT_TIMEOUT);
        let ticket = core.ticket(open(Kind::PutFile(model)));
        if let Err(error) = core.tell(StoreEvent::Asked { client, ticket, model, tier, deadline }, None) {
            core.misused(ticket, error.to_string());
        }
    });
}
