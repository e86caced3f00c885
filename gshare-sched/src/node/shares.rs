//! Shares: the division of an instance's share among its processes, vertical scaling, and reload.
//!
//! # Division
//! Without a daemon each of `n` members keeps to `1/n` of request and limit. The remainder of the division goes to the first members, one
//! basis point each, so the sum is exact. Shrinking parts are sent before growing parts. Example: limit 50 %, three members: 16.67,
//! 16.67, 16.66 %.

use super::co_scaling::Resize;
use super::{Client, Instance, Node, NodeAction, NodeConfig, Note, Tenant, TenantId, note, time_admission};
use crate::scale::VerticalError;
use gshare_core::wire::ToClient;
use gshare_core::{
    Bytes, ClientId, ConfigError, Duration, GpuId, Quota, QuotaRange, ResourceSpec, ServiceClass, Share,
    Timestamp, TokenEvent,
};

/// The request stated to a process in place of the whole, while the process has neighbours on its device.
const NOT_ALONE: u16 = Quota::WHOLE.get() - 1;

/// The `index`-th of `n` even parts of a quota; `None` if a part would be less than a basis point.
pub(super) fn part(quota: QuotaRange, n: usize, index: usize) -> Option<QuotaRange> {
    let n = u16::try_from(n).ok()?;
    let index = u16::try_from(index).ok()?;
    let part = |whole: Quota| Quota::new(whole.get() / n + u16::from(index < whole.get() % n));
    QuotaRange::new(part(quota.request())?, part(quota.limit())?).ok()
}

impl Client {
    /// The share stated to the process, which is its part. A process with a request of the whole launches without tokens, so beside
    /// other clients the stated request is less.
    pub(super) fn stated(&self) -> QuotaRange {
        let less = || QuotaRange::new(Quota::new(NOT_ALONE)?, self.part.limit()).ok();
        if self.alone || self.part.request() < Quota::WHOLE {
            return self.part;
        }
        less().unwrap_or(self.part)
    }
}

impl Node {
    /// A client has come to a device or left it. Clients with the whole as their request learn whether they are alone now.
    pub(super) fn neighbours_changed(&mut self, gpu: GpuId, out: &mut Vec<NodeAction>) {
        let Some(alone) = self.device(gpu).map(|device| device.clients == 1) else { return };
        let whole = |entry: &Client| entry.part.request() == Quota::WHOLE && entry.alone != alone;
        let changed = self.clients.iter().filter(|(.., entry)| whole(entry) && self.is_on(entry, gpu));
        let changed: Vec<_> = changed.map(|(id, _)| id).collect();
        for client in changed {
            let Some(entry) = self.clients.get_mut(client) else { continue };
            entry.alone = alone;
            let (tenant, stated) = (entry.tenant, entry.stated());
            if let Some(spec) = self.spec_of(tenant) {
                self.send(client, ToClient::ShareChanged { client, spec: spec.with_quota(stated) }, out);
            }
        }
    }

    pub(super) fn spec_of(&self, tenant: TenantId) -> Option<ResourceSpec> {
        let tenant = self.tenant(tenant)?;
        let device = self.device(tenant.gpu).map_or(Bytes::ZERO, |device| device.memory);
        self.instances.get(&tenant.instance).map(|instance| instance.spec.on_device(device))
    }

    /// Tells each member of a tenant its part, the shrinking parts first. `of` is the number of parts, by default the number of members.
    /// With `tell_all`, a member with an unchanged part is told the spec too.
    pub(super) fn divide(
        &mut self,
        id: TenantId,
        tell_all: bool,
        of: Option<usize>,
        out: &mut Vec<NodeAction>,
    ) {
        let (Some(tenant), Some(spec)) = (self.tenant(id), self.spec_of(id)) else { return };
        let alone = self.device(tenant.gpu).is_some_and(|device| device.clients == 1);
        let members: Vec<ClientId> = tenant.turns.members().collect();
        let n = of.unwrap_or(members.len());
        for growing in [false, true] {
            for (index, id) in members.iter().enumerate() {
                let Some(quota) = part(spec.quota(), n, index) else { continue };
                let Some(client) = self.clients.get_mut(*id) else { continue };
                if (quota.limit() > client.part.limit()) != growing || (quota == client.part && !tell_all) {
                    continue;
                }
                (client.part, client.alone) = (quota, alone);
                let spec = spec.with_quota(client.stated());
                out.push(NodeAction::Send {
                    conn: client.conn,
                    frame: ToClient::ShareChanged { client: *id, spec },
                });
            }
        }
    }

    /// Puts the shares of the vertical scaler in force after the end of its period. Processes are not told, since a stated share is for
    /// the time after the loss of this daemon.
    pub(super) fn scale(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        let mut resizes = core::mem::take(&mut self.resizes);
        let tokens = &self.tokens.0;
        let used =
            |client| tokens.client(client).map(|status| (status.total_used, status.waiting_since.is_some()));
        let instances = &self.instances;
        let spare = |gpu: GpuId| {
            let there = instances.values().filter(|instance| instance.tenants.contains_key(&gpu));
            let sum: u32 = there.map(|instance| u32::from(instance.spec.quota().request().get())).sum();
            u32::from(Quota::WHOLE.get()).saturating_sub(sum)
        };
        self.scaling.period(now, used, spare, &mut resizes);
        resizes.drain(..).for_each(|resize| self.resize(now, resize, out));
        self.resizes = resizes;
    }

    /// Puts a share of the vertical scaler in force.
    fn resize(&mut self, now: Timestamp, Resize { client, quota }: Resize, out: &mut Vec<NodeAction>) {
        let Some(spec) = self.spec_of(TenantId(client)) else { return };
        let share = Share { quota, sm: spec.sm() };
        self.token(now, TokenEvent::ShareChanged { client, share }, out);
    }

    /// Takes requests back which the vertical scaler has raised on a device, before another request is put in force there.
    pub(super) fn lower_raised(&mut self, now: Timestamp, gpu: GpuId, out: &mut Vec<NodeAction>) {
        for resize in self.scaling.lower(gpu) {
            self.resize(now, resize, out);
        }
    }

    /// The configured class of an instance.
    pub(super) fn listed_class(&self, instance: u32) -> Option<ServiceClass> {
        self.instances.get(&instance).and_then(|instance| self.config.of(&instance.name).class)
    }

    /// The class of a tenant in scaling. An observed tenant has none.
    pub(super) fn class_of(&self, tenant: &Tenant) -> Option<ServiceClass> {
        let observed = self.instances.get(&tenant.instance).is_some_and(|known| known.spec.is_observed());
        self.listed_class(tenant.instance).or(tenant.class).filter(|_| !observed)
    }

    /// Lets a tenant take part in scaling by its class; without a class the tenant takes no part.
    pub(super) fn classify(&mut self, now: Timestamp, id: TenantId, out: &mut Vec<NodeAction>) {
        let Some(tenant) = self.tenant(id) else { return };
        let Some(instance) = self.instances.get(&tenant.instance) else { return };
        let Some(class) = self.class_of(tenant) else { return };
        let share = Share { quota: instance.spec.quota(), sm: instance.spec.sm() };
        let used = self.tokens.0.client(id.0).map_or(Duration::ZERO, |status| status.total_used);
        if let Err(error) = self.scaling.join(now, (id.0, used), tenant.gpu, share, class) {
            self.not_scaled(id, &error, out);
        }
        if class.is_slo_sensitive() {
            self.token(now, TokenEvent::ClassChanged { client: id.0, class }, out);
        }
    }

    fn not_scaled(&self, id: TenantId, error: &VerticalError, out: &mut Vec<NodeAction>) {
        let instance = self.tenant(id).and_then(|tenant| self.instances.get(&tenant.instance));
        if let Some(Instance { name, spec, .. }) = instance {
            let (tenant, name, quota) = (id.0, name.clone(), spec.quota());
            note(Note::NotScaled { tenant, name, quota, why: error.to_string() }, out);
        }
    }

    /// The share of an instance under a configuration.
    pub(super) fn spec_under(config: &NodeConfig, instance: &Instance) -> ResourceSpec {
        let spec = config.spec_of(&instance.name, instance.asked);
        let nothing = QuotaRange::new(Quota::ZERO, spec.quota().limit()).ok().filter(|_| instance.away);
        nothing.map_or(spec, |quota| spec.with_quota(quota))
    }

    /// Checks whether another configuration can be put in force.
    pub(super) fn check_reload(&self, new: &NodeConfig) -> Result<(), ConfigError> {
        self.config.check_live(new)?;
        for instance in self.instances.values() {
            let spec = Self::spec_under(new, instance);
            let field = |key: &str| format!("client `{}`: {key}", instance.name);
            for (gpu, tenant) in &instance.tenants {
                let members = self.tenant(*tenant).map_or(1, |tenant| tenant.turns.members().len());
                let memory = self.device(*gpu).map_or(Bytes::ZERO, |device| device.memory);
                if memory > Bytes::ZERO && spec.check_fits(memory).is_err() {
                    let value = spec.guaranteed().or(spec.memory()).unwrap_or(Bytes::ZERO);
                    let bound = format!("need at most the device's {memory}");
                    return Err(ConfigError::new(field("memory"), value, bound));
                }
                if part(spec.quota(), members, members - 1).is_none() {
                    let bound = format!("need 0.01% for each of its {members} processes");
                    return Err(ConfigError::new(field("quota"), spec.quota(), bound));
                }
            }
        }
        for (device, number) in self.devices.iter().zip(0..) {
            if let Some(device) = device {
                self.check_requests(new, GpuId::new(number), device.uuid)?;
            }
        }
        Ok(())
    }

    /// Checks whether the requests on a device can be met under another configuration.
    fn check_requests(
        &self,
        new: &NodeConfig,
        gpu: GpuId,
        uuid: super::DeviceUuid,
    ) -> Result<(), ConfigError> {
        let share = |spec: ResourceSpec| Share { quota: spec.quota(), sm: spec.sm() };
        let there: Vec<&Instance> = self.shares_on(gpu).map(|(instance, _)| instance).collect();
        let shares: Vec<Share> =
            there.iter().map(|instance| share(Self::spec_under(new, instance))).collect();
        let unlisted = |instance: &&Instance| {
            new.of(&instance.name).spec.is_none() && !instance.asked.quota().request().is_zero()
        };
        let reserved: Vec<Share> = if there.iter().copied().any(|instance| unlisted(&instance)) {
            let absent = |(name, _): &(&str, Share)| there.iter().all(|instance| instance.name != *name);
            new.reserved_on(Some(uuid)).filter(absent).map(|(_, share)| share).collect()
        } else {
            Vec::new()
        };
        time_admission::check(&shares, &reserved).map_err(|excess| excess.on(Some(uuid)))
    }

    /// Puts a configuration in force after [`Node::check_reload`] has let it pass.
    pub(super) fn reload(&mut self, now: Timestamp, new: NodeConfig, out: &mut Vec<NodeAction>) {
        let specs: Vec<(u32, ResourceSpec)> =
            self.instances.iter().map(|(id, instance)| (*id, Self::spec_under(&new, instance))).collect();
        let old = core::mem::replace(&mut self.config, new);
        self.config.predecessor = old.predecessor;
        for gpu in 0..self.devices.len() {
            self.limit_device(gpu);
        }
        for (id, spec) in specs {
            self.put_in_force(now, id, spec, out);
        }
        self.reclassify(now, &old, out);
    }

    /// Puts a share of an instance in force.
    pub(super) fn put_in_force(
        &mut self,
        now: Timestamp,
        id: u32,
        spec: ResourceSpec,
        out: &mut Vec<NodeAction>,
    ) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let changed = instance.spec != spec;
        instance.spec = spec;
        let share = Share { quota: spec.quota(), sm: spec.sm() };
        for (gpu, tenant) in instance.tenants.clone() {
            self.ledger.set_tenant((gpu, id), self.memory_limit(tenant));
            if changed {
                self.lower_raised(now, gpu, out);
                self.token(now, TokenEvent::ShareChanged { client: tenant.0, share }, out);
                if let Err(error) = self.scaling.share_changed(now, tenant.0, share) {
                    self.not_scaled(tenant, &error, out);
                }
                self.divide(tenant, true, None, out);
                self.divide_memory(now, tenant, None, out);
            }
        }
    }

    /// Puts the classes of the configuration in force where they differ from `old`. Every tenant with another class, or with none any more,
    /// first gives its scaled share up.
    fn reclassify(&mut self, now: Timestamp, old: &NodeConfig, out: &mut Vec<NodeAction>) {
        for (conn, session) in &self.sessions {
            let listed = self.listed_class(session.instance);
            let name = self.instances.get(&session.instance).map_or("", |instance| instance.name.as_str());
            if let Some(class) = listed
                && old.of(name).class != listed
            {
                out.push(NodeAction::Send { conn: *conn, frame: ToClient::Class { class } });
            }
        }
        let mut changed = Vec::new();
        for (id, tenant) in self.tenants.iter() {
            let class = self.class_of(tenant);
            if self.scaling.client(id).map(|scale| scale.class) != class {
                changed.push((TenantId(id), tenant.instance));
            }
        }
        for (id, instance) in &changed {
            self.scaling.leave(now, id.0);
            let class = ServiceClass::BestEffort;
            self.token(now, TokenEvent::ClassChanged { client: id.0, class }, out);
            let Some(spec) = self.instances.get(instance).map(|instance| instance.spec) else { continue };
            let share = Share { quota: spec.quota(), sm: spec.sm() };
            self.token(now, TokenEvent::ShareChanged { client: id.0, share }, out);
        }
        for (id, _) in changed {
            self.classify(now, id, out);
        }
    }
}
