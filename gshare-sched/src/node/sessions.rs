//! Sessions and clients: the admission, attaching, detaching and leaving of processes.

use super::printable::{is_printable, printable};
use super::shares::part;
use super::usage::Comparison;
use super::{
    Client, Device, DeviceUuid, FactSource, Instance, Moves, Node, NodeAction, Note, Peer, Percent, Refusal,
    Run, Session, Tenant, TenantId, Turns, Usage, max_gpus, note, time_admission,
};
use gshare_core::wire::{RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, Duration, GpuId, Quota, ResourceSpec, RunId, ServiceClass, Share, Timestamp,
    TokenEvent,
};
use std::collections::{BTreeMap, BTreeSet};

/// Devices known from clients only that a user may have brought, per device still free: of 1,024 the first user gets at most 768, and
/// the second 192 of the rest (dynamic thresholds, Choudhury and Hahne 1998).
const PER_FREE: usize = 3;

/// An attach after all its checks.
struct Attachment {
    instance: u32,
    gpu: GpuId,
    uuid: DeviceUuid,
    spec: ResourceSpec,
    class: Option<ServiceClass>,
    /// The instance's tenant on the device, if there is one, and the number of its members with the new member.
    tenant: Option<TenantId>,
    members: usize,
}

impl Node {
    pub(super) fn hello(&mut self, conn: ConnId, peer: Peer, frame: ToDaemon, out: &mut Vec<NodeAction>) {
        let ToDaemon::Hello { run, name, program, spec, on_loss, pid_start, pid } = frame else { return };
        let program = printable(&program).into_owned();
        let run = match run {
            RunId::NONE => Run::Process { pid: peer.pid, start: pid_start },
            number => Run::Number(number),
        };
        let name = match peer.pid {
            _ if !name.is_empty() => name,
            // The process is in a PID namespace invisible from here.
            0 => format!("{program}-c{}.{}", conn.slot(), conn.generation()),
            pid => format!("{program}-{pid}"),
        };
        let instance = match self.instance_of(conn, peer, run, &name, spec) {
            Ok(instance) => instance,
            Err(refusal) => {
                let spec = self.config.spec_of(&name, spec);
                return self.refuse(conn, &printable(&name), spec, refusal, out);
            }
        };
        if let Some(instance) = self.instances.get_mut(&instance) {
            instance.sessions += 1;
        }
        let (class, clients) = (None, Vec::new());
        let session = Session { peer, instance, program, own_pid: pid, on_loss, class, clients };
        self.sessions.insert(conn, session);
        if self.config.predecessor {
            self.begun.get_or_insert(self.now);
        }
        out.push(NodeAction::Send { conn, frame: ToClient::Welcome { epoch: self.epoch } });
        if let Some(class) = self.listed_class(instance) {
            out.push(NodeAction::Send { conn, frame: ToClient::Class { class } });
        }
    }

    /// The instance of a process after its Hello, either an existing or a new instance.
    fn instance_of(
        &mut self,
        conn: ConnId,
        peer: Peer,
        run: Run,
        name: &str,
        asked: ResourceSpec,
    ) -> Result<u32, Refusal> {
        if self.sessions.contains_key(&conn) {
            return Err(Refusal::SecondHello);
        }
        if !is_printable(name) {
            return Err(Refusal::UnprintableName { name: printable(name).into_owned() });
        }
        let uid = peer.uid;
        if let Some(id) = self.names.get(name) {
            // Another user may have seen the number of a run, and must not join by it.
            let own = |instance: &&Instance| instance.run == run && instance.uid == uid;
            if self.instances.get(id).filter(own).is_some() {
                return Ok(*id);
            }
            let owner = self.sessions.values().find(|session| session.instance == *id);
            let pid = owner.map_or(0, |session| session.peer.pid);
            return Err(Refusal::NameInUse { name: name.to_owned(), pid });
        }
        let listed = self.config.of(name);
        if let Some(owner) = listed.user.filter(|owner| *owner != uid) {
            return Err(Refusal::NameOfAnother { name: name.to_owned(), owner, uid });
        }
        if listed.spec.is_none() && !self.config.allow_unlisted {
            return Err(Refusal::Unlisted { name: name.to_owned() });
        }
        let id = self.next_instance;
        self.next_instance += 1;
        let spec = self.config.spec_of(name, asked);
        let tenants = BTreeMap::new();
        let instance =
            Instance { name: name.to_owned(), run, uid, asked, spec, away: false, sessions: 0, tenants };
        self.instances.insert(id, instance);
        self.names.insert(name.to_owned(), id);
        Ok(id)
    }

    /// A process states its class, which decides its treatment beside others.
    pub(super) fn class(&mut self, conn: ConnId, class: ServiceClass, out: &mut Vec<NodeAction>) {
        match self.sessions.get_mut(&conn) {
            Some(session) if session.clients.is_empty() => session.class = Some(class),
            _ => {
                let refusal = Refusal::OutOfTurn("Class comes after Hello and before the first Attach");
                let (name, spec) = self.name_of(conn);
                self.refuse(conn, &name, spec, refusal, out);
            }
        }
    }

    /// The name and spec of a connection's instance.
    fn name_of(&self, conn: ConnId) -> (String, ResourceSpec) {
        let instance = self.sessions.get(&conn).and_then(|session| self.instances.get(&session.instance));
        instance.map_or((String::new(), ResourceSpec::UNLIMITED), |instance| {
            (instance.name.clone(), instance.spec)
        })
    }

    pub(super) fn attach(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        frame: &ToDaemon,
        out: &mut Vec<NodeAction>,
    ) {
        let &ToDaemon::Attach { ordinal, device: uuid, device_memory, allocated, part: kept, used, allowed } =
            frame
        else {
            unreachable!("attach takes an Attach");
        };
        let attachment = self.check_attach(conn, uuid, device_memory, allocated);
        let attachment = attachment.and_then(|attachment| {
            let tenant = match attachment.tenant {
                Some(tenant) => tenant,
                None => self.open_tenant(now, &attachment, out)?,
            };
            Ok((attachment, tenant))
        });
        match attachment {
            Ok((attachment, tenant)) => {
                let memory = (device_memory, allocated, kept);
                self.admit(now, conn, ordinal, &attachment, tenant, memory, (used, allowed), out);
            }
            Err(refusal) => {
                let (name, spec) = self.name_of(conn);
                match refusal.code() {
                    // The process can still use other devices.
                    RefusalCode::UnknownDevice | RefusalCode::BadSpec => {
                        self.refuse_this(conn, &name, spec, refusal, out);
                    }
                    _ => self.refuse(conn, &name, spec, refusal, out),
                }
            }
        }
    }

    /// Whether a process may attach. Changes nothing.
    fn check_attach(
        &self,
        conn: ConnId,
        uuid: DeviceUuid,
        memory: Bytes,
        allocated: Bytes,
    ) -> Result<Attachment, Refusal> {
        let session = self.sessions.get(&conn).ok_or(Refusal::OutOfTurn("Attach before Hello"))?;
        let (id, class) = (session.instance, session.class);
        let gpu = self.find_device(uuid).ok_or(Refusal::UnknownDevice(uuid))?;
        if self.device(gpu).is_some() && session.clients.iter().any(|id| self.gpu_of(*id) == Some(gpu)) {
            return Err(Refusal::AttachedAlready(uuid));
        }
        let instance = self.instances.get(&id).ok_or(Refusal::OutOfTurn("no such instance"))?;
        let spec = instance.spec;
        let Device { memory: device, .. } = self.known(gpu, uuid, memory);
        if device > Bytes::ZERO {
            spec.check_fits(device).map_err(Refusal::BadSpec)?;
        }
        if allocated > device {
            // A false claim of this size would leave no memory to other processes.
            return Err(Refusal::MoreThanTheDevice { allocated, device });
        }
        let tenant = instance.tenants.get(&gpu).copied();
        let present = tenant.and_then(|id| self.tenant(id)).map_or(0, |tenant| tenant.turns.members().len());
        let members = present + 1;
        if part(spec.quota(), members, members - 1).is_none() {
            return Err(Refusal::TooManyProcesses { quota: spec.quota(), processes: members });
        }
        if tenant.is_none() {
            self.check_request(gpu, uuid, &instance.name, spec)?;
            self.check_guaranteed(gpu, spec, device)?;
        }
        let limit = self.config.max_clients;
        if self.clients.next(limit).is_none() {
            return Err(Refusal::Full { what: "clients", limit });
        }
        if tenant.is_none() && self.tenants.next(limit).is_none() {
            return Err(Refusal::Full { what: "instances", limit });
        }
        if self.device(gpu).is_none() && !self.facts.contains_key(&uuid) {
            self.check_brought(instance.uid)?;
        }
        let spec = spec.on_device(device);
        Ok(Attachment { instance: id, gpu, uuid, spec, class, tenant, members })
    }

    /// Whether a new instance of this name could attach to a device now, with a process asking for the share `asked`. Changes nothing.
    ///
    /// # Errors
    /// The refusal of the instance. There is none where the configuration lets refused processes run.
    pub fn has_room(
        &self,
        name: &str,
        asked: ResourceSpec,
        uuid: DeviceUuid,
        memory: Bytes,
    ) -> Result<(), Refusal> {
        if self.config.refused_run {
            return Ok(());
        }
        let spec = self.config.spec_of(name, asked);
        let gpu = self.find_device(uuid).ok_or(Refusal::UnknownDevice(uuid))?;
        let Device { memory: device, .. } = self.known(gpu, uuid, memory);
        if device > Bytes::ZERO {
            spec.check_fits(device).map_err(Refusal::BadSpec)?;
        }
        self.check_request(gpu, uuid, name, spec)?;
        self.check_guaranteed(gpu, spec, device)
    }

    /// Whether a device can guarantee the memory of another instance beside the memory guaranteed to others and the memory that cannot move.
    fn check_guaranteed(&self, gpu: GpuId, spec: ResourceSpec, device: Bytes) -> Result<(), Refusal> {
        let asked = spec.guaranteed().unwrap_or(Bytes::ZERO);
        let (taken, most) = (self.firm(gpu, None), device.saturating_sub(self.config.memory_headroom));
        match asked > Bytes::ZERO && asked > most.saturating_sub(taken) {
            true => Err(Refusal::MemoryTaken { asked, taken, most }),
            false => Ok(()),
        }
    }

    /// Whether a user may bring another device known from clients only. The bound is [`PER_FREE`] for each of the [`max_gpus`] devices
    /// still free, so no user fills the table with invented UUIDs and keeps other users from a device.
    fn check_brought(&self, uid: u32) -> Result<(), Refusal> {
        let most = max_gpus(self.config.max_clients);
        let taken = self.devices.iter().flatten().count();
        let brought =
            |gpu: &GpuId| self.device(*gpu).is_some_and(|device| device.source == FactSource::Client);
        let instances = self.instances.values().filter(|instance| instance.uid == uid);
        let own: BTreeSet<GpuId> =
            instances.flat_map(|instance| instance.tenants.keys().copied()).filter(brought).collect();
        let own = own.len();
        if own < PER_FREE * (most as usize).saturating_sub(taken) {
            return Ok(());
        }
        Err(Refusal::TooManyDevices { uid, own, taken, most })
    }

    /// Whether the request of an instance can be met on a device beside the admitted and the reserved requests.
    pub(super) fn check_request(
        &self,
        gpu: GpuId,
        uuid: DeviceUuid,
        name: &str,
        spec: ResourceSpec,
    ) -> Result<(), Refusal> {
        let share = Share { quota: spec.quota(), sm: spec.sm() };
        let request = share.quota.request();
        if request.is_zero() {
            return Ok(());
        }
        let mut shares: Vec<Share> = self.shares_on(gpu).map(|(_, share)| share).collect();
        shares.push(share);
        let listed = self.config.of(name).spec.is_some();
        let reserved = if listed { Vec::new() } else { self.reserved_on(gpu, uuid) };
        time_admission::check(&shares, &reserved).map_err(|time_admission::Excess { taken, reserved }| {
            let taken = Percent(taken.0 - u32::from(request.get()));
            Refusal::Overcommitted { request, taken, reserved }
        })
    }

    /// The instances on a device, and their shares.
    pub(super) fn shares_on(&self, gpu: GpuId) -> impl Iterator<Item = (&Instance, Share)> {
        let on = move |instance: &&Instance| instance.tenants.contains_key(&gpu);
        self.instances
            .values()
            .filter(on)
            .map(|instance| (instance, Share { quota: instance.spec.quota(), sm: instance.spec.sm() }))
    }

    /// The shares of listed names absent from a device but allowed on it.
    fn reserved_on(&self, gpu: GpuId, uuid: DeviceUuid) -> Vec<Share> {
        let there = |name: &str| {
            let instance = self.names.get(name).and_then(|id| self.instances.get(id));
            instance.is_some_and(|instance| instance.tenants.contains_key(&gpu))
        };
        self.config.reserved_on(Some(uuid)).filter(|(name, _)| !there(name)).map(|(_, share)| share).collect()
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    fn admit(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        ordinal: u32,
        attachment: &Attachment,
        tenant: TenantId,
        (memory, allocated, kept): (Bytes, Bytes, Option<Bytes>),
        (used, allowed): (Duration, Duration),
        out: &mut Vec<NodeAction>,
    ) {
        let &Attachment { instance, gpu, uuid, spec, members, .. } = attachment;
        let Some(part) = part(spec.quota(), members, members - 1) else { return };
        // The other members shrink first, so the parts never add up to more than the limit.
        self.divide(tenant, false, Some(members), out);
        self.add_device(gpu, uuid, memory);
        self.neighbours_changed(gpu, out);
        let alone = self.device(gpu).is_some_and(|device| device.clients == 1);
        self.ledger.set_tenant((gpu, instance), spec.memory());
        let account = self.ledger.open((gpu, instance), allocated);
        let memory_part = kept.map_or(account.held(), |kept| kept.min(spec.memory().unwrap_or(kept)));
        let entry = Client {
            conn,
            tenant,
            part,
            alone,
            account,
            memory_part,
            part_told: false,
            memory: spec.memory().is_none().then_some(allocated),
            usage: Usage { busy: used, ..Usage::default() },
            counted: used,
            long_wait: None,
            parking: None,
            moves: Moves::new(now),
            samples: [(now, Duration::ZERO); 2],
        };
        let stated = spec.with_quota(entry.stated());
        let client = self.clients.insert(entry);
        let mut pid = 0;
        if let Some(session) = self.sessions.get_mut(&conn) {
            session.clients.push(client);
            pid = session.peer.pid;
        }
        self.tenant_at_mut(tenant).turns.join(client, used, allowed);
        let (name, _) = self.name_of(conn);
        note(Note::Admitted { conn, client, tenant: tenant.0, gpu, name, pid }, out);
        let (window, in_flight) = (self.tokens.0.window(), self.config.in_flight);
        let frame = ToClient::Attached { ordinal, client, gpu, spec: stated, window, in_flight };
        out.push(NodeAction::Send { conn, frame });
        if used > allowed {
            self.tell_scheduler(now, tenant, out);
        }
        // A returning client was served by an earlier daemon, and a new process may have siblings served by one.
        if kept.is_some() {
            // The returning client proves an earlier daemon, even against the configuration.
            self.begun.get_or_insert(now);
        }
        let before = if kept.is_some() { Some(now) } else { self.begun };
        if let Some(since) = before {
            self.expect_siblings(now, tenant, since);
        }
        self.divide_memory(now, tenant, None, out);
        self.set_away(now, instance, false, out);
    }

    /// Makes a client of the scheduler for the first process of an instance on a device.
    fn open_tenant(
        &mut self,
        now: Timestamp,
        attachment: &Attachment,
        out: &mut Vec<NodeAction>,
    ) -> Result<TenantId, Refusal> {
        let &Attachment { instance, gpu, uuid, spec, class, .. } = attachment;
        let limit = self.config.max_clients;
        let full = Refusal::Full { what: "instances", limit };
        let id = self.tenants.next(limit).ok_or(full)?;
        let share = Share { quota: spec.quota(), sm: spec.sm() };
        self.lower_raised(now, gpu, out);
        if !self.token(now, TokenEvent::ClientJoined { client: id, gpu, share }, out) {
            return Err(Refusal::Scheduler);
        }
        let limit = spec.quota().limit();
        let mut resumes = now;
        if let Some(entry) = self.instances.get_mut(&instance) {
            entry.tenants.insert(gpu, TenantId(id));
            let debtor = (entry.uid, entry.name.clone(), uuid);
            resumes = now.saturating_add(self.debts.wait(now, &debtor, limit));
        }
        self.tenants.insert(Tenant {
            gpu,
            instance,
            turns: Turns::default(),
            class,
            since: (resumes, Duration::ZERO),
            largest: (now, limit),
            resumes,
            settles: None,
        });
        self.classify(now, TenantId(id), out);
        Ok(TenantId(id))
    }

    pub(super) fn detach(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        client: ClientId,
        out: &mut Vec<NodeAction>,
    ) {
        if let Some(session) = self.sessions.get_mut(&conn) {
            session.clients.retain(|other| *other != client);
        }
        self.leave(now, client, out);
    }

    /// A connection or its process is gone.
    pub(super) fn closed(&mut self, now: Timestamp, conn: ConnId, out: &mut Vec<NodeAction>) {
        let Some(session) = self.sessions.remove(&conn) else { return };
        for client in session.clients {
            self.leave(now, client, out);
        }
        if let Some(instance) = self.instances.get_mut(&session.instance) {
            instance.sessions -= 1;
            if instance.sessions == 0 {
                self.names.remove(&instance.name);
                self.instances.remove(&session.instance);
            }
        }
    }

    fn leave(&mut self, now: Timestamp, id: ClientId, out: &mut Vec<NodeAction>) {
        let tenant_id = self.clients.get(id).expect("a session's client is there").tenant;
        let tenant = self.tenant_at_mut(tenant_id);
        let (gpu, members, instance) = (tenant.gpu, tenant.turns.members().len(), tenant.instance);
        tenant.turns.leave(id);
        self.tell_scheduler(now, tenant_id, out);
        self.compare_use(now, gpu, true);
        let overuse = if members == 1 { self.overuse(now, tenant_id, out) } else { None };
        let client = self.clients.remove(id).expect("a session's client is there");
        self.ledger.close(client.account);
        note(Note::Left { client: id, tenant: tenant_id.0, usage: client.usage }, out);
        let over = self.inquiries.left(id);
        self.line.leave(id);
        if let Some(Some(device)) = self.devices.get_mut(gpu.index()) {
            device.clients -= 1;
        }
        if members == 1 {
            self.close_tenant(now, tenant_id, overuse, out);
        } else {
            self.divide(tenant_id, false, None, out);
            self.divide_memory(now, tenant_id, None, out);
        }
        self.neighbours_changed(gpu, out);
        self.rounds_over(now, over, out);
        self.set_away(now, instance, false, out);
        if let Some(Some(device)) = self.devices.get(gpu.index())
            && device.clients == 0
            && !device.listed
        {
            // A device learned from a client is forgotten with the last client.
            self.devices[gpu.index()] = None;
        }
    }

    /// A tenant's last process is gone. Its overuse stays with its user and name as a debt.
    fn close_tenant(
        &mut self,
        now: Timestamp,
        id: TenantId,
        overuse: Option<(Duration, Quota)>,
        out: &mut Vec<NodeAction>,
    ) {
        let Some(tenant) = self.tenants.remove(id.0) else { return };
        self.waiting.remove(&(tenant.resumes, id));
        if let Some((owed, limit)) = overuse
            && let (Some(instance), Some(device)) =
                (self.instances.get(&tenant.instance), self.device(tenant.gpu))
        {
            let most = (self.config.max_debt, self.config.max_clients as usize);
            let name = instance.name.clone();
            note(Note::DebtKept { tenant: id.0, name: name.clone(), owed, limit }, out);
            self.debts.add(now, (instance.uid, name, device.uuid), owed, limit, most);
        }
        self.token(now, TokenEvent::ClientLeft { client: id.0 }, out);
        self.scaling.leave(now, id.0);
        self.ledger.forget((tenant.gpu, tenant.instance));
        if let Some(instance) = self.instances.get_mut(&tenant.instance) {
            instance.tenants.remove(&tenant.gpu);
        }
    }

    fn gpu_of(&self, client: ClientId) -> Option<GpuId> {
        let client = self.clients.get(client)?;
        self.tenant(client.tenant).map(|tenant| tenant.gpu)
    }

    /// The number of a device. A new device gets the lowest free number, if the configuration lists no devices.
    fn find_device(&self, uuid: DeviceUuid) -> Option<GpuId> {
        let is = |device: &Option<Device>| device.as_ref().is_some_and(|device| device.uuid == uuid);
        let found = self.devices.iter().position(is);
        let free = || {
            let any = self.config.devices.is_empty();
            any.then(|| self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len()))
        };
        found.or_else(free).and_then(|index| u32::try_from(index).ok()).map(GpuId::new)
    }

    fn add_device(&mut self, gpu: GpuId, uuid: DeviceUuid, memory: Bytes) {
        if gpu.index() >= self.devices.len() {
            self.devices.resize_with(gpu.index() + 1, || None);
        }
        let mut device = self.known(gpu, uuid, memory);
        device.clients += 1;
        self.devices[gpu.index()] = Some(device);
        self.limit_device(gpu.index());
    }

    /// A device as it is, or as it would be after the attach of a process that states the memory as `said`.
    fn known(&self, gpu: GpuId, uuid: DeviceUuid, said: Bytes) -> Device {
        let source = FactSource::Client;
        let comparison = Comparison::begin(self.now);
        let new = || Device { uuid, memory: Bytes::ZERO, source, listed: false, clients: 0, comparison };
        let mut device = self.device(gpu).cloned().unwrap_or_else(new);
        match self.facts.get(&uuid) {
            Some(fact) if device.source == FactSource::Client => {
                (device.uuid, device.memory) = *fact;
                device.source = FactSource::Driver;
            }
            _ if device.memory == Bytes::ZERO => device.memory = said,
            _ => {}
        }
        device
    }

    /// The driver's figure goes before a client's, also for a device already brought by a client.
    pub(super) fn device_found(&mut self, uuid: DeviceUuid, memory: Bytes, out: &mut Vec<NodeAction>) {
        if memory == Bytes::ZERO || self.facts.insert(uuid, (uuid, memory)) == Some((uuid, memory)) {
            return note(Note::NoEffect, out);
        }
        let there = |device: &Option<Device>| device.as_ref().is_some_and(|device| device.uuid == uuid);
        if let Some(index) = self.devices.iter().position(there)
            && let Ok(gpu) = u32::try_from(index).map(GpuId::new)
        {
            self.devices[index] = Some(self.known(gpu, uuid, memory));
            self.limit_device(index);
        }
    }

    pub(super) fn limit_device(&mut self, index: usize) {
        let Some(Some(device)) = self.devices.get(index) else { return };
        if device.memory > Bytes::ZERO
            && let Ok(number) = u32::try_from(index)
        {
            let limit = device.memory.saturating_sub(self.config.memory_headroom);
            self.ledger.set_device(GpuId::new(number), limit);
        }
    }

    /// Refuses the process and ends its connection.
    fn refuse(
        &self,
        conn: ConnId,
        name: &str,
        spec: ResourceSpec,
        refusal: Refusal,
        out: &mut Vec<NodeAction>,
    ) {
        let reason = refusal.code();
        self.refuse_this(conn, name, spec, refusal, out);
        out.push(NodeAction::Drop { conn, reason });
    }

    /// Refuses one request of the process and keeps the connection. Where the operator lets refused processes run, they keep to `spec` by
    /// themselves, except after a breach of the protocol, where the process gets no spec.
    fn refuse_this(
        &self,
        conn: ConnId,
        name: &str,
        spec: ResourceSpec,
        refusal: Refusal,
        out: &mut Vec<NodeAction>,
    ) {
        let (code, text) = (refusal.code(), refusal.to_string());
        note(Note::Refused { conn, name: name.to_owned(), refusal }, out);
        note(Note::NoEffect, out);
        let frame = match self.config.refused_run && code != RefusalCode::Protocol {
            true => ToClient::Unserved { code, text, spec: Some(spec) },
            false => ToClient::Refused { code, text },
        };
        out.push(NodeAction::Send { conn, frame });
    }
}
