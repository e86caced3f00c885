//! Turns: the processes of an instance share the instance's token.
//!
//! # Problem
//! The token engine knows one client per instance and GPU (a **tenant**), with the whole share of the instance. The processes of the
//! instance, its **members**, use this account in turns. A member with only a context asks for nothing and costs nothing, and no split
//! of one account can add up to more than the limit.
//!
//! # Algorithm
//! 1. Each member states its total use, which never shrinks. The tenant's total is the sum of all increments.
//! 2. A grant of the engine extends the token of its holder. If no member holds the token, the grant goes to the waiting member with the
//!    least time **served**, and among equals to the longest wait. If no member waits, the grant goes back.
//! 3. A holder's request for an extension is passed on only while no other member waits. A new waiting member therefore gets the next
//!    token after at most the rest of the current token and one more, if an extension was on its way.
//! 4. `served` grows by the time a member **occupies**: its use, or the clock time for which it held the token while another member
//!    waited, whichever is more. An idle member starts again at the `served` of the last grant (start-time fair queueing), so idle time
//!    is not saved up. Example: A alone uses 10 s, then B starts at 10 s, and from there on both get every other token.
//!
//! # Turns
//! Member and node count the finished turns. A message of an older turn has crossed the end of the turn, and only its total counts. A
//! message of the next turn ends the current turn. If a token's time ends without a word from its holder, or the holder is lost, the
//! token is charged up to its allowed total; a later statement adds only the use beyond this charge.
//!
//! # Invariants
//! At most one member holds the token. The tenant's total never shrinks, and is never less than the sum of the members' use.
//!
//! # Cost
//! O(members) per message.

use gshare_core::{ClientId, Duration, Timestamp, UseState};

/// A process of the instance on this GPU.
#[derive(Debug, Clone, Copy)]
struct Member {
    id: ClientId,
    /// The number of finished turns.
    turn: u32,
    /// The start of the wait for a token or an extension.
    waits: Option<Timestamp>,
    /// Whether its memory is not on the device, so that it gets no token.
    away: bool,
    /// The member's total when it attached, by its last statement, and as charged.
    base: Duration,
    said: Duration,
    charged: Duration,
    /// The position in the order of service.
    served: Duration,
}

/// The token and the member that holds it.
#[derive(Debug, Clone, Copy)]
struct Held {
    by: ClientId,
    /// The member's total up to which it may launch, and its charge when it got the token.
    allowed: Duration,
    charged: Duration,
    since: Timestamp,
    /// The end of the token, however late the node sees it.
    until: Timestamp,
}

/// A permission for a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Permission {
    pub(super) client: ClientId,
    pub(super) turn: u32,
    pub(super) allowed: Duration,
}

/// A member's breach of the protocol, as a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Breach(pub(super) &'static str);

/// The members of one tenant. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Turns {
    members: Vec<Member>,
    held: Option<Held>,
    /// GPU time charged to all members, with departed members.
    total: Duration,
    /// `served` of the last member with the token, at its grant.
    frontier: Duration,
}

impl Turns {
    /// A process attaches after a use of `used` on the device. A daemon allowed `allowed` of it, and the rest is overuse.
    pub(super) fn join(&mut self, id: ClientId, used: Duration, allowed: Duration) {
        let served = self.frontier;
        let (waits, away) = (None, false);
        let member = Member { id, turn: 0, waits, away, base: used, said: used, charged: used, served };
        self.members.push(member);
        self.total = self.total.saturating_add(used.saturating_sub(allowed));
    }

    /// A process is gone. If it held the token, the token is charged in full.
    pub(super) fn leave(&mut self, id: ClientId) {
        if let Some(held) = self.held.take_if(|held| held.by == id) {
            self.charge(id, held.allowed);
        }
        self.members.retain(|member| member.id != id);
    }

    /// A member's memory leaves the device, or is back.
    pub(super) fn set_away(&mut self, id: ClientId, away: bool) {
        self.member(id).away = away;
    }

    /// GPU time charged to all members, with departed members.
    pub(super) fn total(&self) -> Duration {
        self.total
    }

    /// The processes, in the order of arrival.
    pub(super) fn members(&self) -> impl ExactSizeIterator<Item = ClientId> + '_ {
        self.members.iter().map(|member| member.id)
    }

    fn member(&mut self, id: ClientId) -> &mut Member {
        let found = self.members.iter_mut().find(|member| member.id == id);
        found.expect("a client is a member of its tenant")
    }

    /// Charges a member up to `total`, unless its charge is as high already.
    fn charge(&mut self, id: ClientId, total: Duration) {
        let member = self.member(id);
        let more = total.saturating_sub(member.charged);
        member.charged = member.charged.saturating_add(more);
        member.served = member.served.saturating_add(more);
        self.total = self.total.saturating_add(more);
    }

    /// A member states its use and its wish. An error changes nothing.
    pub(super) fn heard(
        &mut self,
        now: Timestamp,
        id: ClientId,
        (turn, used, state): (u32, Duration, UseState),
    ) -> Result<(), Breach> {
        let (holds, frontier) = (self.holds(id), self.frontier);
        let member = self.member(id);
        if used < member.said {
            return Err(Breach("says that it has used less GPU time than before"));
        }
        let ends = turn == member.turn.wrapping_add(1) && holds;
        if turn > member.turn && !ends {
            return Err(Breach("ends a turn that it has not had"));
        }
        if ends && matches!(state, UseState::Holds | UseState::Extends) {
            return Err(Breach("holds a token that it has given back"));
        }
        let crossed = turn < member.turn;
        member.said = used;
        self.charge(id, used);
        if ends {
            self.over(now);
        }
        // A message from before the news of a token, or of the end of a turn, is about another turn.
        let about_it = !crossed && (ends || holds == matches!(state, UseState::Holds | UseState::Extends));
        let wants = matches!(state, UseState::Wants | UseState::Extends);
        let member = self.member(id);
        if about_it && wants && member.waits.is_none() {
            member.waits = Some(now);
            if !holds || ends {
                member.served = member.served.max(frontier);
            }
        } else if about_it && !wants {
            member.waits = None;
        }
        Ok(())
    }

    /// The holder's turn is over. The holder counts as served for the time another member waited for the token.
    fn over(&mut self, now: Timestamp) {
        let held = self.held.take().expect("a turn is over that was one");
        let others = self.waiting().filter(|member| member.id != held.by);
        let wanted = others.filter_map(|member| member.waits).min();
        let occupied = wanted
            .map_or(Duration::ZERO, |wanted| now.min(held.until).saturating_since(wanted.max(held.since)));
        let member = self.member(held.by);
        let used = member.charged - held.charged;
        member.served = member.served.saturating_add(occupied.saturating_sub(used));
        member.turn = member.turn.wrapping_add(1);
        member.waits = None;
    }

    /// The tenant's state towards the engine.
    pub(super) fn state(&self) -> UseState {
        match self.held {
            Some(held) if self.waits(held.by) && !self.is_wanted_beside(held.by) => UseState::Extends,
            Some(_) => UseState::Holds,
            None if self.waiting().next().is_some() => UseState::Wants,
            None => UseState::Idle,
        }
    }

    fn waits(&self, id: ClientId) -> bool {
        self.waiting().any(|member| member.id == id)
    }

    /// Whether a member other than `id` waits.
    fn is_wanted_beside(&self, id: ClientId) -> bool {
        self.waiting().any(|member| member.id != id)
    }

    /// The engine has taken the token back and charged all its allowed time. Gives the member to tell, with the number of the turn.
    pub(super) fn stopped(&mut self, now: Timestamp) -> Option<Permission> {
        let held = self.held?;
        self.charge(held.by, held.allowed);
        let turn = self.member(held.by).turn;
        self.over(now);
        Some(Permission { client: held.by, turn, allowed: held.allowed })
    }

    /// The engine allows the tenant `more` GPU time beyond its charge. Gives the next holder; `None`: the token goes back unused.
    pub(super) fn granted(&mut self, now: Timestamp, more: Duration, until: Timestamp) -> Option<Permission> {
        let next = match self.held {
            Some(held) => held.by,
            None => self.waiting().min_by_key(|member| (member.served, member.waits))?.id,
        };
        let member = self.member(next);
        member.waits = None;
        let (turn, charged, served) = (member.turn, member.charged, member.served);
        let allowed = charged.saturating_add(more);
        let new = Held { by: next, allowed, charged, since: now, until };
        self.held = Some(Held { allowed, until, ..self.held.unwrap_or(new) });
        self.frontier = self.frontier.max(served);
        Some(Permission { client: next, turn, allowed })
    }

    /// The engine asks for the token back once the tenant has used `more` GPU time. The holder's charge, if it is lost or stopped, stays
    /// the earlier allowed total: it may have launched before it heard of this. Gives the holder to tell, with the end of its token.
    pub(super) fn recalled(&self, more: Duration) -> Option<(Permission, Timestamp)> {
        let held = self.held?;
        let member = self.members.iter().find(|member| member.id == held.by)?;
        let allowed = member.charged.saturating_add(more).min(held.allowed);
        Some((Permission { client: held.by, turn: member.turn, allowed }, held.until))
    }

    fn waiting(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.waits.is_some() && !member.away)
    }

    /// The waiting members without the token.
    pub(super) fn in_line(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.waiting().map(|member| member.id).filter(|id| !self.holds(*id))
    }

    /// Whether this member holds the token.
    pub(super) fn holds(&self, id: ClientId) -> bool {
        self.held.is_some_and(|held| held.by == id)
    }

    /// GPU time charged to a member since it attached, and the start of its wait.
    pub(super) fn of(&self, id: ClientId) -> (Duration, Option<Timestamp>) {
        let member = self.members.iter().find(|member| member.id == id);
        let member = member.expect("a client is a member of its tenant");
        (member.charged - member.base, member.waits)
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

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Members, each with its turn and total as its process knows them.
    struct Bench {
        turns: Turns,
        known: Vec<(ClientId, u32, Duration)>,
    }

    impl Bench {
        fn new(members: &[ClientId]) -> Self {
            let mut turns = Turns::default();
            members.iter().for_each(|id| turns.join(*id, Duration::ZERO, Duration::ZERO));
            Self { turns, known: members.iter().map(|id| (*id, 0, Duration::ZERO)).collect() }
        }

        fn says(&mut self, now: u64, id: ClientId, more: Duration, state: UseState) {
            let known = self.known.iter_mut().find(|known| known.0 == id).unwrap();
            known.1 += u32::from(self.turns.holds(id) && matches!(state, UseState::Idle | UseState::Wants));
            known.2 = known.2.saturating_add(more);
            self.turns.heard(at(now), id, (known.1, known.2, state)).unwrap();
        }

        fn grant(&mut self, now: u64) -> Option<ClientId> {
            self.turns.granted(at(now), TOKEN, LATER).map(|permission| permission.client)
        }
    }

    /// The holder may have used all its token before it heard of the recall.
    #[test]
    fn a_recalled_token_that_is_lost_is_charged_in_full() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        assert_eq!(bench.turns.recalled(ms(2)), None, "no member holds a token");
        bench.grant(0);
        bench.says(1, A, ms(1), UseState::Holds);
        let (permission, until) = bench.turns.recalled(ms(2)).unwrap();
        assert_eq!((permission, until), (Permission { client: A, turn: 0, allowed: ms(3) }, LATER));
        assert_eq!(bench.turns.recalled(TOKEN).unwrap().0.allowed, TOKEN, "never more than the token");
        bench.turns.leave(A);
        assert_eq!(bench.turns.total(), TOKEN);
    }

    #[test]
    fn busy_members_take_turns_and_idle_time_is_not_saved_up() {
        let mut bench = Bench::new(&[A, B, C]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        for turn in 0..1_000 {
            assert_eq!(bench.grant(0), Some(A), "no other member waits");
            bench.says(turn, A, TOKEN, UseState::Wants);
        }
        bench.says(1_000, B, Duration::ZERO, UseState::Wants);
        let mut got = Vec::new();
        for turn in 1_000..1_006 {
            let next = bench.grant(0).unwrap();
            bench.says(turn, next, TOKEN, UseState::Wants);
            got.push(next);
        }
        assert!(got == [B, A, B, A, B, A] || got == [A, B, A, B, A, B], "{got:?}");
        assert_eq!((bench.turns.of(A).0, bench.turns.of(C).0), (TOKEN.saturating_mul(1_003), Duration::ZERO));
        assert_eq!(bench.turns.total(), TOKEN.saturating_mul(1_006));
    }

    /// A uses a tenth of each token of 10 ms, B all of it.
    #[test]
    fn a_member_that_pauses_gets_every_other_token_beside_a_busy_one() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        bench.says(0, B, Duration::ZERO, UseState::Wants);
        let mut got = Vec::new();
        for turn in 0..8 {
            let next = bench.grant(10 * turn).unwrap();
            bench.says(10 * (turn + 1), next, if next == A { ms(1) } else { TOKEN }, UseState::Wants);
            got.push(next);
        }
        assert_eq!(got, [A, B, A, B, A, B, A, B]);
        assert_eq!([A, B].map(|id| bench.turns.of(id).0), [ms(4), ms(40)], "charged by use");
    }

    #[test]
    fn the_token_goes_to_the_least_served_member_and_among_equals_to_the_longest_wait() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, B, Duration::ZERO, UseState::Wants);
        bench.says(1, A, Duration::ZERO, UseState::Wants);
        assert_eq!(bench.grant(1), Some(B), "equally served, and B waits longer");
        bench.says(11, B, TOKEN, UseState::Wants);
        assert_eq!(bench.grant(11), Some(A));
        bench.says(13, A, ms(2), UseState::Wants);
        assert_eq!(bench.grant(13), Some(A), "B waits longer, and was served 10 ms");
    }

    #[test]
    fn a_token_is_not_extended_while_another_member_waits() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        assert_eq!((bench.turns.state(), bench.grant(0)), (UseState::Wants, Some(A)));
        bench.says(1, A, Duration::ZERO, UseState::Extends);
        assert_eq!(bench.turns.state(), UseState::Extends);
        bench.says(2, B, Duration::ZERO, UseState::Wants);
        assert_eq!(bench.turns.state(), UseState::Holds, "the engine would extend A's token");
        assert_eq!(bench.grant(2), Some(A), "it was on its way");
        bench.says(4, A, TOKEN, UseState::Idle);
        assert_eq!((bench.turns.state(), bench.grant(4)), (UseState::Wants, Some(B)));
    }

    #[test]
    fn a_token_that_ends_unheard_is_charged_once() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        bench.grant(0);
        bench.says(1, B, Duration::ZERO, UseState::Wants);
        assert_eq!(bench.turns.stopped(at(20)), Some(Permission { client: A, turn: 0, allowed: TOKEN }));
        assert_eq!((bench.turns.of(A).0, bench.turns.total()), (TOKEN, TOKEN), "all that it allowed");
        assert_eq!(bench.grant(20), Some(B));
        let late = |turns: &mut Turns, used| turns.heard(at(21), A, (0, ms(used), UseState::Wants)).unwrap();
        late(&mut bench.turns, 7);
        assert_eq!(bench.turns.total(), TOKEN, "less than it was charged");
        assert_eq!(bench.turns.of(A).1, None, "a wish of a turn that is over");
        late(&mut bench.turns, 30);
        late(&mut bench.turns, 30);
        assert_eq!((bench.turns.of(A).0, bench.turns.total()), (ms(30), ms(30)), "the rest, once");
        assert!(bench.turns.holds(B));
        bench.turns.heard(at(22), A, (1, ms(30), UseState::Wants)).unwrap();
        assert_eq!(bench.turns.of(A).1, Some(at(22)));
    }

    #[test]
    fn a_wish_from_before_a_grant_does_not_end_the_turn() {
        let mut bench = Bench::new(&[A]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        bench.grant(0);
        for state in [UseState::Wants, UseState::Idle] {
            bench.turns.heard(at(1), A, (0, ms(1), state)).unwrap();
            assert_eq!((bench.turns.holds(A), bench.turns.state()), (true, UseState::Holds), "{state:?}");
        }
    }

    #[test]
    fn a_member_that_is_lost_is_charged_what_it_was_allowed_and_says_the_rest_when_it_is_back() {
        let mut bench = Bench::new(&[A]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        bench.grant(0);
        bench.says(1, A, ms(3), UseState::Holds);
        bench.turns.leave(A);
        assert_eq!(bench.turns.total(), TOKEN);
        bench.turns.join(B, ms(400), TOKEN);
        assert_eq!((bench.turns.total(), bench.turns.of(B).0), (ms(400), Duration::ZERO));
        bench.turns.join(C, ms(5), TOKEN);
        assert_eq!(bench.turns.total(), ms(400), "nothing is given back");
    }

    #[test]
    fn a_breach_changes_nothing() {
        let mut bench = Bench::new(&[A]);
        bench.says(0, A, ms(4), UseState::Wants);
        let before = format!("{:?}", bench.turns);
        for message in [(0, ms(3), UseState::Wants), (1, ms(4), UseState::Wants), (2, ms(4), UseState::Idle)]
        {
            assert!(bench.turns.heard(at(1), A, message).is_err(), "{message:?}");
        }
        assert_eq!(format!("{:?}", bench.turns), before);
        bench.grant(1);
        let before = format!("{:?}", bench.turns);
        assert!(bench.turns.heard(at(2), A, (1, ms(4), UseState::Holds)).is_err());
        assert!(bench.turns.heard(at(2), A, (2, ms(4), UseState::Idle)).is_err());
        assert_eq!(format!("{:?}", bench.turns), before);
    }

    #[test]
    fn a_grant_that_no_member_wants_any_more_goes_back() {
        let mut bench = Bench::new(&[A, B]);
        bench.says(0, A, Duration::ZERO, UseState::Wants);
        bench.turns.leave(A);
        assert_eq!(bench.grant(0), None);
    }
}
