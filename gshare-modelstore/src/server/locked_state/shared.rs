//! The lock around the state, and the work that its threads do without it.

use super::{After, Core, Held, Load, Served, refusal, since};
use crate::arena_fill::{self, Origin};
use crate::backend::ArenaMemory;
use crate::bounds::{Booked, Exceeded, Ledger, Resource, Whose};
use crate::frame::{Answer, Code};
use crate::manifest::Layout;
use crate::server::conn::Conn;
use crate::store::{MemoryTier, StoreEvent};
use gshare_core::{ArenaId, Duration, Engine as _, Timestamp};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Ends all writing to full memory, and adds its manifest.
fn sealed(
    arena: ArenaId,
    memory: &dyn ArenaMemory,
    layout: &Layout,
    hashes: &[[u8; 32]],
) -> io::Result<Served> {
    let (manifest, content) = layout.manifest(hashes);
    let behind = memory.append(&manifest)?;
    memory.seal()?;
    let apart = || crate::backend::sealed("gshare-manifest", &manifest).map(Arc::new);
    let apart = (!behind).then(apart).transpose()?;
    let (handle, file) = memory.export().ok_or_else(|| io::Error::other("it is not sealed"))?;
    let (bytes, manifest_bytes) = (layout.arena_bytes, manifest.len() as u64);
    let mut frame = Vec::new();
    Answer::Served { arena: arena.into(), bytes, manifest_bytes, content, handle }.encode(0, &mut frame);
    let files = apart.into_iter().chain(file).collect();
    Ok(Served { arena, frame, files, manifest_bytes, content })
}

/// Pause between looks at ended connections; an exceeded bound causes an additional look.
const SWEEP_EVERY: std::time::Duration = std::time::Duration::from_millis(200);

/// The core, and the threads that work on it.
#[derive(Debug)]
pub(in crate::server) struct Shared {
    core: Mutex<Core>,
    pub(in crate::server) ledger: Ledger,
    started: Instant,
    /// Signals that the engine's next deadline may have moved.
    deadline: Condvar,
    stopping: AtomicBool,
    pub(in crate::server) threads: usize,
    /// Shortest time between two reports of progress.
    progress_every: std::time::Duration,
}

impl Shared {
    pub(in crate::server) fn new(core: Core) -> Self {
        let threads = core.config.threads.max(1);
        let progress_every = std::time::Duration::from_millis(100);
        let (stopping, ledger) = (AtomicBool::new(false), core.ledger.clone());
        let started = core.started;
        Self {
            core: Mutex::new(core),
            ledger,
            started,
            deadline: Condvar::new(),
            stopping,
            threads,
            progress_every,
        }
    }

    pub(in crate::server) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(in crate::server) fn now(&self) -> Timestamp {
        since(self.started)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Works on the core under the lock, then does the resulting work without it.
    pub(in crate::server) fn with<T>(self: &Arc<Self>, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        let before = core.engine.next_deadline();
        let result = work(&mut core);
        if core.engine.next_deadline() != before {
            self.deadline.notify_one();
        }
        let after = std::mem::take(&mut core.after);
        drop(core);
        for after in after {
            match after {
                After::Send { conn, request, answer, descriptors } => {
                    let Answer::Writable { arena, manifest_bytes, .. } = answer else {
                        conn.answer(request, &answer);
                        continue;
                    };
                    if !self.deliver(&conn, request, &answer, &descriptors, manifest_bytes) {
                        self.tell(StoreEvent::PutAborted { client: conn.client, arena: arena.into() });
                    }
                }
                After::Serve { conn, request, served } => self.serve(&conn, request, &served),
                After::Load(load) => self.in_thread(load.arena, move |shared| shared.load(load)),
                After::Free { arena, held } => {
                    drop(held);
                    self.tell(StoreEvent::Evicted { arena });
                }
                After::Seal { arena, held } => self.in_thread(arena, move |shared| shared.seal(arena, held)),
            }
        }
        result
    }

    /// Tells the engine of an end, which it refuses only if the client or the arena is gone.
    fn tell(self: &Arc<Self>, event: StoreEvent) {
        let _ = self.with(|core| core.tell(event, None));
    }

    /// Answers a get with the prepared answer. Gives the reference back if it cannot be sent.
    pub(in crate::server) fn serve(self: &Arc<Self>, conn: &Conn, request: u32, served: &Served) {
        if !self.retried(conn, request, || conn.serve(&self.ledger, request, served)) {
            self.tell(StoreEvent::Released { client: conn.client, arena: served.arena });
        }
    }

    /// Sends an answer with descriptors, which account for memory until it is read. `false` if a bound refused it; the
    /// client then gets the refusal.
    pub(in crate::server) fn deliver(
        self: &Arc<Self>,
        conn: &Conn,
        request: u32,
        answer: &Answer,
        descriptors: &[Arc<OwnedFd>],
        memory: u64,
    ) -> bool {
        self.retried(conn, request, || conn.deliver(&self.ledger, request, answer, descriptors, memory))
    }

    /// Sends an answer. If a bound refuses it, tries again after a look at the answers read meanwhile.
    fn retried(&self, conn: &Conn, request: u32, send: impl Fn() -> Result<(), Exceeded>) -> bool {
        let Err(first) = send() else { return true };
        self.settle(conn.uid, &first);
        let Err(exceeded) = send() else { return true };
        self.lock().counts.refusals += 1;
        let (code, text) = refusal(exceeded);
        conn.answer(request, &Answer::Refused { code, text });
        false
    }

    /// Takes resources for a uid, if necessary after a look at the answers read meanwhile.
    pub(in crate::server) fn book(
        &self,
        uid: u32,
        resource: Resource,
        amount: u64,
    ) -> Result<Booked, Exceeded> {
        self.ledger.take(uid, resource, amount).or_else(|exceeded| {
            self.settle(uid, &exceeded);
            self.ledger.take(uid, resource, amount)
        })
    }

    /// Looks for answers that were read: by the uid at its bound, or by all uids if their common bound is exceeded.
    fn settle(&self, uid: u32, exceeded: &Exceeded) {
        let all = !matches!(exceeded, Exceeded::Held { whose: Whose::Uid, .. });
        let mut core = self.lock();
        core.sweep();
        let conns: Vec<Arc<Conn>> =
            core.conns.values().filter(|conn| all || conn.uid == uid).cloned().collect();
        drop(core);
        for conn in conns {
            conn.settle();
        }
    }

    fn in_thread(self: &Arc<Self>, arena: ArenaId, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let shared = self.clone();
        let started = std::thread::Builder::new().name("store-load".into()).spawn(move || work(&shared));
        if let Err(error) = started {
            self.failed(arena, Code::Io, error.to_string());
        }
    }

    fn failed(self: &Arc<Self>, arena: ArenaId, code: Code, text: String) {
        self.with(|core| {
            core.counts.load_failures += 1;
            // The engine refuses this only if the arena is gone, and then no request waits for it.
            let _ = core.tell(StoreEvent::LoadFailed { arena }, Some(&(code, text)));
        });
    }

    fn load(self: &Arc<Self>, load: Load) {
        let Load { arena, backend, memory, origin, out, told } = load;
        let (total, last) = (origin.layout().tensor_bytes, AtomicU64::new(0));
        let started = Instant::now();
        let progress = |done| {
            let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let due =
                last.load(Ordering::Relaxed) + u64::try_from(self.progress_every.as_millis()).unwrap_or(0);
            let mine = now >= due && last.swap(now, Ordering::Relaxed) < due;
            if mine {
                let answer = Answer::Progress { done, total };
                told.iter().for_each(|(conn, request)| conn.progress(*request, &answer));
            }
        };
        let filled = match (&out, &origin) {
            (Some(gpu), Origin::Arena { layout, memory: from }) => {
                gpu.copy_out(from, layout, &*memory, self.threads)
            }
            _ => backend.fill(&*memory, &origin, self.threads, &progress),
        };
        let layout = origin.layout().clone();
        drop(origin);
        self.filled(arena, memory, &layout, filled);
    }

    /// Completes an arena or gives it up. Drops its own hold first, since the engine may free the memory at once.
    fn filled(
        self: &Arc<Self>,
        arena: ArenaId,
        memory: Arc<dyn ArenaMemory>,
        layout: &Layout,
        hashes: io::Result<Vec<[u8; 32]>>,
    ) {
        let sealed = hashes.and_then(|hashes| sealed(arena, &*memory, layout, &hashes));
        drop(memory);
        match sealed {
            Err(error) => self.failed(arena, Code::Io, error.to_string()),
            Ok(served) => self.with(|core| {
                let content = served.content;
                if let Some(held) = core.arenas.get_mut(&arena) {
                    held.complete = Some(Arc::new(served));
                }
                let _ = core.tell(StoreEvent::Loaded { arena, content }, None);
            }),
        }
    }

    /// Seals an arena that a client wrote: first it ends all writing, then it hashes the content.
    fn seal(self: &Arc<Self>, arena: ArenaId, held: Held) {
        let Held { memory, layout, .. } = held;
        if let Err(error) = memory.seal() {
            drop(memory);
            let (code, text) = match error.kind() {
                io::ErrorKind::ResourceBusy => {
                    (Code::StillMapped, "unmap it before the commit: it is mapped for writing".into())
                }
                _ => (Code::Io, error.to_string()),
            };
            return self.failed(arena, code, text);
        }
        let hashes = arena_fill::hash(&layout, &*memory, self.threads, &|_| {});
        self.filled(arena, memory, &layout, hashes);
    }

    /// Hashes a model again and compares. `None` if the model is not in memory, or the client may not read it.
    pub(in crate::server) fn verify(self: &Arc<Self>, conn: &Conn, name: &str) -> Option<io::Result<bool>> {
        let held = {
            let core = self.lock();
            let model = core.named(conn, name)?;
            let arena = MemoryTier::ALL.into_iter().find_map(|tier| core.engine.arena_of(model, tier));
            let readable = core.engine.may_read(conn.client, model);
            arena.filter(|_| readable).and_then(|arena| core.arenas.get(&arena).cloned())?
        };
        let content = held.complete?.content;
        let hashes = arena_fill::hash(&held.layout, &*held.memory, self.threads, &|_| {});
        Some(hashes.map(|hashes| held.layout.manifest(&hashes).1 == content))
    }

    /// Calls the engine at its deadlines until the store stops.
    pub(in crate::server) fn run_timer(self: &Arc<Self>) {
        let mut swept = Instant::now();
        while !self.stopping() {
            let mut core = self.lock();
            if swept.elapsed() >= SWEEP_EVERY {
                core.sweep();
                swept = Instant::now();
            }
            let wait = core.engine.next_deadline().map(|at| at.saturating_since(core.now()));
            if wait == Some(Duration::ZERO) {
                drop(core);
                self.with(|core| {
                    let _ = core.tell(StoreEvent::DeadlineReached, None);
                });
                continue;
            }
            // The wait ends when a deadline moves. The bound covers a path that moved one without a notification.
            let nanos = wait.map_or(1_000_000_000, |wait| wait.as_nanos().min(1_000_000_000));
            self.deadline.wait_for(&mut core, std::time::Duration::from_nanos(nanos));
        }
    }

    pub(in crate::server) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        let core = self.lock();
        core.conns.values().for_each(|conn| conn.hang_up());
        drop(core);
        self.deadline.notify_one();
    }
}
