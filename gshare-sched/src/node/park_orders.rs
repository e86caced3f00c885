//! Parking: a client's movable memory goes to host memory, and comes back before the client launches again.
//!
//! The client moves its memory, and states the place and the bytes ([`ToDaemon::Parking`](gshare_core::wire::ToDaemon)). The node gives
//! the order, and no token before the memory is back: until then the client does not wait in its tenant's line. A thread that misses the
//! memory asks for its return, which needs room (`room.rs`). The client then reserves its memory anew, as before any allocation.

use super::{Instance, Node, NodeAction, Note, Refusal, note};
use gshare_core::reason::Obstacle;
use gshare_core::wire::{Residence, ToClient};
use gshare_core::{Bytes, ClientId, Timestamp};

/// The movable memory of a client, by the last word of its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Parking {
    /// The place of the memory.
    pub residence: Residence,
    /// Bytes that can move, or that have moved.
    pub bytes: Bytes,
    /// Why the last move failed, or why no byte can move.
    pub obstacle: Option<Obstacle>,
    /// Whether the node has ordered the memory to host memory.
    pub ordered: bool,
    /// Time of that order.
    #[cfg_attr(feature = "serde", serde(default))]
    pub ordered_at: Option<Timestamp>,
    /// User of that order; 0 is root or the daemon's own user, `None` a user of an earlier daemon.
    #[cfg_attr(feature = "serde", serde(default))]
    pub ordered_by: Option<u32>,
    /// The client that needed the memory; `None` for an order of a user.
    #[cfg_attr(feature = "serde", serde(default))]
    pub ordered_for: Option<ClientId>,
    /// Whether the memory comes back by another order of a user only, even if the program misses it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub held: bool,
    /// Start of the wait for room to come back into.
    #[cfg_attr(feature = "serde", serde(default))]
    pub returns_since: Option<Timestamp>,
}

/// The cause of an order to park.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    User {
        uid: u32,
        /// Whether the memory stays until it is asked back.
        holds: bool,
    },
    /// A client that needs the memory.
    For(ClientId),
}

impl Parking {
    /// Bytes in host memory, or on the way there.
    pub fn on_host(&self) -> Bytes {
        if self.ordered || self.residence != Residence::Resident { self.bytes } else { Bytes::ZERO }
    }
}

/// Why an instance is not parked, or does not come back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParkRefusal {
    /// No instance has the name.
    #[error("no client is named `{name}` (gshare status lists them)")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The instance belongs to another user.
    #[error("`{name}` belongs to user {owner}, not {uid}: ask that user or root")]
    OfAnother {
        /// The name.
        name: String,
        /// The user of the instance.
        owner: u32,
        /// The asking user.
        uid: u32,
    },
    /// No process of the instance was started for parking.
    #[error("`{name}` cannot be parked: start it with `gshare run --park`")]
    NotParkable {
        /// The name.
        name: String,
    },
    /// None of the instance's memory can move.
    #[error("`{name}` has no memory that can move{}", obstacle.map_or(String::new(), |why| format!(": {}", gshare_core::reason::Reason::from(why))))]
    NothingMoves {
        /// The name.
        name: String,
        /// Why its memory stays; `None` without any memory.
        obstacle: Option<Obstacle>,
    },
    /// The request for time, free while the instance was away, cannot be met any more.
    #[error("`{name}` does not come back: {why}")]
    NoTime {
        /// The name.
        name: String,
        /// The refusal of its request.
        why: String,
    },
    /// The user's budget of host memory is too small.
    #[error(
        "`{name}` needs {need} of host memory, and {taken} of {budget} are taken for user {owner} (park_memory)"
    )]
    HostBudget {
        /// The name.
        name: String,
        /// Bytes to be moved.
        need: Bytes,
        /// Bytes of the user's parked clients.
        taken: Bytes,
        /// The bound.
        budget: Bytes,
        /// The user of the instance.
        owner: u32,
    },
}

/// The sum of figures stated by processes, which may be of any size.
fn sum(bytes: impl Iterator<Item = Bytes>) -> Bytes {
    bytes.fold(Bytes::ZERO, Bytes::saturating_add)
}

impl Node {
    /// The clients of an instance that user `uid` can park, or bring back, now. Root may do so for every instance. Clients on their way
    /// are among them, and clients already where they shall be are left out.
    ///
    /// # Errors
    /// The reason why none can.
    pub fn can_park(&self, name: &str, uid: u32, on: bool) -> Result<Vec<ClientId>, ParkRefusal> {
        let owned = || name.to_owned();
        let instance = self.names.get(name).and_then(|id| self.instances.get_key_value(id));
        let (id, instance) = instance.ok_or_else(|| ParkRefusal::Unknown { name: owned() })?;
        let owner = instance.uid;
        if uid != 0 && uid != owner {
            return Err(ParkRefusal::OfAnother { name: owned(), owner, uid });
        }
        let of = |conn| self.sessions.get(&conn).map(|session| session.instance);
        let clients: Vec<_> = self
            .clients
            .iter()
            .filter(|(_, client)| of(client.conn) == Some(*id))
            .filter_map(|(client, entry)| Some((client, entry.parking?)))
            .collect();
        if clients.is_empty() {
            return Err(ParkRefusal::NotParkable { name: owned() });
        }
        let moves = |parking: &Parking| match on {
            // A client on its way back, or about to come, is ordered again.
            true => {
                let here = matches!(parking.residence, Residence::Resident | Residence::Parking);
                parking.bytes > Bytes::ZERO && (here || !parking.ordered)
            }
            false => parking.residence != Residence::Resident,
        };
        let there = |parking: &Parking| parking.on_host() > Bytes::ZERO;
        if on && !clients.iter().any(|(_, parking)| moves(parking) || there(parking)) {
            let obstacle = clients.iter().find_map(|(_, parking)| parking.obstacle);
            return Err(ParkRefusal::NothingMoves { name: owned(), obstacle });
        }
        let moved: Vec<_> = clients.into_iter().filter(|(_, parking)| moves(parking)).collect();
        if on {
            let new = moved.iter().filter(|(_, parking)| parking.on_host() == Bytes::ZERO);
            let need = sum(new.map(|(_, parking)| parking.bytes));
            let (taken, budget) = (self.parked_of(owner), self.config.park_memory);
            if need > budget.saturating_sub(taken) {
                return Err(ParkRefusal::HostBudget { name: owned(), need, taken, budget, owner });
            }
        }
        if !on && instance.away {
            let met = self.meets_request(instance);
            met.map_err(|refusal| ParkRefusal::NoTime { name: owned(), why: refusal.to_string() })?;
        }
        Ok(moved.into_iter().map(|(client, _)| client).collect())
    }

    /// Whether the request of an instance can be met on each of its devices beside the others there.
    fn meets_request(&self, instance: &Instance) -> Result<(), Refusal> {
        let asked = self.config.spec_of(&instance.name, instance.asked);
        let on = instance.tenants.keys().filter_map(|gpu| Some((*gpu, self.device(*gpu)?.uuid)));
        on.into_iter().try_for_each(|(gpu, uuid)| self.check_request(gpu, uuid, &instance.name, asked))
    }

    /// An instance is away while the memory of its clients is held in host memory, but for clients without movable memory. One that does
    /// not `come` by an order keeps its time free for others until its request can be met.
    pub(super) fn set_away(&mut self, now: Timestamp, id: u32, comes: bool, out: &mut Vec<NodeAction>) {
        let of = |conn| self.sessions.get(&conn).is_some_and(|session| session.instance == id);
        let clients = self.clients.values().filter(|client| of(client.conn));
        let clients: Vec<Option<Parking>> = clients.map(|client| client.parking).collect();
        let gone = |parking: &Parking| {
            parking.held && matches!(parking.residence, Residence::Parked | Residence::Missed)
        };
        let stays = |client: &Option<Parking>| {
            !client.is_some_and(|parking| gone(&parking) || parking.bytes == Bytes::ZERO)
        };
        let away = clients.iter().flatten().any(gone) && !clients.iter().any(stays);
        let Some(instance) = self.instances.get(&id).filter(|instance| instance.away != away) else { return };
        if !away && !comes && self.meets_request(instance).is_err() {
            return;
        }
        let Some(instance) = self.instances.get_mut(&id) else { return };
        instance.away = away;
        let spec = Self::spec_under(&self.config, &self.instances[&id]);
        self.put_in_force(now, id, spec, out);
    }

    /// Host memory of a user's parked clients.
    pub(super) fn parked_of(&self, uid: u32) -> Bytes {
        let of = |conn| self.sessions.get(&conn).is_some_and(|session| session.peer.uid == uid);
        let parked =
            self.clients.values().filter(|client| of(client.conn)).filter_map(|client| client.parking);
        sum(parked.map(|parking| parking.on_host()))
    }

    /// A user asks for an instance to be parked or brought back.
    pub(super) fn park_asked(
        &mut self,
        now: Timestamp,
        (name, uid, parks): (&str, u32, Option<bool>),
        out: &mut Vec<NodeAction>,
    ) {
        let Ok(clients) = self.can_park(name, uid, parks.is_some()) else { return note(Note::NoEffect, out) };
        let mut changed = if parks == Some(true) { self.hold_away(name) } else { false };
        if parks.is_none() {
            for client in &clients {
                let parking = self.clients.get_mut(*client).and_then(|entry| entry.parking.as_mut());
                parking.into_iter().for_each(|parking| parking.held = false);
            }
        }
        if let Some(id) = self.names.get(name) {
            self.set_away(now, *id, parks.is_none(), out);
        }
        for client in clients {
            let Some(holds) = parks else {
                self.return_in_line(now, client);
                changed = true;
                continue;
            };
            let parking = self.clients.get(client).and_then(|entry| entry.parking);
            if parking.is_some_and(|parking| !parking.ordered) {
                self.order_park(now, client, Some(By::User { uid, holds }), out);
                changed = true;
            }
        }
        if !changed {
            note(Note::NoEffect, out);
        }
    }

    /// The clients of an instance that are parked already stay so until they are asked back. The answer is whether that is news.
    fn hold_away(&mut self, name: &str) -> bool {
        let Some(instance) = self.names.get(name) else { return false };
        let of = |conn| self.sessions.get(&conn).is_some_and(|session| session.instance == *instance);
        let away = |client: &super::Client| client.parking.is_some_and(|parking| parking.ordered);
        let there = self.clients.iter().filter(|(_, client)| of(client.conn) && away(client));
        let clients: Vec<ClientId> = there.map(|(client, _)| client).collect();
        let mut any = false;
        for client in clients {
            if let Some(parking) = self.clients.get_mut(client).and_then(|entry| entry.parking.as_mut()) {
                any |= !core::mem::replace(&mut parking.held, true);
            }
            self.line.returned(client);
        }
        any
    }

    /// Orders a client to host memory, or back.
    pub(super) fn order_park(
        &mut self,
        now: Timestamp,
        client: ClientId,
        by: Option<By>,
        out: &mut Vec<NodeAction>,
    ) {
        let on = by.is_some();
        let entry = self.clients.get_mut(client).expect("a client that was just found");
        let tenant = entry.tenant;
        if let Some(By::User { .. }) = by {
            // The user may have the program back at once.
            entry.moves.stays_until = now;
        }
        if let Some(parking) = &mut entry.parking {
            parking.ordered = on;
            parking.ordered_at = by.map(|_| now);
            (parking.ordered_by, parking.ordered_for, parking.held) = match by {
                Some(By::User { uid, holds }) => (Some(uid), None, holds),
                Some(By::For(other)) => (None, Some(other), false),
                None => (None, None, false),
            };
            let (bytes, ordered_for) = (parking.bytes, parking.ordered_for);
            note(Note::ParkOrdered { client, on, bytes, ordered_for }, out);
        }
        self.send(client, ToClient::Park { client, on: on.into() }, out);
        if on {
            self.line.taken(client);
            self.tenant_at_mut(tenant).turns.set_away(client, true);
            self.tell_scheduler(now, tenant, out);
        }
    }

    /// A client states the place of its movable memory.
    pub(super) fn heard_parking(
        &mut self,
        now: Timestamp,
        client: ClientId,
        (residence, bytes, obstacle): (Residence, Bytes, Option<Obstacle>),
        out: &mut Vec<NodeAction>,
    ) {
        let entry = self.clients.get_mut(client).expect("a connection speaks for its own clients");
        let tenant = entry.tenant;
        let before = entry.parking.map_or(Residence::Resident, |before| before.residence);
        let ordered = match (entry.parking, residence) {
            // A report of other bytes may have crossed the order; a failure names its reason.
            (Some(before), Residence::Resident) => before.ordered && obstacle.is_none(),
            (_, Residence::Resident | Residence::Returning) => false,
            // A failure told before the order took the order back here, and the client has obeyed.
            (Some(before), _) => before.ordered || before.residence == Residence::Resident,
            // It was parked under an earlier daemon.
            (None, _) => true,
        };
        let (ordered_at, ordered_by, ordered_for, held) = match entry.parking.filter(|_| ordered) {
            Some(before) => (before.ordered_at, before.ordered_by, before.ordered_for, before.held),
            None => (ordered.then_some(now), None, None, false),
        };
        let parking = Parking {
            residence,
            bytes,
            obstacle,
            ordered,
            ordered_at,
            ordered_by,
            ordered_for,
            held,
            returns_since: None,
        };
        entry.parking = Some(parking);
        note(Note::Parking { client, residence, bytes, obstacle }, out);
        self.has_moved(now, client, before);
        if residence == Residence::Missed && ordered && !held {
            self.return_in_line(now, client);
        }
        self.tenant_at_mut(tenant).turns.set_away(client, ordered || residence != Residence::Resident);
        self.tell_scheduler(now, tenant, out);
        let instance = self.tenant_at(tenant).instance;
        self.set_away(now, instance, false, out);
    }
}
