//! Which process of an instance holds the instance's token.
//!
//! # Problem
//! The token engine knows one client per instance and GPU (a **tenant**), with the whole share of the instance. The
//! processes of the instance, its **members**, use that one account in turns. A member that only holds a context asks
//! for nothing and costs nothing; and since there is one account, no split of it can add up to more than the limit.
//!
//! # Algorithm
//! 1. A grant of the engine goes to the member that holds the tenant's lease: it extends or replaces that lease. If no
//!    member holds one, the grant goes to the waiting member with the least time **served**, then to the one that
//!    has waited longest. If no member waits, the caller gives the grant back unused.
//! 2. A holder's request for an extension is passed on only while no other member waits. So a member that begins to
//!    wait gets the next token: after at most what is left of the present lease and, if an extension was on its way,
//!    one more token, by the engine's clock `max_token + slack + grace` each.
//! 3. A report or return of a lease that the engine has settled already is a **late** charge: what it names beyond the
//!    charge so far is the member's own at once, and the engine's with the next settlement of a lease of the tenant
//!    ([`Turns::settles`]). Example: a lease of 10 ms is revoked and replaced, and the kernel that ran under it turns out
//!    to have taken 400 ms: 390 ms are late. If no lease follows, they are the tenant's overuse when it leaves.
//! 4. `served` grows by what a member **occupies**: what it is charged for a lease, or the time by the clock that it held that
//!    while another member waited, if that is more once the lease is over. So a member that pauses between its kernels does not
//!    come first again and again. A member that was idle starts at the `served` of the last grant (start-time fair queueing): idle
//!    time is not saved up. Example: A alone uses 10 s, then B starts; B is put at 10 s, and from there on both get every
//!    other token.
//!
//! # Invariants
//! At most one member holds a lease. What members were charged adds up to what the engine charged the tenant and what is
//! late. While no member holds a lease and one waits, the engine has been asked ([`Turns::must_ask`]).
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
    /// Its last lease that is settled, and what that was charged.
    last: Option<(LeaseId, Duration)>,
}

/// A lease and the member it was given to.
#[derive(Debug, Clone, Copy)]
struct Held {
    by: ClientId,
    lease: LeaseId,
    budget: Duration,
    /// Charged to the member for this lease.
    charged: Duration,
    /// Late charges of earlier leases that the engine is told as part of this one.
    late: Duration,
    /// When the member was given it.
    since: Timestamp,
    /// When it is over, however late that is seen.
    expires: Timestamp,
    /// How long the member held it while another one waited; 0 until it is over.
    occupied: Duration,
}

/// The member that may settle a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The member, and the engine may still know the lease.
    Current,
    /// The member, and the engine has settled the lease.
    Late,
    /// Another member, or none.
    Other,
}

/// The members of one tenant. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Turns {
    members: Vec<Member>,
    held: Option<Held>,
    /// The lease before, whose account the engine still corrects.
    before: Option<Held>,
    /// GPU time that was charged to members and not yet to the engine.
    late: Duration,
    /// `served` of the last member that was given a lease.
    frontier: Duration,
}

impl Turns {
    /// A process has attached.
    pub(super) fn join(&mut self, id: ClientId) {
        let served = self.frontier;
        self.members.push(Member { id, waits: None, used: Duration::ZERO, served, last: None });
    }

    /// A process is gone. Gives the lease that it held and what the engine was told of it: to be returned for it.
    pub(super) fn leave(&mut self, id: ClientId) -> Option<(LeaseId, Duration)> {
        self.members.retain(|member| member.id != id);
        self.before.take_if(|held| held.by == id);
        let held = self.held.take_if(|held| held.by == id)?;
        let late = core::mem::take(&mut self.late);
        Some((held.lease, held.charged.saturating_add(held.late).saturating_add(late)))
    }

    /// The processes, in the order in which they came.
    pub(super) fn members(&self) -> impl ExactSizeIterator<Item = ClientId> + '_ {
        self.members.iter().map(|member| member.id)
    }

    fn member(&mut self, id: ClientId) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    /// A member wants a token, or more time. Gives whether the engine is to be asked.
    pub(super) fn ask(&mut self, now: Timestamp, id: ClientId) -> bool {
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

    /// Whether this member may settle this lease.
    pub(super) fn owner(&self, id: ClientId, lease: LeaseId) -> Owner {
        if self.held.iter().chain(&self.before).any(|held| held.by == id && held.lease == lease) {
            return Owner::Current;
        }
        let mut last = self.members.iter().filter(|member| member.id == id).filter_map(|member| member.last);
        if last.any(|(settled, _)| settled == lease) { Owner::Late } else { Owner::Other }
    }

    /// GPU time to report to the engine when a member has used `used` of a lease in all: late charges come on top.
    pub(super) fn settles(&mut self, lease: LeaseId, used: Duration) -> Duration {
        let held = self.held.iter_mut().chain(&mut self.before).find(|held| held.lease == lease);
        let Some(held) = held else { return used };
        held.late = held.late.saturating_add(core::mem::take(&mut self.late));
        used.saturating_add(held.late)
    }

    /// The engine has refused what [`Turns::settles`] said.
    pub(super) fn refused(&mut self, lease: LeaseId, late_before: Duration) {
        let held = self.held.iter_mut().chain(&mut self.before).find(|held| held.lease == lease);
        if let Some(held) = held {
            held.late = held.late.saturating_sub(late_before);
            self.late = late_before;
        }
    }

    /// The engine knows a lease no more that was revoked: siblings have had several since. Gives whether it is one of those.
    pub(super) fn outlived(&mut self, lease: LeaseId) -> bool {
        let before = self.before.take_if(|held| held.lease == lease);
        let outlived = before.is_some();
        self.settled(before);
        outlived
    }

    /// A member names what it used of a lease that is settled. Gives whether that is more than was charged.
    pub(super) fn charge_late(&mut self, id: ClientId, lease: LeaseId, used: Duration) -> bool {
        let Some(member) = self.members.iter_mut().find(|member| member.id == id) else { return false };
        let Some((_, charged)) = member.last.as_mut().filter(|(settled, _)| *settled == lease) else {
            return false;
        };
        let more = used.saturating_sub(*charged);
        *charged = (*charged).max(used);
        member.used = member.used.saturating_add(more);
        member.served = member.served.saturating_add(more);
        self.late = self.late.saturating_add(more);
        !more.is_zero()
    }

    /// GPU time that was charged to members and not yet to the engine.
    pub(super) fn late(&self) -> Duration {
        self.late
    }

    /// A lease is settled: what its member says of it later is late.
    fn settled(&mut self, held: Option<Held>) {
        if let Some(held) = held
            && let Some(member) = self.member(held.by)
        {
            member.last = Some((held.lease, held.charged));
        }
    }

    /// A member is about to return a lease. Gives whether the tenant wants another token at once, and since when the
    /// member waited before, for [`Turns::wait`] if the return is refused.
    pub(super) fn wants_again(
        &mut self,
        now: Timestamp,
        id: ClientId,
        lease: LeaseId,
        again: bool,
    ) -> (bool, Option<Timestamp>) {
        let before = self.of(id).1;
        // A lease that was revoked is returned when its work is over: what its member has asked for since stands.
        let asked_since = self.held.is_none_or(|held| held.lease != lease) && before.is_some();
        self.wait(id, (again || asked_since).then(|| before.unwrap_or(now)));
        // A late return of a revoked lease must not extend the lease of the member that is next.
        (self.held.is_none_or(|held| held.lease == lease) && self.waiting().next().is_some(), before)
    }

    /// Since when a member waits.
    pub(super) fn wait(&mut self, id: ClientId, since: Option<Timestamp>) {
        if let Some(member) = self.member(id) {
            member.waits = since;
        }
    }

    /// The engine has charged a lease of this tenant `used`, all in all, late charges included.
    pub(super) fn charged(&mut self, lease: LeaseId, used: Duration) {
        let Some(held) = self.held.iter_mut().chain(&mut self.before).find(|held| held.lease == lease) else {
            return;
        };
        let used = used.saturating_sub(held.late);
        let before = *held;
        held.charged = used;
        let served = used.max(before.occupied);
        if let Some(member) = self.member(before.by) {
            member.used = member.used.saturating_add(used).saturating_sub(before.charged);
            member.served =
                member.served.saturating_add(served).saturating_sub(before.charged.max(before.occupied));
        }
    }

    /// A lease is over that was held until now: the member is served for the time that another one waited for it.
    fn over(&mut self, now: Timestamp, mut held: Held) -> Held {
        let others = self.members.iter().filter(|member| member.id != held.by);
        if let Some(wanted) = others.filter_map(|member| member.waits).min() {
            held.occupied = now.min(held.expires).saturating_since(wanted.max(held.since));
        }
        if let Some(member) = self.member(held.by) {
            member.served = member.served.saturating_add(held.occupied.saturating_sub(held.charged));
        }
        held
    }

    /// The engine has taken a return.
    pub(super) fn returned(&mut self, now: Timestamp, lease: LeaseId) {
        let settled = self.held.take_if(|held| held.lease == lease).map(|held| self.over(now, held));
        self.settled(settled);
        let settled = self.before.take_if(|held| held.lease == lease);
        self.settled(settled);
    }

    /// The engine has revoked a lease whose time was over: it is charged its whole budget. Gives who held it.
    pub(super) fn revoked(&mut self, now: Timestamp, lease: LeaseId) -> Option<ClientId> {
        let Some(held) = self.held.filter(|held| held.lease == lease) else {
            return self.before.filter(|held| held.lease == lease).map(|held| held.by);
        };
        // The engine charges the whole budget, or what it was told if that is more.
        self.charged(lease, held.budget.max(held.charged.saturating_add(held.late)));
        self.settled(self.before);
        self.before = self.held.take().map(|held| self.over(now, held));
        Some(held.by)
    }

    /// The engine has granted a lease, or extended it. Gives who gets it; `None`: it is to be returned unused.
    pub(super) fn granted(
        &mut self,
        now: Timestamp,
        lease: LeaseId,
        (budget, expires): (Duration, Timestamp),
    ) -> Option<ClientId> {
        let next = match self.held {
            Some(held) => Some(held.by),
            None => self.waiting().min_by_key(|member| (member.served, member.waits)).map(|next| next.id),
        };
        let same = self.held.filter(|held| held.lease == lease);
        if same.is_none()
            && let Some(replaced) = self.held.take()
        {
            // In a new window the engine replaces a lease that is still held.
            self.settled(self.before);
            self.before = Some(self.over(now, replaced));
        }
        let id = next?;
        let new = Held {
            by: id,
            lease,
            budget,
            charged: Duration::ZERO,
            late: Duration::ZERO,
            since: now,
            expires,
            occupied: Duration::ZERO,
        };
        self.held = Some(Held { budget, expires, ..same.unwrap_or(new) });
        let member = self.member(id)?;
        member.waits = None;
        let served = member.served;
        self.frontier = self.frontier.max(served);
        Some(id)
    }

    /// Whether a member waits and no lease is held: then a request must stand with the engine.
    pub(super) fn must_ask(&self) -> bool {
        self.held.is_none() && self.waiting().next().is_some()
    }

    fn waiting(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.waits.is_some())
    }

    /// The members that wait for a token, and do not hold one.
    pub(super) fn in_line(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.waiting().map(|member| member.id).filter(|id| !self.holds(*id))
    }

    /// Whether this member holds the lease.
    pub(super) fn holds(&self, id: ClientId) -> bool {
        self.held.is_some_and(|held| held.by == id)
    }

    /// GPU time charged to a member, and since when it waits.
    pub(super) fn of(&self, id: ClientId) -> (Duration, Option<Timestamp>) {
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
    const LATER: Timestamp = Timestamp::from_millis(1_000_000);

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
        turns.charged(LeaseId::new(lease), TOKEN);
        assert!(turns.wants_again(at(lease), id, LeaseId::new(lease), true).0);
        turns.returned(at(0), LeaseId::new(lease));
    }

    #[test]
    fn busy_members_take_turns_and_idle_time_is_not_saved_up() {
        let mut turns = turns(&[A, B, C]);
        assert!(turns.ask(at(0), A));
        for lease in 0..1_000 {
            assert_eq!(
                turns.granted(at(0), LeaseId::new(lease), (TOKEN, LATER)),
                Some(A),
                "no other member waits"
            );
            use_up(&mut turns, A, lease);
        }
        assert!(turns.ask(at(1_000), B), "no member holds the lease");
        let mut got = Vec::new();
        for lease in 1_000..1_006 {
            let next = turns.granted(at(0), LeaseId::new(lease), (TOKEN, LATER)).unwrap();
            use_up(&mut turns, next, lease);
            got.push(next);
        }
        assert!(got == [B, A, B, A, B, A] || got == [A, B, A, B, A, B], "{got:?}");
        assert_eq!((turns.of(A).0, turns.of(C).0), (TOKEN.saturating_mul(1_003), Duration::ZERO));
    }

    /// A uses a tenth of each token of 10 ms, B all of it.
    #[test]
    fn a_member_that_pauses_gets_every_other_token_beside_a_busy_one() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        turns.ask(at(0), B);
        let mut got = Vec::new();
        for lease in 0..8 {
            let next = turns.granted(at(10 * lease), LeaseId::new(lease), (TOKEN, LATER)).unwrap();
            let now = at(10 * (lease + 1));
            turns.charged(LeaseId::new(lease), if next == A { Duration::from_millis(1) } else { TOKEN });
            turns.wants_again(now, next, LeaseId::new(lease), true);
            turns.returned(now, LeaseId::new(lease));
            got.push(next);
        }
        assert_eq!(got, [A, B, A, B, A, B, A, B]);
        assert_eq!([A, B].map(|id| turns.of(id).0), [4, 40].map(Duration::from_millis), "charged by use");
    }

    #[test]
    fn a_lease_is_not_extended_while_another_member_waits() {
        let mut turns = turns(&[A, B]);
        assert!(turns.ask(at(0), A));
        assert_eq!(turns.granted(at(0), LeaseId::new(1), (TOKEN, LATER)), Some(A));
        assert!(turns.ask(at(1), A), "an extension");
        assert!(!turns.ask(at(2), B), "the engine would extend A's lease");
        assert_eq!(
            turns.granted(at(0), LeaseId::new(1), (TOKEN.saturating_mul(2), LATER)),
            Some(A),
            "it was on its way"
        );
        assert!(!turns.ask(at(3), A), "B is next");
        turns.charged(LeaseId::new(1), TOKEN);
        assert!(turns.wants_again(at(4), A, LeaseId::new(1), false).0, "B waits");
        turns.returned(at(0), LeaseId::new(1));
        assert_eq!(turns.granted(at(0), LeaseId::new(2), (TOKEN, LATER)), Some(B));
    }

    #[test]
    fn a_late_return_is_its_members_own_and_leaves_the_next_lease_alone() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        turns.granted(at(0), LeaseId::new(1), (TOKEN, LATER));
        turns.ask(at(1), B);
        assert_eq!(turns.revoked(at(0), LeaseId::new(1)), Some(A));
        assert_eq!(turns.of(A).0, TOKEN, "the whole budget");
        assert!(turns.must_ask(), "for B");
        assert_eq!(turns.granted(at(0), LeaseId::new(2), (TOKEN, LATER)), Some(B));
        assert_eq!(turns.owner(A, LeaseId::new(1)), Owner::Current);
        assert_eq!([turns.owner(B, LeaseId::new(1)), turns.owner(A, LeaseId::new(2))], [Owner::Other; 2]);
        assert!(!turns.wants_again(at(2), A, LeaseId::new(1), true).0, "B's lease would be extended");
        turns.charged(LeaseId::new(1), Duration::from_millis(30));
        turns.returned(at(0), LeaseId::new(1));
        assert!(turns.holds(B) && turns.owner(A, LeaseId::new(1)) == Owner::Late);
        assert_eq!((turns.of(A).0, turns.of(B).0), (Duration::from_millis(30), Duration::ZERO));
    }

    /// Both leases of A are over and settled before it knows what its kernel took.
    #[test]
    fn what_a_member_reports_late_is_charged_with_the_next_lease() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        turns.granted(at(0), LeaseId::new(1), (TOKEN, LATER));
        turns.charged(LeaseId::new(1), Duration::from_millis(1));
        turns.returned(at(0), LeaseId::new(1));
        let late = Duration::from_millis(399);
        assert!(turns.charge_late(A, LeaseId::new(1), Duration::from_millis(400)));
        assert!(!turns.charge_late(A, LeaseId::new(1), Duration::from_millis(400)), "once");
        assert!(!turns.charge_late(B, LeaseId::new(1), Duration::from_millis(500)), "its own leases only");
        assert_eq!((turns.late(), turns.of(A).0), (late, Duration::from_millis(400)));
        turns.ask(at(1), B);
        assert_eq!(turns.granted(at(0), LeaseId::new(2), (TOKEN, LATER)), Some(B));
        let used = Duration::from_millis(2);
        let told = turns.settles(LeaseId::new(2), used);
        assert_eq!((told, turns.late()), (late.saturating_add(used), Duration::ZERO));
        turns.charged(LeaseId::new(2), told);
        assert_eq!((turns.of(A).0, turns.of(B).0), (Duration::from_millis(400), used), "each its own");
        assert_eq!(turns.settles(LeaseId::new(2), used), told, "never less than before");
    }

    /// The kernel of a revoked lease is over long after its process has asked for the next token.
    #[test]
    fn a_late_return_leaves_the_request_that_came_before_it() {
        let mut turns = turns(&[A]);
        turns.ask(at(0), A);
        turns.granted(at(0), LeaseId::new(1), (TOKEN, LATER));
        turns.revoked(at(0), LeaseId::new(1));
        assert!(turns.ask(at(1), A));
        let (wants, waited) = turns.wants_again(at(2), A, LeaseId::new(1), false);
        assert!(wants && waited == Some(at(1)));
        turns.returned(at(0), LeaseId::new(1));
        assert!(turns.must_ask());
        assert_eq!(turns.granted(at(0), LeaseId::new(2), (TOKEN, LATER)), Some(A));
    }

    #[test]
    fn a_grant_that_no_member_wants_any_more_goes_back() {
        let mut turns = turns(&[A, B]);
        turns.ask(at(0), A);
        assert_eq!(turns.leave(A), None);
        assert_eq!(turns.granted(at(0), LeaseId::new(1), (TOKEN, LATER)), None);
        turns.ask(at(1), B);
        assert_eq!(turns.granted(at(0), LeaseId::new(2), (TOKEN, LATER)), Some(B));
        turns.charged(LeaseId::new(2), Duration::from_millis(3));
        assert_eq!(turns.leave(B), Some((LeaseId::new(2), Duration::from_millis(3))));
    }
}
