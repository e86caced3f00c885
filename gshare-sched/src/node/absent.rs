//! Processes that have lost their connection and live: their memory stays theirs.
//!
//! A connection may break while its process goes on: the process fell behind, broke the protocol, or ran out of descriptors. Its device
//! memory is still allocated, and without a daemon it may allocate up to its part of the instance's limit. Its account stays open with
//! this part, and its name stays taken, until the process is back, is gone, or says Hello as another instance. A process out of the
//! host's sight has [`SETTLE`] to come back. It may have ended, so another run may take its name, and reservations wait for its memory.

use super::memory_account::{ClientAccount, Tenant as Account};
use super::{Node, NodeAction, Peer, Run, SETTLE};
use gshare_core::{Bytes, ConnId, GpuId, Timestamp};

/// A process without a connection.
#[derive(Debug)]
pub(super) struct Absent {
    pub(super) peer: Peer,
    own_pid: u32,
    pub(super) instance: u32,
    accounts: Vec<ClientAccount>,
    /// The end of its time to come back, if the host does not watch it.
    until: Option<Timestamp>,
}

impl Node {
    /// A connection is gone, and its process may live; `watched`: the host will report the end of the process.
    pub(super) fn lost(&mut self, now: Timestamp, conn: ConnId, watched: bool, out: &mut Vec<NodeAction>) {
        let session = self.sessions.get(&conn).expect("a connection that is lost was known");
        let room = self.absent.len() < self.config.max_clients as usize;
        if room && !session.clients.is_empty() {
            let (peer, own_pid, instance) = (session.peer, session.own_pid, session.instance);
            let until = (!watched).then(|| now.saturating_add(SETTLE));
            self.absent.insert(conn, Absent { peer, own_pid, instance, accounts: Vec::new(), until });
        }
        self.end_session(now, conn, out);
    }

    /// Whether the node keeps any account of a process whose session is over.
    pub(super) fn stays_absent(&mut self, conn: ConnId) -> bool {
        let keeps = self.absent.get(&conn).is_some_and(|absent| !absent.accounts.is_empty());
        if !keeps {
            self.absent.remove(&conn);
        }
        keeps
    }

    /// Whether the process of a lost connection still has memory here.
    pub fn is_absent(&self, conn: ConnId) -> bool {
        self.absent.contains_key(&conn)
    }

    /// Keeps the account of a client that leaves, if its process is absent, with its `part` of the limit. Otherwise closes the account.
    pub(super) fn keep_account(&mut self, conn: ConnId, mut account: ClientAccount, part: Bytes) {
        let absent = self.absent.get(&conn);
        if !absent.is_some_and(|absent| !self.is_back(absent, account.tenant().0)) {
            return self.ledger.close(account);
        }
        let more = part.saturating_sub(account.held());
        // The part may no longer fit on the device; the rest is then not the node's to give.
        let _ = self.ledger.reserve(&mut account, Bytes::ZERO, more);
        self.absent.get_mut(&conn).expect("it was there just now").accounts.push(account);
    }

    /// Whether the process has attached to a device on another connection, before the end of the lost one was seen.
    fn is_back(&self, absent: &Absent, gpu: GpuId) -> bool {
        self.sessions.values().any(|session| {
            (session.peer, session.own_pid, session.instance)
                == (absent.peer, absent.own_pid, absent.instance)
                && session.clients.iter().any(|client| self.gpu_of(*client) == Some(gpu))
        })
    }

    /// Closes the account that a process left behind on a device, because the process is back and states its memory.
    pub(super) fn came_back(&mut self, conn: ConnId, account: Account) {
        let session = self.sessions.get(&conn).expect("a process attaches on a connection");
        let (peer, own_pid) = (session.peer, session.own_pid);
        let is_it =
            |absent: &Absent| (absent.peer, absent.own_pid, absent.instance) == (peer, own_pid, account.1);
        let mut empty = Vec::new();
        for (lost, absent) in self.absent.iter_mut().filter(|(_, absent)| is_it(absent)) {
            if let Some(at) = absent.accounts.iter().position(|kept| kept.tenant() == account) {
                self.ledger.close(absent.accounts.swap_remove(at));
            }
            if absent.accounts.is_empty() {
                empty.push(*lost);
            }
        }
        for lost in empty {
            self.absent.remove(&lost);
            self.process_over(account.1);
        }
    }

    /// A process that says Hello as one run of a name is no longer part of another: it has executed another program.
    pub(super) fn says_hello(
        &mut self,
        now: Timestamp,
        peer: Peer,
        as_one: (&str, Run),
        out: &mut Vec<NodeAction>,
    ) {
        let is_another = |instance: &u32| {
            let instance = &self.instances[instance];
            (instance.name.as_str(), instance.run) != as_one
        };
        let own = self.absent.iter().filter(|(_, absent)| peer.pid != 0 && absent.peer == peer);
        let gone: Vec<ConnId> =
            own.filter(|(_, absent)| is_another(&absent.instance)).map(|(conn, _)| *conn).collect();
        for conn in gone {
            self.absent_ended(now, conn, out);
        }
    }

    /// The process of a lost connection is gone.
    pub(super) fn absent_ended(&mut self, now: Timestamp, conn: ConnId, out: &mut Vec<NodeAction>) {
        if let Some(absent) = self.absent.remove(&conn) {
            self.free_absent(now, absent, out);
        }
    }

    /// Gives a name up that only processes out of the host's sight still hold: another run has come for it.
    pub(super) fn give_up_name(&mut self, now: Timestamp, instance: u32, out: &mut Vec<NodeAction>) {
        let unseen = |absent: &&Absent| absent.instance == instance && absent.until.is_some();
        let all = self.instances.get(&instance).map_or(0, |instance| instance.processes as usize);
        if self.absent.values().filter(unseen).count() == all {
            self.end_absent(now, |absent| absent.instance == instance, out);
        }
    }

    /// The time by which a process out of the host's sight may give memory of a device back.
    pub(super) fn absent_until(&self, gpu: GpuId) -> Option<Timestamp> {
        let on = |absent: &&Absent| absent.accounts.iter().any(|kept| kept.tenant().0 == gpu);
        self.absent.values().filter(on).filter_map(|absent| absent.until).min()
    }

    /// Lets go of absent processes whose time is over.
    pub(super) fn absent_due(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        self.end_absent(now, |absent| absent.until.is_some_and(|until| until <= now), out);
    }

    pub(super) fn absent_deadline(&self) -> Option<Timestamp> {
        self.absent.values().filter_map(|absent| absent.until).min()
    }

    fn end_absent(&mut self, now: Timestamp, ends: impl Fn(&Absent) -> bool, out: &mut Vec<NodeAction>) {
        let gone: Vec<ConnId> =
            self.absent.iter().filter(|(_, absent)| ends(absent)).map(|(conn, _)| *conn).collect();
        for conn in gone {
            self.absent_ended(now, conn, out);
        }
    }

    fn free_absent(&mut self, now: Timestamp, absent: Absent, out: &mut Vec<NodeAction>) {
        for account in absent.accounts {
            let (gpu, instance) = account.tenant();
            self.ledger.close(account);
            match self.instances.get(&instance).and_then(|instance| instance.tenants.get(&gpu)).copied() {
                Some(tenant) => self.divide_memory(now, tenant, None, out),
                None => self.forget_account((gpu, instance)),
            }
            self.forget_device(gpu);
        }
        self.process_over(absent.instance);
    }

    /// The memory of an instance's absent processes on a device.
    pub(super) fn absent_memory(&self, account: Account) -> Bytes {
        self.kept().filter(|kept| kept.tenant() == account).map(ClientAccount::held).sum()
    }

    /// Whether absent processes of any instance have memory on a device.
    pub(super) fn is_kept_on(&self, gpu: GpuId) -> bool {
        self.kept().any(|kept| kept.tenant().0 == gpu)
    }

    /// The devices with memory of absent processes of a user.
    pub(super) fn kept_by(&self, uid: u32) -> impl Iterator<Item = GpuId> + '_ {
        let own = self.absent.values().filter(move |absent| absent.peer.uid == uid);
        own.flat_map(|absent| absent.accounts.iter().map(|kept| kept.tenant().0))
    }

    /// Forgets an instance's account of memory on a device, once it has no process there.
    pub(super) fn forget_account(&mut self, account: Account) {
        if !self.kept().any(|kept| kept.tenant() == account) {
            self.ledger.forget(account);
        }
    }

    fn kept(&self) -> impl Iterator<Item = &ClientAccount> {
        self.absent.values().flat_map(|absent| &absent.accounts)
    }
}
