//! Findings: the reasons for a client's wait, denial or refusal, each in a sentence with its figures.
//!
//! A process tells its daemon about each launch that waits for [`LONG_WAIT`](gshare_core::reason::LONG_WAIT) and more. `Reasons`
//! then looks at the node's state and names the rule: the holders of the tokens, the used part of a limit, or the end of a debt. The
//! findings go into the journal, and `gshare why` shows the present and the past findings.
//!
//! # Cost
//! Each wait of 10 ms and more costs a look at the node's tenants. The number of clients and `PER_REASON` bound the memory.

use gshare_core::reason::{Denial, Reason, Wait};
use gshare_core::{Bytes, ClientId, Timestamp};
use gshare_sched::node::{ClientView, MemoryBound, Node, NodeAction, Note, Parking, Refusal, TenantView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Most decisions kept per reason, so that a frequent reason does not drive out the others.
const PER_REASON: usize = 16;
/// Most holders named in a sentence.
const NAMED: usize = 8;
/// Number of the node's statements from which on expired statements are removed.
const STATED: usize = 4096;

/// A wait, a denial or a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// Name of the instance that waits, or was denied or refused.
    pub name: String,
    /// The process of the instance, where a process was let in.
    #[serde(default)]
    pub pid: Option<i32>,
    /// The client of the process, where the process had attached to a device.
    #[serde(default)]
    pub client: Option<ClientId>,
    /// The reason.
    pub reason: Reason,
    /// Time of the wait's beginning, or of the decision.
    pub from_ns: Timestamp,
    /// Time of the wait's end; `None` while the wait lasts, and for a decision.
    #[serde(default)]
    pub ended_ns: Option<Timestamp>,
    /// Earliest end of the wait, where known.
    #[serde(default)]
    pub until_ns: Option<Timestamp>,
    /// The reason with its figures and, as far as known, its end.
    pub text: String,
}

/// The last decision of a reason on an instance, and the count of such decisions since the daemon began to remember them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Decision {
    /// The last decision.
    #[serde(flatten)]
    pub finding: Finding,
    /// The number of decisions.
    pub count: u64,
}

/// A reason, its figures, and its earliest end.
type Cause = (Reason, String, Option<Timestamp>);

/// The name, the process and the tenant of an admitted client.
#[derive(Debug, Clone)]
struct Known {
    name: String,
    pid: i32,
    tenant: ClientId,
}

/// The findings of a daemon.
#[derive(Debug, Default)]
pub(crate) struct Reasons {
    clients: BTreeMap<ClientId, Known>,
    /// The node's statements about a client (a debt) or a tenant (a limit), until their end.
    stated: BTreeMap<(Wait, ClientId), Cause>,
    /// Present waits reported by clients.
    waits: BTreeMap<ClientId, Finding>,
    /// The last decisions, the newest at the back.
    decisions: VecDeque<Decision>,
}

impl Reasons {
    /// Takes the node's actions on an event, and returns the findings for the journal.
    pub(crate) fn observe(&mut self, now: Timestamp, node: &Node, actions: &[NodeAction]) -> Vec<Finding> {
        let mut found = Vec::new();
        for action in actions {
            if let NodeAction::Note(note) = action {
                self.note(now, node, note, &mut found);
            }
        }
        found
    }

    fn note(&mut self, now: Timestamp, node: &Node, note: &Note, found: &mut Vec<Finding>) {
        match note {
            Note::Admitted { client, tenant, name, pid, .. } => {
                self.clients.insert(*client, Known { name: name.clone(), pid: *pid, tenant: *tenant });
            }
            Note::Left { client, .. } => {
                self.end_wait(now, *client, found);
                self.clients.remove(client);
            }
            Note::Waiting { client, reason } => {
                self.end_wait(now, *client, found);
                let view = reason.and_then(|_| node.clients(now).find(|view| view.client == *client));
                if let Some(finding) = view.and_then(|view| self.waits(now, node, &view)) {
                    found.push(finding.clone());
                    self.waits.insert(*client, finding);
                }
            }
            Note::DebtWait { client, until, owed, limit } => {
                let text = format!("{owed} of GPU time beyond its limit, at {limit} of the time");
                self.state(now, *client, (Wait::Debt.into(), text, Some(*until)));
            }
            Note::Throttled { tenant, until, used, limit, window } => {
                let text = format!(
                    "{used} used, overuse of earlier windows included; the limit is {limit} of a window of {window}"
                );
                self.state(now, *tenant, (Wait::Limit.into(), text, Some(*until)));
            }
            Note::MemoryDenied { client, asked, free, of, limit, held } => {
                if let Some(known) = self.clients.get(client).cloned() {
                    let cause = memory_denied(*asked, *free, *of, *limit, *held);
                    found.push(self.decide(now, known.name, Some((*client, known.pid)), cause));
                }
            }
            Note::Refused { name, refusal, .. } => {
                found.push(self.decide(now, name.clone(), None, refused(refusal)));
            }
            Note::NotScaled { name, why, .. } => {
                found.push(self.decide(
                    now,
                    name.clone(),
                    None,
                    (Denial::NotScaled.into(), why.clone(), None),
                ));
            }
            _ => {}
        }
    }

    fn end_wait(&mut self, now: Timestamp, client: ClientId, found: &mut Vec<Finding>) {
        let before = self.waits.remove(&client);
        found.extend(before.map(|before| Finding { ended_ns: Some(now), ..before }));
    }

    /// Takes the node's statement about a wait of a client or a tenant.
    fn state(&mut self, now: Timestamp, of: ClientId, cause: Cause) {
        let Reason::Wait(wait) = cause.0 else { return };
        if self.stated.len() >= STATED {
            self.stated.retain(|_, (_, _, until)| until.is_some_and(|until| until > now));
        }
        self.stated.insert((wait, of), cause.clone());
        let member = |known: &&Known| known.tenant == of;
        if let Some(known) = self.clients.get(&of).or_else(|| self.clients.values().find(member)).cloned() {
            self.decide(now, known.name, None, cause);
        }
    }

    fn decide(&mut self, now: Timestamp, name: String, of: Option<(ClientId, i32)>, cause: Cause) -> Finding {
        let finding = finding(now, now, name, of, cause);
        let alike = |kept: &Decision| kept.finding.reason == finding.reason;
        let before = self.decisions.iter().position(|kept| alike(kept) && kept.finding.name == finding.name);
        let before = before.and_then(|place| self.decisions.remove(place));
        if before.is_none() && self.decisions.iter().filter(|kept| alike(kept)).count() >= PER_REASON {
            let oldest = self.decisions.iter().position(alike);
            oldest.and_then(|place| self.decisions.remove(place));
        }
        let count = before.map_or(0, |before| before.count).saturating_add(1);
        self.decisions.push_back(Decision { finding: finding.clone(), count });
        finding
    }

    /// The last decisions, the newest first.
    pub(crate) fn decisions(&self) -> Vec<Decision> {
        self.decisions.iter().rev().cloned().collect()
    }

    /// The reason for a client's wait now; `None` if the client does not wait.
    pub(crate) fn waits(&self, now: Timestamp, node: &Node, view: &ClientView) -> Option<Finding> {
        // The node does not hold up a token's holder, even if the holder has asked for more.
        let asked = view.waiting_since.filter(|_| !view.holds_token);
        let (since, cause) = match (asked, view.long_wait) {
            _ if view.parking.is_some_and(|parking| parking.returns_since.is_some()) => self.room(view)?,
            (_, Some((Wait::Parked, since))) => {
                let parked = self.parked(view).map(|(_, cause)| cause);
                (since, parked.unwrap_or_else(|| (Wait::Parked.into(), String::new(), None)))
            }
            // Only the process knows these waits.
            (_, Some((wait @ (Wait::InFlight | Wait::Draining | Wait::Measuring), since))) => {
                (since, (wait.into(), String::new(), None))
            }
            (Some(asked), told) => {
                let since = told.map_or(asked, |(_, since)| since.min(asked));
                (since, self.cause(now, node, view))
            }
            (None, Some((wait, since))) => (since, (wait.into(), String::new(), None)),
            (None, None) => self.parked(view)?,
        };
        Some(finding(now, since, view.name.clone(), Some((view.client, view.pid)), cause))
    }

    /// A client that waits for room to come back into.
    fn room(&self, view: &ClientView) -> Option<(Timestamp, Cause)> {
        let parking = view.parking?;
        let since = parking.returns_since?;
        let text = format!("{}, parked {}", parking.bytes, self.ordered(&parking));
        Some((since, (Wait::Room.into(), text, None)))
    }

    /// A client whose memory is in host memory, though it wants to launch nothing.
    fn parked(&self, view: &ClientView) -> Option<(Timestamp, Cause)> {
        let parking = view.parking.filter(|parking| parking.on_host() > Bytes::ZERO)?;
        let text = format!(
            "{} {}; it comes back when it launches, or by `gshare daemon unpark {}`",
            parking.bytes,
            self.ordered(&parking),
            view.name
        );
        Some((parking.ordered_at?, (Wait::Parked.into(), text, None)))
    }

    /// Whose order it was to park.
    fn ordered(&self, parking: &Parking) -> String {
        match (parking.ordered_for, parking.ordered_by) {
            (Some(other), _) => match self.clients.get(&other) {
                Some(known) => format!("for {} (pid {})", known.name, known.pid),
                None => "for a program that has ended".to_owned(),
            },
            (None, None) => "by order of a user of an earlier daemon".to_owned(),
            (None, Some(0)) => "by order of root or the daemon's user".to_owned(),
            (None, Some(uid)) => format!("by order of user {uid}"),
        }
    }

    /// The rule by which a client waits for a token.
    fn cause(&self, now: Timestamp, node: &Node, view: &ClientView) -> Cause {
        let stated = |wait: Wait, of: ClientId| {
            let cause = self.stated.get(&(wait, of))?;
            cause.2.is_some_and(|until| until > now).then(|| cause.clone())
        };
        let tenants: Vec<TenantView> =
            node.tenants().filter(|tenant| tenant.status.gpu == view.gpu).collect();
        let own = tenants.iter().find(|tenant| tenant.status.client == view.tenant);
        if own.is_some_and(|own| own.resumes > view.waiting_since.unwrap_or(own.resumes))
            && let Some(cause) = stated(Wait::Debt, view.client)
        {
            return cause;
        }
        if let Some(holder) = own.and_then(|own| own.holder) {
            return (Wait::Sibling.into(), format!("{holder} has it"), None);
        }
        if let Some(cause) = stated(Wait::Limit, view.tenant) {
            return cause;
        }
        let holders = || {
            let holds = |tenant: &&TenantView| tenant.status.holds.is_some();
            tenants.iter().filter(holds).filter(|tenant| tenant.status.client != view.tenant)
        };
        let held: u32 = holders().map(|tenant| u32::from(tenant.status.share.sm.get())).sum();
        let (sm, used) = (view.share.sm, view.window_used);
        if held + u32::from(sm.get()) <= 10_000 && !used.is_zero() {
            let (limit, window) = (view.share.quota.limit(), node.window());
            let text =
                format!("{used} of this window of {window} are used or carried, and the limit is {limit}");
            return (Wait::Paced.into(), text, None);
        }
        let named: Vec<_> = holders()
            .take(NAMED)
            .map(|tenant| format!("{} ({})", tenant.name, tenant.status.share.sm))
            .collect();
        if named.is_empty() {
            return (Wait::Token.into(), String::new(), None);
        }
        let more = match holders().count().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let text = format!("tokens are held by {}{more}, and it needs {sm} of the SMs", named.join(", "));
        (Wait::Holder.into(), text, None)
    }
}

fn finding(
    now: Timestamp,
    from_ns: Timestamp,
    name: String,
    of: Option<(ClientId, i32)>,
    (reason, figures, until_ns): Cause,
) -> Finding {
    let mut text = reason.text().to_owned();
    if !figures.is_empty() {
        text = format!("{text}: {figures}");
    }
    if let Some(until) = until_ns {
        text = format!("{text}; not before another {}", until.saturating_since(now));
    }
    let (client, pid) = (of.map(|(client, _)| client), of.map(|(_, pid)| pid));
    Finding { name, pid, client, reason, from_ns, ended_ns: None, until_ns, text }
}

fn memory_denied(asked: Bytes, free: Bytes, of: MemoryBound, limit: Bytes, held: Bytes) -> Cause {
    let (reason, bound) = match of {
        MemoryBound::Instance => (Denial::InstanceMemory, "instance"),
        MemoryBound::Guaranteed => (Denial::Guaranteed, "device"),
        MemoryBound::Residents => (Denial::Residents, "device"),
        MemoryBound::ParkMemory { uid } => {
            let figures = format!("{asked} asked, {free} free, {held} of {limit} are taken for user {uid}");
            return (Denial::ParkMemory.into(), format!("{figures} (park_memory)"), None);
        }
        _ => (Denial::DeviceMemory, "device"),
    };
    let end = if asked > limit {
        format!("for good: the {bound} has no more than {limit}")
    } else {
        format!("until {} more of the {bound}'s memory are released", asked.saturating_sub(free))
    };
    (reason.into(), format!("{asked} asked, {free} free, {held} of {limit} are held; {end}"), None)
}

fn refused(refusal: &Refusal) -> Cause {
    (refusal.code().into(), format!("{refusal}; {}", refusal.until()), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{ConnId, Duration, GpuId, Quota};
    use gshare_sched::node::{NodeConfig, Usage};
    use gshare_sched::token::{MultiToken, MultiTokenConfig};

    fn node() -> Node {
        let tokens = Box::new(MultiToken::new(MultiTokenConfig::default()).unwrap());
        Node::new(NodeConfig::default(), 0, tokens, gshare_sched::node::vertical_scaler()).unwrap()
    }

    fn denied(client: ClientId, gib: u64) -> Note {
        let (limit, free) = (Bytes::from_gib(2), Bytes::from_mib(512));
        let (asked, held) = (Bytes::from_gib(gib), limit.saturating_sub(free));
        Note::MemoryDenied { client, asked, free, of: MemoryBound::Instance, limit, held }
    }

    #[test]
    fn a_reason_that_is_given_all_the_time_drives_out_no_other() {
        let (mut reasons, node, at) = (Reasons::default(), node(), Timestamp::from_millis);
        let alice = ClientId::new(0, 0);
        let mut note = |now: u64, note: Note| reasons.observe(at(now), &node, &[NodeAction::Note(note)]);
        for slot in 0..1_000 {
            let client = ClientId::new(slot, 0);
            let (conn, name) = (ConnId::new(slot, 0), format!("client-{slot}"));
            note(0, Note::Admitted { conn, client, tenant: client, gpu: GpuId::new(0), name, pid: 1 });
        }
        assert_eq!(note(1, denied(alice, 1)).len(), 1, "a denial is journalled");
        note(2, denied(alice, 3));
        for slot in 0..1_000 {
            let (used, window) = (Duration::from_millis(60), Duration::from_millis(100));
            let (tenant, limit, until) = (ClientId::new(slot, 0), Quota::from_percent(50).unwrap(), at(100));
            let found = note(3, Note::Throttled { tenant, until, used, limit, window });
            assert_eq!(found, [], "a wait is journalled when it is told");
        }
        for slot in 0..1_000 {
            note(
                4,
                Note::Left {
                    client: ClientId::new(slot, 0),
                    tenant: ClientId::new(slot, 0),
                    usage: Usage::default(),
                },
            );
        }
        let decisions = reasons.decisions();
        assert_eq!(decisions.len(), PER_REASON + 1);
        assert_eq!(decisions[0].finding.name, "client-999");
        assert_eq!(
            decisions[0].finding.text,
            "the limit of its share is used up: 60ms used, overuse of earlier windows included; the limit is 50% of a \
             window of 100ms; not before another 97ms"
        );
        let Decision { finding, count } = decisions.last().unwrap();
        assert_eq!((finding.name.as_str(), *count, finding.from_ns), ("client-0", 2, at(2)));
        assert_eq!(
            finding.text,
            "the memory limit of its instance leaves less: 3 GiB asked, 512 MiB free, 1.5 GiB of 2 GiB are held; \
             for good: the instance has no more than 2 GiB"
        );
        assert!(reasons.clients.is_empty() && reasons.waits.is_empty());
    }
}
