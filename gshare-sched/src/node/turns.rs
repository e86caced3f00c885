//! Which process of an instance holds the instance's token.
//!
//! # Problem
//! The token engine knows one client per instance and GPU (a **tenant**), with the whole share of the instance. The
//! processes of the instance, its **members**, use that one account in turns. A member that only holds a context asks
//! for nothing and costs nothing; and since there is one account, no split of it can add up to more than the limit.
//!
//! # Algorithm
//! 1. A grant of the engine goes to the member that holds the tenant's lease: it extends or replaces that lease. If no
//!    member holds one, the grant goes to the waiting member with the least GPU time **served**, then to the one that
//!    has waited longest. If no member waits, the caller gives the grant back unused.
//! 2. A holder's request for an extension is passed on only while no other member waits. So a member that begins to
//!    wait gets the next token: after at most what is left of the present lease and, if an extension was on its way,
//!    one more token, by the engine's clock `max_token + slack + grace` each.
//! 3. `served` grows by what a member is charged. A member that was idle starts at the `served` of the last grant
//!    (start-time fair queueing): idle time is not saved up. Example: A alone uses 10 s, then B starts; B is put at
//!    10 s, and from there on both get every other token.
//!
//! # Invariants
//! At most one member holds a lease. What members were charged adds up to what the engine charged the tenant. While no
//! member holds a lease and one waits, the engine has been asked ([`Turns::must_ask`]).
//!
//! # Cost
//! O(members) per grant, O(1) otherwise but for a look-up by id among the members.

use gshare_core::{ClientId, Duration, LeaseId, Timestamp};

/// A process of the instance on this GPU.
#[derive(Debug, Clone, Copy)]
struct Member {
    id: ClientId,
    /// Since when the member waits for a token or an extension.
    waits: Option<Timestamp>,
    /// GPU time charged, all in all.
    used: Duration,
    /// Position in the order of service.
    served: Duration,
}

/// A lease and the member it was given to.
#[derive(Debug, Clone, Copy)]
struct Held {
    by: ClientId,
    lease: LeaseId,
    budget: Duration,
    charged: Duration,
}

/// The members of one tenant. See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Turns {
    members: Vec<Member>,
    held: Option<Held>,
    /// The lease before, whose account the engine still corrects.
    before: Option<Held>,
    /// `served` of the last member that was given a lease.
    frontier: Duration,
}

impl Turns {
    /// A process has attached.
    pub(crate) fn join(&mut self, id: ClientId) {
        self.members.push(Member { id, waits: None, used: Duration::ZERO, served: self.frontier });
    }

    /// A process is gone. Gives the lease that it held and what that was charged: to be returned for it.
    pub(crate) fn leave(&mut self, id: ClientId) -> Option<(LeaseId, Duration)> {
        self.members.retain(|member| member.id != id);
        self.before.take_if(|held| held.by == id);
        self.held.take_if(|held| held.by == id).map(|held| (held.lease, held.charged))
    }

    /// The processes, in the order in which they came.
    pub(crate) fn members(&self) -> impl ExactSizeIterator<Item = ClientId> + '_ {
        self.members.iter().map(|member| member.id)
    }

    fn member(&mut self, id: ClientId) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    /// A member wants a token, or more time. Gives whether the engine is to be asked.
    pub(crate) fn ask(&mut self, now: Timestamp, id: ClientId) -> bool {
        let frontier = self.frontier;
        let holds = self.holds(id);
        let Some(member) = self.member(id) else { return false };
        if member.waits.is_none() {
            member.waits = Some(now);
            if !holds {
                member.served = member.served.max(frontier);
            }
        }
        self.held.is_none() || holds && !self.is_wanted_beside(id)
    }

    /// Whether a member other than `id` waits.
    fn is_wanted_beside(&self, id: ClientId) -> bool {
        self.members.iter().any(|member| member.id != id && member.waits.is_some())
    }

    /// Whether this member may settle this lease: it was given to it, and the engine may still know it.
    pub(crate) fn owns(&self, id: ClientId, lease: LeaseId) -> bool {
        self.held.iter().chain(&self.before).any(|held| held.by == id && held.lease == lease)
    }

    /// A member is about to return a lease. Gives whether the tenant wants another token at once.
    pub(crate) fn wants_again(&mut self, now: Timestamp, id: ClientId, lease: LeaseId, again: bool) -> bool {
        if let Some(member) = self.member(id) {
            member.waits = again.then(|| member.waits.unwrap_or(now));
        }
        // A late return of a revoked lease must not extend the lease of the member that is next.
        self.held.is_none_or(|held| held.lease == lease) && self.waiting().next().is_some()
    }

    /// The engine has charged a lease of this tenant `used`, all in all.
    pub(crate) fn charged(&mut self, lease: LeaseId, used: Duration) {
        let Some(held) = self.held.iter_mut().chain(&mut self.before).find(|held| held.lease == lease) else {
            return;
        };
        let (more, less) = (used.saturating_sub(held.charged), held.charged.saturating_sub(used));
        held.charged = used;
        let by = held.by;
        if let Some(member) = self.member(by) {
            member.used = member.used.saturating_add(more).saturating_sub(less);
            member.served = member.served.saturating_add(more).saturating_sub(less);
        }
    }

    /// The engine has taken a return.
    pub(crate) fn returned(&mut self, lease: LeaseId) {
        self.held.take_if(|held| held.lease == lease);
        self.before.take_if(|held| held.lease == lease);
    }

    /// The engine has revoked a lease whose time was over: it is charged its whole budget. Gives who held it.
    pub(crate) fn revoked(&mut self, lease: LeaseId) -> Option<ClientId> {
        let Some(held) = self.held.filter(|held| held.lease == lease) else {
            return self.before.filter(|held| held.lease == lease).map(|held| held.by);
        };
        self.charged(lease, held.budget.max(held.charged));
        self.before = self.held.take();
        Some(held.by)
    }

    /// The engine has granted a lease, or extended it. Gives who gets it; `None`: it is to be returned unused.
    pub(crate) fn granted(&mut self, lease: LeaseId, budget: Duration) -> Option<ClientId> {
        let next = match self.held {
            Some(held) => Some(held.by),
            None => self.waiting().min_by_key(|member| (member.served, member.waits)).map(|next| next.id),
        };
        let charged = self.held.filter(|held| held.lease == lease).map(|held| held.charged);
        if charged.is_none() {
            // In a new window the engine replaces a lease that is still held.
            self.before = self.held.take().or(self.before);
        }
        let id = next?;
        self.held = Some(Held { by: id, lease, budget, charged: charged.unwrap_or(Duration::ZERO) });
        let member = self.member(id)?;
        member.waits = None;
        let served = member.served;
        self.frontier = self.frontier.max(served);
        Some(id)
    }

    /// Whether a member waits and no lease is held: then a request must stand with the engine.
    pub(crate) fn must_ask(&self) -> bool {
        self.held.is_none() && self.waiting().next().is_some()
    }

    fn waiting(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.waits.is_some())
    }

    /// The members that wait for a token, and do not hold one.
    pub(crate) fn in_line(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.waiting().map(|member| member.id).filter(|id| !self.holds(*id))
    }

    /// Whether this member holds the lease.
    pub(crate) fn holds(&self, id: ClientId) -> bool {
        self.held.is_some_and(|held| held.by == id)
    }

    /// GPU time charged to a member, and since when it waits.
    pub(crate) fn of(&self, id: ClientId) -> (Duration, Option<Timestamp>) {
        let member = self.members.iter().find(|member| member.id == id);
        member.map_or((Duration::ZERO, None), |member| (member.used, member.waits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId::new(0, 0);
    const B: ClientId = ClientId::new(1, 0);
    const C: ClientId = ClientId::new(2, 0);
    const TOKEN: Duration = Duration::from_millis(10);

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    fn turns(members: &[ClientId]) -> Turns {
        let mut turns = Turns::default();
        members.iter().for_each(|id| turns.join(*id));
        turns
    }

    /// The member uses its token to the full, returns it and asks again.
    fn use_up(turns: &mut Turns, id: ClientId, lease: u64) {
        turns.charged(LeaseId(lease), TOKEN);
        assert!(turns.wants_again(at(lease), id, LeaseId(lease), true));
        turns.returned(LeaseId(lease));
    }

    #[test]
    fn busy_members_take_turns_and_idle_time_is_not_saved_up() {
        let mut turns = turns(&[A, B, C]);
        assert!(turns.ask(at(0), A));
        for lease in 0..1_000 {
            assert_eq!(turns.granted(LeaseId(lease), TOKEN), Some(A), "nobody else waits");
            use_up(&mut turns, A, lease);
        }
        assert!(turns.ask(at(1_000), B), "nobody holds the lease");
        let mut got = Vec::new();
        for lease in 1_000..1_006 {
            let next = turns.granted(LeaseId(lease), TOKEN).unwrap();
            use_up(&mut turns, next, lease);
            got.push(next);
        }
        assert!(got == [B, A, B, A, B, A] || got == [A, B, A, B, A, B], "{got:?}");
        assert_eq!((turns.of(A).0, turns.of(C).0), (TOKEN.saturating_mul(1_003), Duration::ZERO));
    }

    #[test]
    fn a_lease_is_not_extended_while_another_member_waits() {
        let mut turns = turns(&[A, B]);
        assert!(turns.ask(at(0), A));
        assert_eq!(turns.granted(LeaseId(1), TOKEN), Some(A));
        assert!(turns.ask(at(1), A), "an extension");
        assert!(!turns.ask(at(2), B), "the engine would extend A's lease");
        assert_eq!(turns.granted(LeaseId(1), TOKEN.saturating_mul(2)), Some(A), "it was on its way");
        assert!(!turns.ask(at(3), A), "B is next");
        turns.charged(LeaseId(1), TOKEN);
        assert!(turns.wants_again(at(4), A, LeaseId(1), false), "B waits");
        turns.returned(LeaseId(1));
        assert_eq!(turns.granted(LeaseId(2), TOKEN), Some(B));
    }

    #[test]
    fn a_late_return_is_its_members_own_and_leaves_the_next_lease_alone() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        turns.granted(LeaseId(1), TOKEN);
        turns.ask(at(1), B);
        assert_eq!(turns.revoked(LeaseId(1)), Some(A));
        assert_eq!(turns.of(A).0, TOKEN, "the whole budget");
        assert!(turns.must_ask(), "for B");
        assert_eq!(turns.granted(LeaseId(2), TOKEN), Some(B));
        assert!(turns.owns(A, LeaseId(1)) && !turns.owns(B, LeaseId(1)) && !turns.owns(A, LeaseId(2)));
        assert!(!turns.wants_again(at(2), A, LeaseId(1), true), "B's lease would be extended");
        turns.charged(LeaseId(1), Duration::from_millis(30));
        turns.returned(LeaseId(1));
        assert!(turns.holds(B) && !turns.owns(A, LeaseId(1)));
        assert_eq!((turns.of(A).0, turns.of(B).0), (Duration::from_millis(30), Duration::ZERO));
    }

    #[test]
    fn a_grant_that_no_member_wants_any_more_goes_back() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        assert_eq!(turns.leave(A), None);
        assert_eq!(turns.granted(LeaseId(1), TOKEN), None);
        turns.ask(at(1), B);
        assert_eq!(turns.granted(LeaseId(2), TOKEN), Some(B));
        turns.charged(LeaseId(2), Duration::from_millis(3));
        assert_eq!(turns.leave(B), Some((LeaseId(2), Duration::from_millis(3))));
    }
}
