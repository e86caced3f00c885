//! [`GpuManager`]: orders in, reports out, and the processes between.

use super::frame::{FromModel, MAX_PAYLOAD, ToModel, take};
use super::process::ModelProcess;
use super::{GpuSpec, ManagerConfig, ManagerError, Program};
use crate::new_run;
use gshare_core::{Duration, GpuId, ModelId, RequestId, Timestamp};
use gshare_sched::request::{
    GpuRecord, ModelProfile, RequestAction, RequestEvent, StateStore, Tier, Version,
};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::collections::{BTreeMap, VecDeque};
use std::io;

/// A report of a manager.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Report {
    /// An event for the scheduler.
    Event(RequestEvent),
    /// The output of a request; its `Completed` follows.
    Output {
        /// Which request.
        request: RequestId,
        /// Time of its run (of its whole batch) by the model process's own clock.
        ran: Duration,
        /// The answer of the model process.
        output: Vec<u8>,
    },
    /// `DropHost`, which is the model store's to carry out.
    DropHost {
        /// Which model.
        model: ModelId,
    },
}

/// The stage of a copy, which says what is reported when its process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Loading,
    Resident,
    Evicting,
}

#[derive(Debug)]
struct Copy {
    process: ModelProcess,
    gpu: GpuId,
    model: ModelId,
    stage: Stage,
    /// Whether its process was killed for taking too long. Its end, which may be long in coming, is the next that is heard.
    killed: bool,
    /// Serial number of its last use.
    used: u64,
    /// Frames that the kernel had no room for.
    waiting: VecDeque<Vec<u8>>,
}

/// The work of a GPU.
#[derive(Debug)]
enum Doing {
    Nothing,
    Loading { model: ModelId, from: Tier, since: Timestamp },
    Running { model: ModelId, left: Vec<RequestId>, since: Timestamp, count: u64 },
}

#[derive(Debug)]
struct Gpu {
    spec: GpuSpec,
    /// Serial numbers of its processes.
    copies: BTreeMap<ModelId, u64>,
    doing: Doing,
    /// Dispatches of a batch whose last one has not come.
    batch: Vec<(RequestId, u16)>,
    version: Option<Version>,
}

#[derive(Debug)]
struct Model {
    program: Program,
    /// The costs that were measured lately.
    observed: Vec<ModelProfile>,
}

/// The model processes of a node. See the [module](super).
///
/// Model processes die with the thread that calls [`GpuManager::order`]: call it from one that lives as long as the manager.
#[derive(Debug)]
pub struct GpuManager {
    config: ManagerConfig,
    epoll: OwnedFd,
    gpus: BTreeMap<GpuId, Gpu>,
    models: BTreeMap<ModelId, Model>,
    copies: BTreeMap<u64, Copy>,
    inputs: BTreeMap<RequestId, Vec<u8>>,
    serial: u64,
    reports: Vec<Report>,
    buffer: Vec<u8>,
}

/// In the low bit of an event's data: a socket, or the end of a process.
const SOCKET: u64 = 0;
const PROCESS: u64 = 1;
/// Frames read from one process before the others have their turn.
const TURN: usize = 64;

impl GpuManager {
    /// A manager without GPUs and models.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub fn new(config: ManagerConfig) -> Result<Self, ManagerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        Ok(Self {
            config,
            epoll,
            gpus: BTreeMap::new(),
            models: BTreeMap::new(),
            copies: BTreeMap::new(),
            inputs: BTreeMap::new(),
            serial: 0,
            reports: Vec::new(),
            buffer: Vec::new(),
        })
    }

    /// A GPU, with nothing on it; reported as `GpuJoined`.
    ///
    /// # Errors
    /// When it is here already.
    pub fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), ManagerError> {
        if self.gpus.contains_key(&gpu) {
            return Err(ManagerError::GpuExists(gpu));
        }
        let GpuSpec { kind, node, memory, .. } = spec;
        self.event(RequestEvent::GpuJoined { gpu, kind, node, memory });
        let doing = Doing::Nothing;
        let (copies, batch) = (BTreeMap::new(), Vec::new());
        self.gpus.insert(gpu, Gpu { spec, copies, doing, batch, version: None });
        Ok(())
    }

    /// Gives a GPU up, because the host found it broken or wants it back: its processes are killed. Reported as `GpuLost`. A process
    /// that hangs in a broken driver ends late, and is not waited for: [`processes`](Self::processes) has it until then.
    ///
    /// # Errors
    /// When it is not here.
    pub fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), ManagerError> {
        let lost = self.gpus.remove(&gpu).ok_or(ManagerError::UnknownGpu(gpu))?;
        for serial in lost.copies.into_values() {
            let Some(copy) = self.copies.get_mut(&serial) else { continue };
            copy.stage = Stage::Evicting;
            copy.process.kill();
        }
        self.event(RequestEvent::GpuLost { gpu });
        Ok(())
    }

    /// A model, or another program for one of which no process runs; reported as `ModelAdded` and `ModelProfiled`.
    ///
    /// # Errors
    /// When processes of it run.
    pub fn add_model(&mut self, model: ModelId, program: Program) -> Result<(), ManagerError> {
        if self.gpus.values().any(|gpu| gpu.copies.contains_key(&model)) {
            return Err(ManagerError::ModelRuns(model));
        }
        self.event(RequestEvent::ModelAdded { model, memory: program.memory });
        for &(kind, profile) in &program.profiles {
            self.event(RequestEvent::ModelProfiled { model, kind, profile });
        }
        let observed = program.profiles.iter().map(|(_, profile)| *profile).collect();
        self.models.insert(model, Model { program, observed });
        Ok(())
    }

    /// The input of a request, for when it is dispatched. Without one it runs with an empty input.
    ///
    /// # Errors
    /// When it is too long for a frame.
    pub fn set_input(&mut self, request: RequestId, input: Vec<u8>) -> Result<(), ManagerError> {
        if input.len() > MAX_PAYLOAD {
            return Err(ManagerError::InputTooLong { request, length: input.len() });
        }
        self.inputs.insert(request, input);
        Ok(())
    }

    /// Forgets the input of a request that will not be dispatched.
    pub fn drop_input(&mut self, request: RequestId) {
        self.inputs.remove(&request);
    }

    /// The events reported so far; for a loop that has nothing else to report now.
    pub(super) fn take_events(&mut self) -> Vec<RequestEvent> {
        let event = |report| match report {
            Report::Event(event) => Some(event),
            _ => None,
        };
        self.reports.drain(..).filter_map(event).collect()
    }

    pub(super) fn program(&self, model: ModelId) -> Option<&Program> {
        self.models.get(&model).map(|known| &known.program)
    }

    /// Undoes an `add_model`.
    pub(super) fn put_back(&mut self, model: ModelId, before: Option<Program>) {
        self.models.remove(&model);
        if let Some(program) = before {
            let observed = program.profiles.iter().map(|(_, profile)| *profile).collect();
            self.models.insert(model, Model { program, observed });
        }
    }

    /// The GPUs, in the order of their names.
    pub fn gpus(&self) -> impl Iterator<Item = GpuId> + '_ {
        self.gpus.keys().copied()
    }

    /// Process numbers by GPU and model.
    pub fn processes(&self) -> Vec<(GpuId, ModelId, u32)> {
        self.copies.values().map(|copy| (copy.gpu, copy.model, copy.process.pid())).collect()
    }

    /// Readable when there is something to [`handle`](Self::handle).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// When to call [`handle`](Self::handle) at the latest.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        if !self.reports.is_empty() {
            return Some(Timestamp::ZERO);
        }
        self.gpus.values().filter_map(|gpu| self.due(gpu)).map(|(due, _)| due).min()
    }

    /// The copy that a GPU is using, and when that takes too long. None once its process was killed for it.
    fn due(&self, gpu: &Gpu) -> Option<(Timestamp, u64)> {
        let (model, since, patience) = match &gpu.doing {
            Doing::Nothing => return None,
            Doing::Loading { model, since, .. } => (model, since, self.config.load_patience),
            Doing::Running { model, since, count, .. } => {
                (model, since, self.config.run_patience.saturating_mul(*count))
            }
        };
        let serial = *gpu.copies.get(model)?;
        let waits = self.copies.get(&serial).is_some_and(|copy| !copy.killed);
        waits.then_some((since.saturating_add(patience), serial))
    }

    /// Carries out an order of the scheduler; what comes of it is reported.
    ///
    /// # Errors
    /// When the order makes no sense here; then nothing was done, and nothing will be reported.
    pub fn order(&mut self, now: Timestamp, action: RequestAction) -> Result<(), ManagerError> {
        match action {
            RequestAction::Evict { gpu, model } => self.evict(gpu, model),
            RequestAction::Load { gpu, model, from, keep_on_host } => {
                self.load(now, gpu, model, from, keep_on_host)
            }
            RequestAction::Dispatch { gpu, request, model, batch_more } => {
                self.dispatch(now, gpu, request, model, batch_more)
            }
            RequestAction::Reject { request, .. } => {
                self.drop_input(request);
                Ok(())
            }
            RequestAction::DropHost { model, .. } => {
                self.reports.push(Report::DropHost { model });
                Ok(())
            }
        }
    }

    fn gpu_mut(&mut self, gpu: GpuId) -> Result<&mut Gpu, ManagerError> {
        self.gpus.get_mut(&gpu).ok_or(ManagerError::UnknownGpu(gpu))
    }

    fn event(&mut self, event: RequestEvent) {
        self.reports.push(Report::Event(event));
    }

    fn evict(&mut self, gpu: GpuId, model: ModelId) -> Result<(), ManagerError> {
        let on = self.gpus.get(&gpu).ok_or(ManagerError::UnknownGpu(gpu))?;
        let in_use = match &on.doing {
            Doing::Nothing => false,
            Doing::Loading { model: used, .. } | Doing::Running { model: used, .. } => *used == model,
        };
        if in_use {
            return Err(ManagerError::Order { gpu, what: "evict", model, why: "is using it" });
        }
        match on.copies.get(&model).and_then(|serial| self.copies.get_mut(serial)) {
            // The process ended before it was told to.
            None => self.event(RequestEvent::Evicted { gpu, model }),
            Some(copy) => {
                copy.stage = Stage::Evicting;
                copy.process.kill();
            }
        }
        Ok(())
    }

    fn load(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        model: ModelId,
        from: Tier,
        keep: bool,
    ) -> Result<(), ManagerError> {
        let on = self.gpus.get(&gpu).ok_or(ManagerError::UnknownGpu(gpu))?;
        let known = self.models.get(&model).ok_or(ManagerError::UnknownModel(model))?;
        let refused = |why| Err(ManagerError::Order { gpu, what: "load", model, why });
        if !matches!(on.doing, Doing::Nothing) {
            return refused("is busy");
        }
        if on.copies.contains_key(&model) {
            return refused("has it already");
        }
        let (serial, used) = (self.serial, self.serial);
        let mut environment = self.config.environment.clone();
        environment.push(("CUDA_VISIBLE_DEVICES".into(), on.spec.visible.clone().into()));
        let tier = if from == Tier::Host { "host" } else { "disk" };
        environment.push(("GSHARE_LOAD_FROM".into(), tier.into()));
        environment.push(("GSHARE_KEEP_ON_HOST".into(), if keep { "1" } else { "0" }.into()));
        let name = format!("{model}-{gpu}-{serial}");
        let hook = self.config.hook.as_ref();
        let process =
            new_run().and_then(|run| ModelProcess::start(&known.program, &name, run, hook, &environment));
        self.serial += 1;
        match process.and_then(|process| self.watch(serial, &process).map(|()| process)) {
            Err(error) => {
                tracing::warn!(%gpu, %model, %error, "a model process does not start");
                self.event(RequestEvent::LoadFailed { gpu, model });
            }
            Ok(process) => {
                tracing::debug!(%gpu, %model, pid = process.pid(), "loading");
                let (stage, waiting) = (Stage::Loading, VecDeque::new());
                let copy = Copy { process, gpu, model, stage, killed: false, used, waiting };
                self.copies.insert(serial, copy);
                let on = self.gpu_mut(gpu)?;
                on.copies.insert(model, serial);
                on.doing = Doing::Loading { model, from, since: now };
            }
        }
        Ok(())
    }

    fn watch(&self, serial: u64, process: &ModelProcess) -> io::Result<()> {
        let data = |tag| epoll::EventData::new_u64(serial << 1 | tag);
        epoll::add(&self.epoll, &process.socket, data(SOCKET), epoll::EventFlags::IN)?;
        Ok(epoll::add(&self.epoll, process.pidfd(), data(PROCESS), epoll::EventFlags::IN)?)
    }

    fn dispatch(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        request: RequestId,
        model: ModelId,
        more: u16,
    ) -> Result<(), ManagerError> {
        let on = self.gpus.get_mut(&gpu).ok_or(ManagerError::UnknownGpu(gpu))?;
        let refused = |why| Err(ManagerError::Order { gpu, what: "run", model, why });
        if !matches!(on.doing, Doing::Nothing) {
            return refused("is busy");
        }
        let copy = on.copies.get(&model).and_then(|serial| self.copies.get_mut(serial));
        if copy.as_ref().is_some_and(|copy| copy.stage == Stage::Evicting) {
            return refused("is evicting it");
        }
        on.batch.push((request, more));
        if more > 0 {
            return Ok(());
        }
        let batch = std::mem::take(&mut on.batch);
        let Some(copy) = copy else {
            // The process ended, and that was reported in the same moment in which this was ordered.
            self.event(RequestEvent::NotResident { gpu, request: batch[0].0 });
            return Ok(());
        };
        self.serial += 1;
        copy.used = self.serial;
        for &(request, more) in &batch {
            let input = self.inputs.get(&request).cloned().unwrap_or_default();
            let mut frame = Vec::with_capacity(64 + input.len());
            ToModel::Run { request, more, input }.encode(&mut frame);
            copy.waiting.push_back(frame);
        }
        let left: Vec<RequestId> = batch.iter().map(|(request, _)| *request).collect();
        let count = left.len() as u64;
        on.doing = Doing::Running { model, left, since: now, count };
        let serial = on.copies[&model];
        self.flush(serial);
        Ok(())
    }

    /// Sends as much as the kernel takes.
    fn flush(&mut self, serial: u64) {
        let Some(copy) = self.copies.get_mut(&serial) else { return };
        let mut interest = epoll::EventFlags::IN;
        while let Some(frame) = copy.waiting.front() {
            match send(&copy.process.socket, frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::NOBUFS) => {
                    interest |= epoll::EventFlags::OUT;
                    break;
                }
                Err(Errno::INTR) => {}
                // Sent; or the process is gone, which its end will tell.
                _ => drop(copy.waiting.pop_front()),
            }
        }
        let data = epoll::EventData::new_u64(serial << 1 | SOCKET);
        let _ = epoll::modify(&self.epoll, &copy.process.socket, data, interest);
    }

    /// Looks at what processes said and which have ended, and kills those that take too long. Adds the reports to `out`.
    ///
    /// # Errors
    /// When the descriptor cannot be asked.
    pub fn handle(&mut self, now: Timestamp, out: &mut Vec<Report>) -> Result<(), ManagerError> {
        let mut events = Vec::with_capacity(64);
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&zero)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        // Frames that a process sent before it ended count: sockets first.
        events.sort_by_key(|event| event.data.u64() & 1);
        for event in events {
            let data = event.data.u64();
            let serial = data >> 1;
            if data & 1 == PROCESS {
                // As much as a socket holds; what its children might add does not count.
                for _ in 0..1 << 12 {
                    if !self.read(now, serial) {
                        break;
                    }
                }
                self.ended(serial);
            } else {
                let flags = event.flags;
                if flags.contains(epoll::EventFlags::OUT) {
                    self.flush(serial);
                }
                for _ in 0..TURN {
                    if !self.read(now, serial) {
                        break;
                    }
                }
            }
        }
        let late = self.gpus.values().filter_map(|gpu| self.due(gpu)).filter(|(due, _)| *due <= now);
        for serial in late.map(|(_, serial)| serial).collect::<Vec<_>>() {
            let Some(copy) = self.copies.get_mut(&serial) else { continue };
            let (gpu, model) = (copy.gpu, copy.model);
            tracing::warn!(%gpu, %model, pid = copy.process.pid(), "takes too long: killed");
            copy.process.kill();
            copy.killed = true;
        }
        out.append(&mut self.reports);
        Ok(())
    }

    /// Takes one frame; whether there may be more.
    fn read(&mut self, now: Timestamp, serial: u64) -> bool {
        let Some(copy) = self.copies.get_mut(&serial) else { return false };
        let frame = match take(&copy.process.socket, &mut self.buffer) {
            Ok(None) => return false,
            Ok(Some(frame)) => frame,
            Err(error) => {
                if let Some(error) = error {
                    tracing::warn!(pid = copy.process.pid(), %error, "a bad frame: killed");
                }
                // A process that does not listen any more is as good as dead. Its end will be told by its pidfd.
                let _ = epoll::delete(&self.epoll, &copy.process.socket);
                copy.process.kill();
                return false;
            }
        };
        let (gpu, model) = (copy.gpu, copy.model);
        let Some(on) = self.gpus.get_mut(&gpu) else { return false };
        match (frame, &mut on.doing) {
            _ if copy.stage == Stage::Evicting => {}
            (FromModel::Ready { .. }, Doing::Loading { model: loading, from, since })
                if *loading == model =>
            {
                let (from, took) = (*from, now.saturating_since(*since));
                copy.stage = Stage::Resident;
                on.doing = Doing::Nothing;
                let kind = on.spec.kind;
                self.learn(
                    model,
                    kind,
                    |profile| match from {
                        Tier::Host => &mut profile.load_host,
                        _ => &mut profile.load_disk,
                    },
                    took,
                );
                self.event(RequestEvent::Loaded { gpu, model, took });
            }
            (FromModel::Failed { reason }, Doing::Loading { model: loading, .. }) if *loading == model => {
                tracing::warn!(%gpu, %model, reason, "cannot be loaded");
                copy.process.kill();
                return false;
            }
            (
                FromModel::Done { request, took: ran, output },
                Doing::Running { model: of, left, since, count },
            ) if *of == model && left.contains(&request) => {
                left.retain(|other| *other != request);
                let (took, count) = (now.saturating_since(*since), *count);
                if left.is_empty() {
                    on.doing = Doing::Nothing;
                    let (kind, one) = (on.spec.kind, Duration::from_nanos(took.as_nanos() / count));
                    self.learn(model, kind, |profile| &mut profile.infer, one);
                }
                self.inputs.remove(&request);
                self.reports.push(Report::Output { request, ran, output });
                self.event(RequestEvent::Completed { gpu, request, took });
            }
            (frame, _) => {
                tracing::warn!(%gpu, %model, pid = copy.process.pid(), ?frame, "out of turn: killed");
                copy.process.kill();
                return false;
            }
        }
        true
    }

    /// An eighth of the way to what was observed.
    fn learn(
        &mut self,
        model: ModelId,
        kind: gshare_core::GpuKind,
        which: impl Fn(&mut ModelProfile) -> &mut Duration,
        took: Duration,
    ) {
        let Some(known) = self.models.get_mut(&model) else { return };
        let at = known.program.profiles.iter().position(|(of, _)| *of == kind);
        if let Some(profile) = at.and_then(|at| known.observed.get_mut(at)) {
            let value = which(profile);
            *value = Duration::from_nanos(value.as_nanos() / 8 * 7 + took.as_nanos() / 8);
        }
    }

    /// A process may have ended: says what that means.
    fn ended(&mut self, serial: u64) {
        let Some(copy) = self.copies.get_mut(&serial) else { return };
        if !copy.process.has_ended() {
            return;
        }
        let (gpu, model, stage) = (copy.gpu, copy.model, copy.stage);
        self.forget(serial);
        // The GPU may have been given up, and be back with another copy.
        let own = |on: &&mut Gpu| on.copies.get(&model) == Some(&serial);
        let Some(on) = self.gpus.get_mut(&gpu).filter(own) else { return };
        on.copies.remove(&model);
        let event = match (stage, &on.doing) {
            (Stage::Evicting, _) => RequestEvent::Evicted { gpu, model },
            (Stage::Loading, _) => {
                on.doing = Doing::Nothing;
                RequestEvent::LoadFailed { gpu, model }
            }
            (Stage::Resident, Doing::Running { model: running, left, .. }) if *running == model => {
                let request = left[0];
                on.doing = Doing::Nothing;
                RequestEvent::NotResident { gpu, request }
            }
            (Stage::Resident, _) => RequestEvent::Dropped { gpu, model },
        };
        tracing::debug!(?event, "a model process has ended");
        self.event(event);
    }

    fn forget(&mut self, serial: u64) {
        if let Some(copy) = self.copies.remove(&serial) {
            // Children of the process may hold the other end, and the descriptor would stay in the set.
            let _ = epoll::delete(&self.epoll, &copy.process.socket);
            let _ = epoll::delete(&self.epoll, copy.process.pidfd());
        }
    }

    /// The GPU as others should see it: what is on it, and when it will have done what it is doing.
    pub fn record(&self, now: Timestamp, gpu: GpuId) -> Option<GpuRecord> {
        let on = self.gpus.get(&gpu)?;
        let known = |model: &ModelId| {
            let known = self.models.get(model)?;
            let at = known.program.profiles.iter().position(|(of, _)| *of == on.spec.kind)?;
            known.observed.get(at)
        };
        let (busy, end) = match &on.doing {
            Doing::Nothing => (false, now),
            Doing::Loading { model, from, since } => {
                let load = known(model).map_or(Duration::ZERO, |profile| match from {
                    Tier::Host => profile.load_host.saturating_add(profile.infer),
                    _ => profile.load_disk.saturating_add(profile.infer),
                });
                (true, since.saturating_add(load))
            }
            Doing::Running { model, since, count, .. } => {
                let infer = known(model).map_or(Duration::ZERO, |profile| profile.infer);
                (true, since.saturating_add(infer.saturating_mul(*count)))
            }
        };
        let here = on.copies.iter().filter_map(|(model, serial)| {
            let copy = self.copies.get(serial)?;
            (copy.stage != Stage::Evicting).then_some((copy.used, *model))
        });
        let mut models: Vec<(u64, ModelId)> = here.collect();
        models.sort_unstable();
        let models = models.into_iter().map(|(_, model)| model).collect();
        Some(GpuRecord { busy, free_at: end.max(now), models })
    }

    /// Writes what others should see into the shared state, under the configured lease.
    ///
    /// # Errors
    /// When the store cannot be reached: what it holds is not renewed. When another manager wrote the record of a GPU: it has
    /// the GPU now, and this one should [give it up](Self::remove_gpu). The other GPUs are written all the same.
    pub fn publish(&mut self, now: Timestamp, store: &mut dyn StateStore) -> Result<(), ManagerError> {
        let mut result = Ok(());
        let names: Vec<GpuId> = self.gpus.keys().copied().collect();
        for gpu in names {
            let (Some(record), Some(on)) = (self.record(now, gpu), self.gpus.get_mut(&gpu)) else { continue };
            // The first manager to come takes over the record that an earlier one has left.
            let expected = on.version.map_or_else(|| store.version(gpu), Ok);
            match expected.and_then(|expected| store.put(now, gpu, record, expected, self.config.lease)) {
                Ok(version) => on.version = Some(version),
                Err(error) => result = Err(error.into()),
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::Bytes;

    const GPU: GpuId = GpuId::new(0);
    const MODEL: ModelId = ModelId::new(0);
    const LOAD: RequestAction =
        RequestAction::Load { gpu: GPU, model: MODEL, from: Tier::Disk, keep_on_host: false };
    const MEMORY: Bytes = Bytes::from_mib(1);

    /// A manager that loads a model that is never ready.
    fn loading() -> GpuManager {
        let mut manager = GpuManager::new(ManagerConfig::default()).unwrap();
        manager.add_gpu(GPU, GpuSpec::new("0", MEMORY)).unwrap();
        let time = Duration::from_millis(1);
        let profile = ModelProfile { load_disk: time, load_host: time, infer: time };
        let mut program = Program::new("sleep", MEMORY, profile);
        program.arguments = vec!["1000".into()];
        manager.add_model(MODEL, program).unwrap();
        manager.take_events();
        manager.order(Timestamp::ZERO, LOAD).unwrap();
        manager
    }

    /// The deadline stayed in the past until the process was reaped: its loop did not sleep, and killed it again and again.
    #[test]
    fn a_process_that_was_killed_for_taking_too_long_has_no_deadline() {
        let mut manager = loading();
        let due = manager.next_deadline().unwrap();
        assert_eq!(due, Timestamp::ZERO.saturating_add(manager.config.load_patience));
        let mut reports = Vec::new();
        manager.handle(due, &mut reports).unwrap();
        assert_eq!((manager.next_deadline(), reports.as_slice()), (None, &[][..]));
        while reports.is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
            manager.handle(due, &mut reports).unwrap();
        }
        assert_eq!(reports, [Report::Event(RequestEvent::LoadFailed { gpu: GPU, model: MODEL })]);
    }

    /// The loop of the host stood still while a process hung in the driver of a broken GPU.
    #[test]
    fn the_processes_of_a_gpu_that_is_given_up_are_not_waited_for_and_their_ends_are_no_news() {
        let mut manager = loading();
        let first = manager.processes();
        manager.remove_gpu(GPU).unwrap();
        assert_eq!((manager.processes(), first.len()), (first, 1), "killed, and not waited for");
        assert_eq!(manager.take_events(), [RequestEvent::GpuLost { gpu: GPU }]);

        manager.add_gpu(GPU, GpuSpec::new("0", MEMORY)).unwrap();
        manager.order(Timestamp::ZERO, LOAD).unwrap();
        manager.take_events();
        let mut reports = Vec::new();
        while manager.processes().len() == 2 {
            std::thread::sleep(std::time::Duration::from_millis(1));
            manager.handle(Timestamp::ZERO, &mut reports).unwrap();
        }
        assert_eq!(
            (reports.as_slice(), manager.next_deadline().is_some()),
            (&[][..], true),
            "the other loads"
        );
    }
}
