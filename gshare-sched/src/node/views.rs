//! Read-only views of a node for `status`, metrics and a replay.

use super::{Client, Device, DeviceUuid, Node, Parking, TenantId, Usage};
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
    /// The first process on the device, since no other source was there to ask.
    #[default]
    Client,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceView {
    /// The node's number of the device.
    pub gpu: GpuId,
    /// The device's UUID.
    pub uuid: DeviceUuid,
    /// The device's memory; 0 while unknown.
    pub memory: Bytes,
    /// The source of the figure for the memory.
    pub source: FactSource,
    /// Memory granted to clients, used or not.
    pub held: Bytes,
    /// The number of clients.
    pub clients: u32,
}

/// An instance on a device: a client of the token scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantView {
    /// The name of the instance.
    pub name: String,
    /// The tenant's state with the token scheduler; `status.client` is its id there.
    pub status: ClientStatus,
    /// The member with the token.
    pub holder: Option<ClientId>,
    /// The time when the debts of the name are paid.
    pub resumes: Timestamp,
}

/// A client: one process on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientView {
    /// The client's id.
    pub client: ClientId,
    /// The client's tenant, by its id with the token scheduler.
    pub tenant: ClientId,
    /// The name of the instance.
    pub name: String,
    /// The client's process.
    pub pid: i32,
    /// The user of the process.
    pub uid: u32,
    /// The program of the process.
    pub program: String,
    /// The client's device.
    pub gpu: GpuId,
    /// The share of the instance, common to its processes, which take turns.
    pub share: Share,
    /// GPU time used lately, and the length of the time span for it.
    pub measured: (Duration, Duration),
    /// GPU time used since the client attached.
    pub total_used: Duration,
    /// GPU time used by the instance in this window.
    pub window_used: Duration,
    /// Whether the client holds a token.
    pub holds_token: bool,
    /// The start of the wait for a token.
    pub waiting_since: Option<Timestamp>,
    /// How long others have kept the instance waiting that could have run by its own share.
    pub delayed: Duration,
    /// The client's use of the device since its process began to use it.
    pub usage: Usage,
    /// Whether the client is only observed.
    pub observed: bool,
    /// The reason for a long wait of a launch, as the process states it, and the start of the wait.
    pub long_wait: Option<(Wait, Timestamp)>,
    /// The memory that can go to host memory, if the process was started so.
    pub parking: Option<Parking>,
    /// Memory in use, as the client stated it.
    pub memory: Bytes,
    /// The limit on the instance's memory on this device.
    pub memory_limit: Option<Bytes>,
    /// The client's behaviour when the daemon is gone.
    pub on_daemon_loss: OnDaemonLoss,
    /// The class of the client, if it takes part in vertical scaling.
    pub class: Option<ServiceClass>,
    /// The state of the vertical scaler: the client's own if it is SLO-sensitive, else the device's.
    pub scale_state: Option<ScaleState>,
    /// The request which the vertical scaler guarantees to the instance now.
    pub scaled_request: Option<Quota>,
    /// The limit the vertical scaler leaves to the instance now.
    pub scaled_limit: Option<Quota>,
}

impl Node {
    /// The number of admitted processes.
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

    /// A client; `None` if it is gone.
    pub fn client(&self, now: Timestamp, id: ClientId) -> Option<ClientView> {
        self.client_view(now, id, self.clients.get(id)?)
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
            delayed: status.delayed,
            usage: client.usage,
            observed: instance.spec.is_observed(),
            long_wait: client.long_wait,
            parking: client
                .parking
                .map(|parking| Parking { returns_since: self.line.returns_since(id), ..parking }),
            memory: self.memory_of(client),
            memory_limit: self.memory_limit(client.tenant),
            on_daemon_loss: session.on_loss,
            class: scale.map(|scale| scale.class),
            scale_state: scale.and_then(|scale| match scale.state {
                ScaleState::None => self.scaling.gpu(tenant.gpu),
                own => Some(own),
            }),
            scaled_request: scale.map(|_| status.share.quota.request()),
            scaled_limit: scale.map(|_| status.share.quota.limit()),
        })
    }
}
