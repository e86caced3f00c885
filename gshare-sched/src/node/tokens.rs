//! Tokens: the use and wishes of members become events of the token scheduler, and its orders become frames.

use super::debts::scaled;
use super::{Client, Node, NodeAction, Note, Tenant, TenantId, TokenFault, Usage, note, violation};
use gshare_core::token::{ThrottleReason, TokenScheduler};
use gshare_core::wire::ToClient;
use gshare_core::{Bytes, ClientId, Duration, Quota, Timestamp, TokenAction, TokenEvent, UseState};
use std::fmt;

/// The token scheduler, which may have no text form.
pub(super) struct Tokens(pub(super) Box<dyn TokenScheduler>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("next_deadline", &self.0.next_deadline()).finish()
    }
}

impl Node {
    /// The next deadline of the node itself, apart from the token scheduler's.
    pub(super) fn own_deadline(&self) -> Option<Timestamp> {
        let resumes = self.waiting.first().map(|(resumes, _)| *resumes);
        let memory = [self.inquiries.next_deadline(), self.line.next_deadline()].into_iter().flatten().min();
        [resumes, self.scaling.next_deadline(), memory].into_iter().flatten().min()
    }

    pub(super) fn deadline(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        if self.tokens.0.next_deadline().is_some_and(|due| due <= now) {
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        self.catch_up(now, out);
    }

    /// Asks the scheduler for tokens for the tenants with debts paid by now.
    pub(super) fn pay_back(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        while let Some(&(_, tenant)) = self.waiting.first().filter(|(resumes, _)| *resumes <= now) {
            self.waiting.pop_first();
            self.tell_scheduler(now, tenant, out);
        }
    }

    /// A client states its use, its wish and its counters.
    pub(super) fn heard_use(
        &mut self,
        now: Timestamp,
        client: ClientId,
        (turn, state): (u32, UseState),
        (stated, memory): (Usage, Bytes),
        out: &mut Vec<NodeAction>,
    ) {
        let entry = self.clients.get(client).expect("a connection speaks for its own clients");
        let &Client { conn, tenant: id, .. } = entry;
        let turns = &mut self.tenant_at_mut(id).turns;
        let waited = turns.of(client).1.is_some();
        if let Err(breach) = turns.heard(now, client, (turn, stated.busy, state)) {
            return violation(conn, breach.0, out);
        }
        let entry = self.clients.get_mut(client).expect("a connection speaks for its own clients");
        if state != UseState::Idle || stated.busy > entry.usage.busy {
            entry.moves.active = now;
        }
        entry.usage = Usage { occupied: entry.usage.occupied, ..stated };
        entry.memory = Some(memory);
        let turns = &self.tenant_at(id).turns;
        let waits = turns.of(client).1.is_some();
        let resumes = self.tenant_at(id).resumes;
        if waits && !waited && now < resumes {
            let limit = self.limit_of(id);
            let owed = limit.of(resumes.saturating_since(now));
            note(Note::DebtWait { client, until: resumes, owed, limit }, out);
            let reason = ThrottleReason::LimitReached;
            out.push(NodeAction::Send { conn, frame: ToClient::Throttle { client, until: resumes, reason } });
        }
        self.tell_scheduler(now, id, out);
        self.sample(now, client);
        self.compare_use(now, self.tenant_at(id).gpu, false);
    }

    /// Tells the scheduler the use and the state of a tenant. Until the debts of its name are paid, a tenant in want of a token counts
    /// as idle.
    pub(super) fn tell_scheduler(&mut self, now: Timestamp, id: TenantId, out: &mut Vec<NodeAction>) {
        let &Tenant { resumes, ref turns, .. } = self.tenant_at(id);
        let (used, mut state) = (turns.total(), turns.state());
        if now < resumes && state == UseState::Wants {
            self.waiting.insert((resumes, id));
            state = UseState::Idle;
        }
        self.token(now, TokenEvent::Used { client: id.0, used, state }, out);
    }

    pub(super) fn limit_of(&self, id: TenantId) -> Quota {
        let status = self.tokens.0.client(id.0).expect("the scheduler knows every tenant");
        status.share.quota.limit()
    }

    /// Hands an event to the scheduler, and turns its orders into frames. `false`: the scheduler refused the event, and nothing changed.
    pub(super) fn token(&mut self, now: Timestamp, event: TokenEvent, out: &mut Vec<NodeAction>) -> bool {
        let mut orders = core::mem::take(&mut self.orders);
        let changes = match event {
            TokenEvent::ShareChanged { client, .. } => Some((client, self.limit_of(TenantId(client)))),
            _ => None,
        };
        if let Err(error) = self.tokens.0.handle(now, event, &mut orders) {
            self.orders = orders;
            note(Note::TokenRefused { token: event, fault: TokenFault::from(&error) }, out);
            return false;
        }
        note(Note::TokenEvent { token: event }, out);
        out.extend(orders.iter().map(|order| NodeAction::Note(Note::TokenOrder { order: *order })));
        // A vertical scaler may raise a request many times a second, which no book of overuse may forget.
        if let Some((client, old)) = changes.filter(|(client, old)| self.limit_of(TenantId(*client)) != *old)
        {
            self.limit_changed(now, TenantId(client), old);
        }
        // An order can change the state of its tenant, and the scheduler must then hear the new state.
        let mut changed = Vec::new();
        for order in orders.drain(..) {
            changed.extend(self.carry_out(now, order, out));
        }
        self.orders = orders;
        for tenant in changed {
            self.tell_scheduler(now, tenant, out);
        }
        true
    }

    /// Turns an order into frames for members. Gives the tenant if the scheduler must hear its new state.
    fn carry_out(
        &mut self,
        now: Timestamp,
        order: TokenAction,
        out: &mut Vec<NodeAction>,
    ) -> Option<TenantId> {
        match order {
            TokenAction::Stop { client: tenant } => {
                let id = TenantId(tenant);
                if let Some(stop) = self.tenant_at_mut(id).turns.stopped(now) {
                    let (client, turn, allowed) = (stop.client, stop.turn, stop.allowed);
                    self.send(client, ToClient::Allow { client, turn, allowed, until: now }, out);
                }
                Some(id)
            }
            TokenAction::Allow { client: tenant, allowed, until } => {
                let id = TenantId(tenant);
                let turns = &mut self.tenant_at_mut(id).turns;
                let more = allowed.saturating_sub(turns.total());
                let Some(permission) = turns.granted(now, more, until) else { return Some(id) };
                let (client, turn, allowed) = (permission.client, permission.turn, permission.allowed);
                self.send(client, ToClient::Allow { client, turn, allowed, until }, out);
                None
            }
            TokenAction::Recall { client: tenant, allowed } => {
                let turns = &self.tenant_at(TenantId(tenant)).turns;
                let more = allowed.saturating_sub(turns.total());
                if let Some((permission, until)) = turns.recalled(more) {
                    let (client, turn, allowed) = (permission.client, permission.turn, permission.allowed);
                    self.send(client, ToClient::Allow { client, turn, allowed, until }, out);
                }
                None
            }
            TokenAction::Throttle { client: tenant, until, reason } => {
                let status = self.tokens.0.client(tenant).expect("the scheduler throttles its own client");
                let (used, limit) = (status.window_used, status.share.quota.limit());
                note(Note::Throttled { tenant, until, used, limit, window: self.tokens.0.window() }, out);
                for client in self.tenant_at(TenantId(tenant)).turns.in_line() {
                    self.send(client, ToClient::Throttle { client, until, reason }, out);
                }
                None
            }
        }
    }

    /// A tenant's limit was `old` and is now another: use is measured by the new limit from here on, and debts are paid at its rate.
    fn limit_changed(&mut self, now: Timestamp, id: TenantId, old: Quota) {
        let window = self.tokens.0.window();
        let status = self.tokens.0.client(id.0).expect("the scheduler has changed the share of its client");
        let tenant = self.tenant_at_mut(id);
        let limit = status.share.quota.limit();
        let before = if now < tenant.largest.0 { tenant.largest.1 } else { old };
        tenant.largest = (now.saturating_add(window), before.max(old).max(limit));
        tenant.since = (now, status.total_used);
        let resumed = tenant.resumes;
        if now < resumed {
            let resumes = now.saturating_add(scaled(resumed.saturating_since(now), old, limit));
            (tenant.resumes, tenant.since.0) = (resumes, resumes);
            if self.waiting.remove(&(resumed, id)) {
                self.waiting.insert((resumes, id));
            }
        }
    }

    /// The overuse of a tenant about to leave, and its limit. The overuse is the larger of two figures: the overuse carried by the
    /// scheduler, and the time used faster than at the limit's rate, since no later window will settle this time.
    pub(super) fn overuse(
        &mut self,
        now: Timestamp,
        id: TenantId,
        out: &mut Vec<NodeAction>,
    ) -> Option<(Duration, Quota)> {
        let &Tenant { since: (since, before), largest, .. } = self.tenant_at(id);
        let limit = self.limit_of(id);
        if limit.is_zero() || limit == Quota::WHOLE {
            return None;
        }
        let most = if now < largest.0 { largest.1 } else { limit }.of(self.tokens.0.window());
        let used = |tokens: &dyn TokenScheduler| {
            let status = tokens.client(id.0).expect("the scheduler knows every tenant");
            (status.window_used, status.total_used)
        };
        if used(&*self.tokens.0).0 > most {
            // The windows passed meanwhile have paid some of the overuse.
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        let (window_used, total_used) = used(&*self.tokens.0);
        let fair = before.saturating_add(limit.of(now.saturating_since(since)));
        let owed = window_used.saturating_sub(most).max(total_used.saturating_sub(fair));
        (!owed.is_zero()).then_some((owed, limit))
    }

    fn sample(&mut self, now: Timestamp, id: ClientId) {
        let tenant = self.clients.get(id).expect("a client that was just heard").tenant;
        let used = self.tenant_at(tenant).turns.of(id).0;
        let client = self.clients.get_mut(id).expect("a client that was just heard");
        if now.saturating_since(client.samples[1].0) >= Duration::from_millis(1000) {
            client.samples = [client.samples[1], (now, used)];
        }
    }
}
