//! Views of a node for `status`, metrics and a replay. Nothing here changes anything.

use super::{Client, Device, DeviceUuid, Node, TenantId};
use crate::scale::ScaleState;
use gshare_core::reason::Wait;
use gshare_core::token::ClientStatus;
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, ClientId, Duration, GpuId, Quota, ServiceClass, Share, Timestamp};

/// The source of a device's memory size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum FactSource {
    /// The operator.
    Configuration,
    /// The driver, asked by the host.
    Driver,
    /// The first process that attached to it: there was no other source to ask.
    #[default]
    Client,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceView {
    /// The node's number of the device.
    pub gpu: GpuId,
    /// Its UUID.
    pub uuid: DeviceUuid,
    /// Its memory; 0 while unknown.
    pub memory: Bytes,
    /// The source of the figure for the memory.
    pub source: FactSource,
    /// Memory granted to clients, used or not.
    pub held: Bytes,
    /// Number of its clients.
    pub clients: u32,
}

/// An instance on a device: a client of the token scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantView {
    /// Name of its instance.
    pub name: String,
    /// Its state with the token scheduler, which knows it as `status.client`.
    pub status: ClientStatus,
    /// The member that holds its token.
    pub holder: Option<ClientId>,
    /// When the debts of its name are paid back.
    pub resumes: Timestamp,
}

/// A client: one process on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientView {
    /// Its id.
    pub client: ClientId,
    /// Its tenant, as the token scheduler knows it.
    pub tenant: ClientId,
    /// Name of its instance.
    pub name: String,
    /// Its process.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its program.
    pub program: String,
    /// Its device.
    pub gpu: GpuId,
    /// Share of its instance, whose processes take turns.
    pub share: Share,
    /// GPU time used lately, and in which time.
    pub measured: (Duration, Duration),
    /// GPU time since it attached.
    pub total_used: Duration,
    /// GPU time of its instance in this window.
    pub window_used: Duration,
    /// Whether it holds a token.
    pub holds_token: bool,
    /// Since when it has been waiting for a token.
    pub waiting_since: Option<Timestamp>,
    /// How long its threads have waited in all.
    pub waited: Duration,
    /// Why a launch of its process waits long, as the process says, and since when.
    pub long_wait: Option<(Wait, Timestamp)>,
    /// Kernels launched.
    pub launches: u64,
    /// Memory that it uses; where it has not said so, what was granted to it.
    pub memory: Bytes,
    /// Most memory of its instance on this device.
    pub memory_limit: Option<Bytes>,
    /// The client's behaviour when the daemon is gone.
    pub on_daemon_loss: OnDaemonLoss,
    /// How it is treated beside others, if it takes part in vertical scaling.
    pub class: Option<ServiceClass>,
    /// State of the vertical scaler: its own if it is SLO-sensitive, else its device's.
    pub scale_state: Option<ScaleState>,
    /// The limit that the vertical scaler leaves its instance now.
    pub scaled_limit: Option<Quota>,
}

impl Node {
    /// The number of processes let in.
    pub fn processes(&self) -> usize {
        self.sessions.len()
    }

    /// Length of the window over which shares of time are settled.
    pub fn window(&self) -> Duration {
        self.tokens.0.window()
    }

    /// The devices, by number.
    pub fn devices(&self) -> impl Iterator<Item = DeviceView> + '_ {
        self.devices.iter().zip(0..).filter_map(|(device, number)| {
            let (device, gpu) = (device.as_ref()?, GpuId::new(number));
            let &Device { uuid, memory, source, clients, .. } = device;
            Some(DeviceView { gpu, uuid, memory, source, held: self.ledger.device_held(gpu), clients })
        })
    }

    /// The tenants, by slot.
    pub fn tenants(&self) -> impl Iterator<Item = TenantView> + '_ {
        self.tenants.iter().filter_map(|(id, tenant)| {
            let status = self.tokens.0.client(id)?;
            let name = self.instances.get(&tenant.instance)?.name.clone();
            let holder = tenant.turns.members().find(|member| tenant.turns.holds(*member));
            Some(TenantView { name, status, holder, resumes: tenant.resumes })
        })
    }

    /// The clients, by slot.
    pub fn clients(&self, now: Timestamp) -> impl Iterator<Item = ClientView> + '_ {
        self.clients.iter().filter_map(move |(id, client)| self.client_view(now, id, client))
    }

    fn client_view(&self, now: Timestamp, id: ClientId, client: &Client) -> Option<ClientView> {
        let TenantId(tenant_id) = client.tenant;
        let tenant = self.tenant(client.tenant)?;
        let status = self.tokens.0.client(tenant_id)?;
        let session = self.sessions.get(&client.conn)?;
        let instance = self.instances.get(&tenant.instance)?;
        let scale = self.scaling.client(tenant_id);
        let (total_used, waiting_since) = tenant.turns.of(id);
        let (since, used) = client.samples[0];
        Some(ClientView {
            client: id,
            tenant: tenant_id,
            name: instance.name.clone(),
            pid: session.peer.pid,
            uid: session.peer.uid,
            program: session.program.clone(),
            gpu: tenant.gpu,
            share: Share { quota: instance.spec.quota(), sm: instance.spec.sm() },
            measured: (total_used.saturating_sub(used), now.saturating_since(since)),
            total_used,
            window_used: status.window_used,
            holds_token: tenant.turns.holds(id),
            waiting_since,
            waited: client.waited,
            long_wait: client.long_wait,
            launches: client.launches,
            memory: self.memory_of(client),
            memory_limit: instance.spec.memory(),
            on_daemon_loss: session.on_loss,
            class: scale.map(|scale| scale.class),
            scale_state: scale.and_then(|scale| match scale.state {
                ScaleState::None => self.scaling.gpu(tenant.gpu),
                own => Some(own),
            }),
            scaled_limit: scale.map(|_| status.share.quota.limit()),
        })
    }
}
