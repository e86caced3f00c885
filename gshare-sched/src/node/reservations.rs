//! Memory: reservations, recalls of unused memory, and the part of each process without a daemon.
//!
//! # Recall
//! A reservation that does not fit is tried once more after a recall. If the limit of the instance is in the way, the node asks the
//! other processes of the instance for their slack; if the device is full, it asks all clients of the device. Reservations, views of an
//! instance's memory and the operator's question wait for the answers a bounded time (`inquiry.rs`). What still does not fit stands in
//! line for the memory of clients that can be parked (`room.rs`).
//!
//! # Restart
//! A process states its part of the memory limit when it attaches after a restart. A process never served by a daemon has no part, unless
//! it is the only process of its run. Siblings may still return from an earlier daemon until [`SETTLE`] after this node admitted its first
//! process, or after the first process of the tenant came back. Until then each process of the tenant gets no more than its part.

use super::inquiry::Purpose;
use super::{Client, MemoryBound, Node, NodeAction, Note, SETTLE, TenantId, memory_account, note, violation};
use gshare_core::wire::ToClient;
use gshare_core::{Bytes, ClientId, ConnId, GpuId, Timestamp};

/// A client's request for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) client: ClientId,
    /// Bytes it needs.
    pub(super) bytes: Bytes,
    /// Bytes it would like to have.
    pub(super) wish: Bytes,
    /// Whether other clients were asked to release unused memory.
    pub(super) recalled: bool,
}

impl Node {
    /// Grants a reservation, denies it, or begins a recall of slack for it.
    pub(super) fn reserve(&mut self, now: Timestamp, reservation: Reservation, out: &mut Vec<NodeAction>) {
        let Reservation { client, bytes, recalled, .. } = reservation;
        let Some(&Client { tenant, memory_part, .. }) = self.clients.get(client) else {
            return;
        };
        let settles = self.tenant(tenant).and_then(|tenant| tenant.settles).filter(|settles| now < *settles);
        let Some(entry) = self.clients.get(client) else { return };
        let most = match settles {
            Some(_) => memory_part.saturating_sub(entry.account.held()),
            None => self.grantable(client),
        };
        match self.grant(now, reservation, most, out) {
            Ok(()) => {}
            Err(_) if settles.is_some() => {
                self.inquiries.begin(now, Purpose::Reserve(reservation), [], settles);
            }
            Err(free) => {
                let purpose = Purpose::Reserve(Reservation { recalled: true, ..reservation });
                let holders = if recalled { Vec::new() } else { self.holders(client, tenant, bytes) };
                if self.inquire(now, purpose, holders, out).is_none() {
                    self.allocate_in_line(now, reservation, free, out);
                }
            }
        }
    }

    /// Grants a reservation out of the free memory up to `most`, or gives the bytes that are free for it.
    pub(super) fn grant(
        &mut self,
        now: Timestamp,
        Reservation { client, bytes, wish, .. }: Reservation,
        most: Bytes,
        out: &mut Vec<NodeAction>,
    ) -> Result<(), Bytes> {
        let entry = self.clients.get_mut(client).expect("a client that asks is there");
        if bytes > most {
            return Err(most);
        }
        let given =
            self.ledger.reserve(&mut entry.account, bytes, wish.min(most)).map_err(|denied| denied.free)?;
        entry.moves.granted = now;
        let (tenant, passes) = (entry.tenant, entry.account.held() > entry.memory_part);
        self.line.taken(client);
        match passes {
            true => self.divide_memory(now, tenant, Some((client, given)), out),
            false => self.send(client, ToClient::MemoryGrant { client, bytes: given }, out),
        }
        Ok(())
    }

    /// Denies a reservation for the sake of a bound.
    pub(super) fn deny(
        &self,
        Reservation { client, bytes: asked, .. }: Reservation,
        of: MemoryBound,
        free: Bytes,
        out: &mut Vec<NodeAction>,
    ) {
        let entry = self.clients.get(client).expect("a client that asks is there");
        let tenant = self.tenant_at(entry.tenant);
        let (gpu, account) = (tenant.gpu, (tenant.gpu, tenant.instance));
        let limit = match of {
            MemoryBound::Instance => self.ledger.tenant_limit(account).unwrap_or(Bytes(u64::MAX)),
            MemoryBound::ParkMemory { .. } => self.config.park_memory,
            _ => self.ledger.device_limit(gpu),
        };
        let held = match of {
            MemoryBound::Instance => self.ledger.tenant_held(account),
            MemoryBound::ParkMemory { uid } => self.parked_of(uid),
            MemoryBound::Guaranteed => self.firm(gpu, None),
            _ => self.ledger.device_held(gpu),
        };
        note(Note::MemoryDenied { client, asked, free, of, limit, held }, out);
        self.send(client, ToClient::MemoryDeny { client, free }, out);
    }

    /// A client gives memory back.
    pub(super) fn release(
        &mut self,
        conn: ConnId,
        client: ClientId,
        bytes: Bytes,
        out: &mut Vec<NodeAction>,
    ) {
        let entry = self.clients.get_mut(client);
        if !entry.is_some_and(|entry| self.ledger.release(&mut entry.account, bytes)) {
            // The accounts of client and node differ. The client states its own again when it reconnects.
            violation(conn, "released more memory than it holds", out);
        }
    }

    /// Clients with slack that could make room for a reservation of `bytes`.
    fn holders(&self, client: ClientId, tenant_id: TenantId, bytes: Bytes) -> Vec<ClientId> {
        let Some(tenant) = self.tenant(tenant_id) else { return Vec::new() };
        let own_limit = self.ledger.tenant_free((tenant.gpu, tenant.instance)) < bytes;
        let may_help = |entry: &Client| {
            self.memory_limit(entry.tenant).is_some()
                && if own_limit { entry.tenant == tenant_id } else { self.is_on(entry, tenant.gpu) }
        };
        let ids = self.clients.iter().filter(|(_, entry)| may_help(entry));
        ids.map(|(id, _)| id).filter(|id| *id != client).collect()
    }

    pub(super) fn is_on(&self, client: &Client, gpu: GpuId) -> bool {
        self.tenant(client.tenant).is_some_and(|tenant| tenant.gpu == gpu)
    }

    /// The limit of all members of a tenant together.
    pub(super) fn memory_limit(&self, tenant: TenantId) -> Option<Bytes> {
        self.spec_of(tenant)?.memory()
    }

    /// Asks the clients with memory for their use. Gives the round of questions; `None` if there is no answer to wait for.
    pub(super) fn inquire(
        &mut self,
        now: Timestamp,
        purpose: Purpose,
        clients: Vec<ClientId>,
        out: &mut Vec<NodeAction>,
    ) -> Option<u32> {
        let recall = u8::from(matches!(purpose, Purpose::Reserve(_) | Purpose::Room));
        let holds = |id: &ClientId| {
            let entry = self.clients.get(*id);
            entry.is_some_and(|entry| entry.account.held() > Bytes::ZERO)
        };
        let holders = clients.into_iter().filter(holds);
        let (round, asked) = self.inquiries.begin(now, purpose, holders, None)?;
        for client in asked {
            self.send(client, ToClient::MemoryAsk { client, round, recall }, out);
        }
        Some(round)
    }

    /// Does the work behind finished rounds of questions.
    pub(super) fn rounds_over(
        &mut self,
        now: Timestamp,
        over: impl IntoIterator<Item = Purpose>,
        out: &mut Vec<NodeAction>,
    ) {
        for purpose in over {
            match purpose {
                Purpose::Status { question } => out.push(NodeAction::UseKnown { question }),
                Purpose::View { client } => self.send_view(client, out),
                Purpose::Reserve(reservation) => {
                    let client = reservation.client;
                    self.reserve(now, reservation, out);
                    self.reserve_queued(now, client, out);
                }
                // The line is looked at after each event.
                Purpose::Room => {}
            }
        }
    }

    /// Reserves for a client what stands behind an answered reservation.
    pub(super) fn reserve_queued(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<NodeAction>) {
        while !self.inquiries.waits(client)
            && !self.line.allocates(client)
            && let Some((bytes, wish)) = self.inquiries.next_queued(client)
        {
            self.reserve(now, Reservation { client, bytes, wish, recalled: false }, out);
        }
    }

    /// Asks all clients with a limit for their use of memory. An action reports the end of the round.
    pub(super) fn ask_for_use(&mut self, now: Timestamp, question: u32, out: &mut Vec<NodeAction>) {
        self.compare_all_use(now);
        let limited = |(id, entry): (ClientId, &Client)| self.memory_limit(entry.tenant).map(|_| id);
        let clients = self.clients.iter().filter_map(limited).collect();
        if self.inquire(now, Purpose::Status { question }, clients, out).is_none() {
            out.push(NodeAction::UseKnown { question });
        }
    }

    /// A client asks for the use of its siblings.
    pub(super) fn view(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<NodeAction>) {
        let siblings = self.siblings(client);
        if self.inquire(now, Purpose::View { client }, siblings, out).is_none() {
            self.send_view(client, out);
        }
    }

    fn siblings(&self, client: ClientId) -> Vec<ClientId> {
        let own = self.clients.get(client);
        let tenant = own.and_then(|entry| self.tenant(entry.tenant));
        let members = tenant.into_iter().flat_map(|tenant| tenant.turns.members());
        members.filter(|member| *member != client).collect()
    }

    fn send_view(&self, client: ClientId, out: &mut Vec<NodeAction>) {
        for sibling in self.siblings(client) {
            let Some(entry) = self.clients.get(sibling) else { continue };
            let Some(session) = self.sessions.get(&entry.conn) else { continue };
            let frame = ToClient::MemoryMember { client, pid: session.own_pid, used: self.memory_of(entry) };
            self.send(client, frame, out);
        }
        if let Some(entry) = self.clients.get(client).filter(|entry| entry.parking.is_some()) {
            let kept = self.firm(self.tenant_at(entry.tenant).gpu, Some(entry.tenant));
            let used = kept.saturating_add(self.config.memory_headroom);
            self.send(client, ToClient::MemoryMember { client, pid: 0, used }, out);
        }
        self.send(client, ToClient::MemoryView { client }, out);
    }

    /// Memory in use by a client, by its last answer; without an answer all of its memory.
    pub(super) fn memory_of(&self, client: &Client) -> Bytes {
        let held = client.account.held();
        match (client.memory, self.memory_limit(client.tenant)) {
            (Some(memory), Some(_)) => memory.min(held),
            (Some(memory), None) => memory,
            (None, _) => held,
        }
    }

    /// Expects siblings of a tenant's members to return, with their memory, from the daemon before `since`.
    pub(super) fn expect_siblings(&mut self, now: Timestamp, id: TenantId, since: Timestamp) {
        let Some(limit) = self.memory_limit(id) else { return };
        let parts: Bytes = self.members_of(id).map(|client| client.memory_part).sum();
        if let Some(tenant) = self.tenant_mut(id) {
            // Nothing remains for absent processes.
            let complete = parts >= limit;
            let settles =
                tenant.settles.filter(|settles| now < *settles).unwrap_or(since.saturating_add(SETTLE));
            tenant.settles = Some(settles).filter(|settles| now < *settles && !complete);
        }
    }

    pub(super) fn members_of(&self, id: TenantId) -> impl Iterator<Item = &Client> {
        let members = self.tenant(id).into_iter().flat_map(|tenant| tenant.turns.members());
        members.filter_map(|member| self.clients.get(member))
    }

    /// Tells each member of a tenant its part of the memory without a daemon: smaller parts first, then the grant, then
    /// larger parts.
    pub(super) fn divide_memory(
        &mut self,
        now: Timestamp,
        id: TenantId,
        granted: Option<(ClientId, Bytes)>,
        out: &mut Vec<NodeAction>,
    ) {
        let settled =
            self.tenant(id).is_some_and(|tenant| tenant.settles.is_none_or(|settles| settles <= now));
        let limit = self.memory_limit(id).filter(|_| settled);
        let members: Vec<ClientId> =
            self.tenant(id).into_iter().flat_map(|tenant| tenant.turns.members()).collect();
        let held: Vec<Bytes> = self.members_of(id).map(|client| client.account.held()).collect();
        let parts = limit.map_or_else(Vec::new, |limit| memory_account::parts(limit, &held));
        for growing in [false, true] {
            if let Some((client, bytes)) = granted.filter(|_| growing) {
                self.send(client, ToClient::MemoryGrant { client, bytes }, out);
            }
            for (&client, &bytes) in members.iter().zip(&parts) {
                let Some(entry) = self.clients.get_mut(client) else { continue };
                let changes = bytes != entry.memory_part || !entry.part_told;
                if changes && (bytes > entry.memory_part) == growing {
                    (entry.memory_part, entry.part_told) = (bytes, true);
                    self.send(client, ToClient::MemoryPart { client, bytes }, out);
                }
            }
        }
    }
}
