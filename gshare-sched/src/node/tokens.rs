//! Tokens: what members ask and report, as events of the token scheduler, and its orders as frames.

use super::debts::scaled;
use super::turns::{Owner, Turns};
use super::{Client, Node, NodeAction, Note, Tenant, TenantId, TokenFault, note};
use gshare_core::token::{ThrottleReason, TokenScheduler};
use gshare_core::wire::ToClient;
use gshare_core::{ClientId, Duration, LeaseId, Quota, Timestamp, TokenAction, TokenEvent};

impl Node {
    /// The next time that concerns something else than tokens.
    pub(super) fn own_deadline(&self) -> Option<Timestamp> {
        let resumes = self.waiting.first().map(|(resumes, _)| *resumes);
        [resumes, self.scaling.next_deadline(), self.inquiries.next_deadline()].into_iter().flatten().min()
    }

    pub(super) fn deadline(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        if self.tokens.0.next_deadline().is_some_and(|due| due <= now) {
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        self.catch_up(now, out);
    }

    /// Asks the scheduler for those whose debts are paid back.
    pub(super) fn pay_back(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        while let Some(&(_, tenant)) = self.waiting.first().filter(|(resumes, _)| *resumes <= now) {
            self.waiting.pop_first();
            self.token(now, TokenEvent::TokenRequested { client: tenant.0 }, out);
        }
    }

    /// A client wants a token. The scheduler is asked for its tenant, once the debts of the name are paid back.
    pub(super) fn ask(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<NodeAction>) {
        let Some(&Client { conn, tenant: id, .. }) = self.clients.get(client) else {
            return;
        };
        let Some(tenant) = self.tenant_mut(id) else { return };
        let waited = tenant.turns.of(client).1.is_some();
        let (asks, resumes) = (tenant.turns.ask(now, client), tenant.resumes);
        if now < resumes {
            self.waiting.insert((resumes, id));
            if !waited {
                let limit = self.limit_of(id).unwrap_or(Quota::WHOLE);
                let owed = limit.of(resumes.saturating_since(now));
                note(Note::DebtWait { client, until: resumes, owed, limit }, out);
                let reason = ThrottleReason::LimitReached;
                out.push(NodeAction::Send {
                    conn,
                    frame: ToClient::Throttle { client, until: resumes, reason },
                });
            }
        } else if asks {
            self.token(now, TokenEvent::TokenRequested { client: id.0 }, out);
        }
    }

    /// A client returns a lease of its tenant's, which may go to another member next.
    pub(super) fn returned(
        &mut self,
        now: Timestamp,
        client: ClientId,
        lease: LeaseId,
        used: Duration,
        again: bool,
        out: &mut Vec<NodeAction>,
    ) {
        let mut outlived = false;
        let settled = match self.owner(client, lease) {
            (Some(id), Owner::Current) => {
                let Some(turns) = self.tenant_mut(id).map(|tenant| &mut tenant.turns) else { return };
                let late = turns.late();
                let told = turns.settles(lease, used);
                let (wants, waited) = turns.wants_again(now, client, lease, again);
                let event = TokenEvent::TokenReturned { client: id.0, lease, used: told, again: wants };
                let taken = self.token(now, event, out);
                if !taken && let Some(tenant) = self.tenant_mut(id) {
                    tenant.turns.wait(client, waited);
                    tenant.turns.refused(lease, late);
                    outlived = tenant.turns.outlived(lease);
                    if outlived {
                        self.late(id, client, lease, used, out);
                    }
                }
                taken
            }
            (Some(id), Owner::Late) => {
                self.late(id, client, lease, used, out);
                false
            }
            _ => {
                note(Note::StaleReport { client }, out);
                false
            }
        };
        if settled {
            self.sample(now, client);
        } else if again {
            // The return has crossed a revoke on the wire; the wish stands.
            self.ask(now, client, out);
        } else if !outlived && !matches!(out.last(), Some(NodeAction::Note(Note::LateCharge { .. }))) {
            note(Note::NoEffect, out);
        }
    }

    /// A client reports what it has used of a lease, and its counters.
    pub(super) fn reported(
        &mut self,
        now: Timestamp,
        client: ClientId,
        lease: LeaseId,
        used: Duration,
        (launches, waited): (u64, Duration),
        out: &mut Vec<NodeAction>,
    ) {
        let mut outlived = false;
        let taken = match self.owner(client, lease) {
            (Some(id), Owner::Current) => {
                let Some(turns) = self.tenant_mut(id).map(|tenant| &mut tenant.turns) else { return };
                let late = turns.late();
                let told = turns.settles(lease, used);
                let event = TokenEvent::UsageReported { client: id.0, lease, used: told };
                let mut taken = self.token(now, event, out);
                if !taken && let Some(tenant) = self.tenant_mut(id) {
                    tenant.turns.refused(lease, late);
                    outlived = tenant.turns.outlived(lease);
                    if outlived {
                        taken = self.late(id, client, lease, used, out);
                    }
                }
                taken
            }
            (Some(id), Owner::Late) => self.late(id, client, lease, used, out),
            _ => {
                note(Note::StaleReport { client }, out);
                false
            }
        };
        if !taken {
            // The account of a lease that its siblings outlived is closed now, even if the report charged nothing.
            if !outlived {
                note(Note::NoEffect, out);
            }
            return;
        }
        if let Some(entry) = self.clients.get_mut(client) {
            (entry.launches, entry.waited) = (launches, waited);
        }
        self.sample(now, client);
    }

    /// Charges late a client's use of a lease that is settled already. Answers whether there was anything to charge.
    fn late(
        &mut self,
        id: TenantId,
        client: ClientId,
        lease: LeaseId,
        used: Duration,
        out: &mut Vec<NodeAction>,
    ) -> bool {
        let Some(tenant) = self.tenant_mut(id) else { return false };
        let more = tenant.turns.charge_late(client, lease, used);
        let late = tenant.turns.late();
        note(if more { Note::LateCharge { client, late } } else { Note::StaleReport { client } }, out);
        more
    }

    /// The tenant of a client, and what it has to do with a lease.
    fn owner(&self, client: ClientId, lease: LeaseId) -> (Option<TenantId>, Owner) {
        let id = self.clients.get(client).map(|entry| entry.tenant);
        let owner = id.and_then(|id| self.tenant(id)).map(|tenant| tenant.turns.owner(client, lease));
        (id, owner.unwrap_or(Owner::Other))
    }

    pub(super) fn limit_of(&self, id: TenantId) -> Option<Quota> {
        self.tokens.0.client(id.0).map(|status| status.share.quota.limit())
    }

    /// Hands an event to the scheduler, and turns its orders into frames. `false`: it was refused, and nothing changed.
    pub(super) fn token(&mut self, now: Timestamp, event: TokenEvent, out: &mut Vec<NodeAction>) -> bool {
        let mut orders = core::mem::take(&mut self.orders);
        let changes = match event {
            TokenEvent::ShareChanged { client, .. } => {
                self.limit_of(TenantId(client)).map(|old| (client, old))
            }
            _ => None,
        };
        let handled = self.tokens.0.handle(now, event, &mut orders);
        if let Err(error) = handled {
            self.orders = orders;
            note(Note::TokenRefused { token: event, fault: TokenFault::from(&error) }, out);
            return false;
        }
        note(Note::TokenEvent { token: event }, out);
        out.extend(orders.iter().map(|order| NodeAction::Note(Note::TokenOrder { order: *order })));
        if let Some((client, old)) = changes {
            self.limit_changed(now, TenantId(client), old);
        }
        let mut more = Vec::new();
        self.carry_out(now, event, &orders, &mut more, out);
        orders.clear();
        self.orders = orders;
        for event in more {
            // Members that wait have not asked the scheduler while another one held the lease.
            let asks = |client| self.tenant(TenantId(client)).is_some_and(|tenant| tenant.turns.must_ask());
            if !matches!(event, TokenEvent::TokenRequested { client } if !asks(client)) {
                self.token(now, event, out);
            }
        }
        true
    }

    /// Turns orders into frames for members, in the scheduler's own order: what expired, the event, grants. Appends the
    /// events that follow to `more`.
    fn carry_out(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        orders: &[TokenAction],
        more: &mut Vec<TokenEvent>,
        out: &mut Vec<NodeAction>,
    ) {
        for order in orders {
            let &TokenAction::Revoke { client: tenant, lease, reason } = order else { continue };
            let turns = self.tenant_mut(TenantId(tenant)).map(|tenant| &mut tenant.turns);
            if let Some(client) = turns.and_then(|turns| turns.revoked(now, lease)) {
                self.send(client, ToClient::Revoke { client, lease, reason }, out);
            }
        }
        if let TokenEvent::TokenReturned { client, lease, used, .. }
        | TokenEvent::UsageReported { client, lease, used } = event
            && let Some(tenant) = self.tenant_mut(TenantId(client))
        {
            tenant.turns.charged(lease, used);
            if matches!(event, TokenEvent::TokenReturned { .. }) {
                tenant.turns.returned(now, lease);
            }
        }
        for order in orders {
            match *order {
                TokenAction::Grant { client: tenant, lease, budget, expires } => {
                    let turns = self.tenant_mut(TenantId(tenant)).map(|tenant| &mut tenant.turns);
                    match turns.and_then(|turns| turns.granted(now, lease, (budget, expires))) {
                        Some(client) => {
                            self.send(client, ToClient::Grant { client, lease, budget, expires }, out);
                        }
                        None => {
                            let (used, again) = (Duration::ZERO, false);
                            more.push(TokenEvent::TokenReturned { client: tenant, lease, used, again });
                        }
                    }
                }
                TokenAction::Throttle { client: tenant, until, reason } => {
                    self.throttled(tenant, until, out);
                    let turns = self.tenant(TenantId(tenant)).map(|tenant| &tenant.turns);
                    let waiting: Vec<_> = turns.into_iter().flat_map(Turns::in_line).collect();
                    for client in waiting {
                        self.send(client, ToClient::Throttle { client, until, reason }, out);
                    }
                }
                TokenAction::Revoke { client: tenant, .. } => {
                    more.push(TokenEvent::TokenRequested { client: tenant });
                }
            }
        }
    }

    fn throttled(&self, tenant: ClientId, until: Timestamp, out: &mut Vec<NodeAction>) {
        if let Some(status) = self.tokens.0.client(tenant) {
            let (used, limit) = (status.window_used, status.share.quota.limit());
            note(Note::Throttled { tenant, until, used, limit, window: self.tokens.0.window() }, out);
        }
    }

    /// From now on a tenant is measured by another limit than `old`, and pays back at its rate.
    fn limit_changed(&mut self, now: Timestamp, id: TenantId, old: Quota) {
        let window = self.tokens.0.window();
        let Some(status) = self.tokens.0.client(id.0) else { return };
        let Some(tenant) = self.tenant_mut(id) else { return };
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

    /// GPU time that a tenant which is about to leave had beyond its limit, and the limit: the overuse that
    /// the scheduler carries; or, since it leaves nothing behind for windows to come, the time that it had
    /// faster than at the limit's rate, late charges included.
    pub(super) fn overuse(
        &mut self,
        now: Timestamp,
        id: TenantId,
        out: &mut Vec<NodeAction>,
    ) -> Option<(Duration, Quota)> {
        let &Tenant { since: (since, before), largest, ref turns, .. } = self.tenant(id)?;
        let late = turns.late();
        let limit = self.limit_of(id)?;
        if limit.is_zero() || limit == Quota::WHOLE {
            return None;
        }
        let most = if now < largest.0 { largest.1 } else { limit }.of(self.tokens.0.window());
        let used = |tokens: &dyn TokenScheduler| {
            let status = tokens.client(id.0)?;
            // Late charges are for use in windows before.
            Some((status.window_used, status.total_used.saturating_add(late)))
        };
        if used(&*self.tokens.0)?.0 > most {
            // The windows that have passed meanwhile paid back some.
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        let (window_used, total_used) = used(&*self.tokens.0)?;
        let fair = before.saturating_add(limit.of(now.saturating_since(since)));
        let owed = window_used.saturating_sub(most).max(total_used.saturating_sub(fair));
        (!owed.is_zero()).then_some((owed, limit))
    }

    fn sample(&mut self, now: Timestamp, id: ClientId) {
        let Some(client) = self.clients.get(id) else { return };
        let Some((used, _)) = self.tenant(client.tenant).map(|tenant| tenant.turns.of(id)) else { return };
        if let Some(client) = self.clients.get_mut(id)
            && now.saturating_since(client.samples[1].0) >= Duration::from_millis(1000)
        {
            client.samples = [client.samples[1], (now, used)];
        }
    }
}
