//! Why a client waits, or was denied something: the rule with its figures, in the words of `gshare why`.
//!
//! [`cause`] looks at the tenants of a node as they are. The node's notes say what cannot be seen there: until when a debt or a
//! limit holds a client up, and each denial and refusal.

use gshare_core::{Bytes, ClientId, Duration, Timestamp};
use gshare_sched::node::{ClientView, MemoryBound, Node, NodeAction, Note, TenantView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Decisions that are kept of each rule: one rule that is applied all the time does not drive out the others.
const PER_RULE: usize = 16;
/// Holders that a sentence names.
const NAMED: usize = 8;
/// Statements of the node beyond which those that are over are forgotten.
const STATED: usize = 4096;

/// The rule that held a client up, with its figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
#[non_exhaustive]
#[expect(missing_docs, reason = "the figures of the sentence that each becomes")]
pub enum Rule {
    /// The overuse of an earlier process of its name is paid back.
    DebtWait { owed_ns: Duration, limit: String },
    /// The client has used its limit of the window.
    Throttle { used_ns: Duration, limit: String, window_ns: Duration },
    /// The client carries overuse, which it pays back before it is given more, although SMs are free.
    PacedWait { used_ns: Duration, limit: String, window_ns: Duration },
    /// Others hold tokens, and its SMs do not fit beside theirs.
    WaitForHolder { holders: Vec<String>, sm: String },
    /// Another process of its instance holds the instance's token.
    WaitForSibling { holder: ClientId },
    /// A reservation of memory did not fit.
    MemoryDenial {
        asked_bytes: Bytes,
        free_bytes: Bytes,
        limit_bytes: Bytes,
        held_bytes: Bytes,
        of: MemoryBound,
    },
    /// The client was not let in, or not to a device.
    Refusal {
        code: String,
        text: String,
        #[serde(skip)]
        until: &'static str,
    },
    /// Vertical scaling leaves its share as it is.
    NotScaled { why: String },
}

impl Rule {
    /// The rule that a note of the node is about; `None` if it is about none.
    pub fn of(note: &Note) -> Option<Self> {
        Some(match note {
            Note::DebtWait { owed, limit, .. } => Self::DebtWait { owed_ns: *owed, limit: limit.to_string() },
            Note::Throttled { used, limit, window, .. } => {
                Self::Throttle { used_ns: *used, limit: limit.to_string(), window_ns: *window }
            }
            Note::MemoryDenied { asked, free, of, limit, held, .. } => Self::MemoryDenial {
                asked_bytes: *asked,
                free_bytes: *free,
                limit_bytes: *limit,
                held_bytes: *held,
                of: *of,
            },
            Note::Refused { refusal, .. } => Self::Refusal {
                code: format!("{:?}", refusal.code()),
                text: refusal.to_string(),
                until: refusal.until(),
            },
            Note::NotScaled { why, .. } => Self::NotScaled { why: why.clone() },
            _ => return None,
        })
    }

    /// The rule and its figures in a sentence.
    pub fn sentence(&self) -> String {
        match self {
            Self::DebtWait { owed_ns, limit } => format!(
                "debt wait: {owed_ns} of GPU time that an earlier process of this name used beyond its limit are paid back at {limit} of the time"
            ),
            Self::Throttle { used_ns, limit, window_ns } => format!(
                "throttle: {used_ns} used, overuse of earlier windows included; the limit is {limit} of a window of {window_ns}"
            ),
            Self::PacedWait { used_ns, limit, window_ns } => format!(
                "paced wait: {used_ns} of this window are used or carried as overuse; with a limit of {limit} they are paid back first, although SMs are free (window {window_ns})"
            ),
            Self::WaitForHolder { holders, sm } => {
                let more = match holders.len().saturating_sub(NAMED) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                let named = holders.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
                format!(
                    "wait for a holder: tokens are held by {named}{more}, and {sm} of the SMs do not fit beside them"
                )
            }
            Self::WaitForSibling { holder } => {
                format!("wait for a sibling: {holder} of the same instance holds its token")
            }
            Self::MemoryDenial { asked_bytes, free_bytes, limit_bytes, held_bytes, of } => format!(
                "memory denial: {asked_bytes} asked, {free_bytes} free: {held_bytes} of the {}'s {limit_bytes} are held",
                bound(*of)
            ),
            Self::Refusal { code, text, .. } => format!("refusal ({code}): {text}"),
            Self::NotScaled { why } => format!("not scaled: its share is fixed: {why}"),
        }
    }

    /// Until when an answer holds, in words; `None` for a wait, which ends with a grant.
    pub fn end(&self) -> Option<String> {
        match self {
            Self::MemoryDenial { asked_bytes, limit_bytes, of, .. } if asked_bytes > limit_bytes => {
                Some(format!("for good: the {} has no more than {limit_bytes}", bound(*of)))
            }
            Self::MemoryDenial { asked_bytes, free_bytes, of, .. } => {
                let missing = asked_bytes.saturating_sub(*free_bytes);
                Some(format!("until {missing} more of the {}'s memory are released", bound(*of)))
            }
            Self::Refusal { until, .. } => Some((*until).to_owned()),
            _ => None,
        }
    }

    /// True if both are the same rule, even with other figures.
    pub fn same_kind(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

fn bound(of: MemoryBound) -> &'static str {
    match of {
        MemoryBound::Instance => "instance",
        _ => "device",
    }
}

/// A statement of the node about a client (a debt) or a tenant (a limit), and until when it holds.
pub type Stated<'a> = &'a dyn Fn(ClientId, Kind) -> Option<(Rule, Timestamp)>;

/// The kinds of statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// About a client: a debt of its name is paid back.
    Debt,
    /// About a tenant: its limit is reached.
    Limit,
}

/// The cause for which a waiting client waits; and the end that the node stated, if it has.
pub fn cause(
    window: Duration,
    tenants: &[TenantView],
    view: &ClientView,
    stated: Stated<'_>,
) -> (Rule, Option<Timestamp>) {
    let here = || tenants.iter().filter(|tenant| tenant.status.gpu == view.gpu);
    let own = here().find(|tenant| tenant.status.client == view.tenant);
    if own.is_some_and(|own| own.resumes > view.waiting_since.unwrap_or(own.resumes))
        && let Some((rule, until)) = stated(view.client, Kind::Debt)
    {
        return (rule, Some(until));
    }
    if let Some(holder) = own.and_then(|own| own.holder) {
        return (Rule::WaitForSibling { holder }, None);
    }
    if let Some((rule, until)) = stated(view.tenant, Kind::Limit) {
        return (rule, Some(until));
    }
    let holders =
        || here().filter(|tenant| tenant.status.holds.is_some() && tenant.status.client != view.tenant);
    let held: u32 = holders().map(|tenant| u32::from(tenant.status.share.sm.get())).sum();
    let (sm, used_ns) = (view.share.sm, view.window_used);
    if held + u32::from(sm.get()) <= 10_000 && !used_ns.is_zero() {
        let limit = view.share.quota.limit().to_string();
        return (Rule::PacedWait { used_ns, limit, window_ns: window }, None);
    }
    let holders = holders().map(|tenant| format!("{} ({})", tenant.name, tenant.status.share.sm)).collect();
    (Rule::WaitForHolder { holders, sm: sm.to_string() }, None)
}

/// A decision of the node that held something up.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Decision {
    /// When it was made, the last time.
    pub at_ns: Timestamp,
    /// Name of the instance that it held up.
    pub name: String,
    /// How often it was made, as far back as it is remembered.
    pub count: u64,
    /// The rule with its figures, as `gshare why` says it.
    pub what: String,
}

#[derive(Debug)]
struct Kept {
    at: Timestamp,
    name: Arc<str>,
    count: u64,
    rule: Rule,
}

/// The node's notes about waits, denials and refusals. What is kept is bounded by the clients and by [`PER_RULE`].
#[derive(Debug, Default)]
pub(crate) struct Reasons {
    clients: BTreeMap<ClientId, Arc<str>>,
    /// Names of tenants, and the number of their clients.
    tenants: BTreeMap<ClientId, (Arc<str>, usize)>,
    stated: BTreeMap<(Kind, ClientId), (Rule, Timestamp)>,
    /// The newest last.
    decisions: VecDeque<Kept>,
}

impl Reasons {
    /// The node has handled an event with these actions.
    pub(crate) fn observe(&mut self, now: Timestamp, actions: &[NodeAction]) {
        for action in actions {
            if let NodeAction::Note(note) = action {
                self.note(now, note);
            }
        }
    }

    fn note(&mut self, now: Timestamp, note: &Note) {
        match note {
            Note::Admitted { client, tenant, name, .. } => {
                let name: Arc<str> = name.as_str().into();
                self.clients.insert(*client, Arc::clone(&name));
                self.tenants.entry(*tenant).or_insert((name, 0)).1 += 1;
            }
            Note::Left { client, tenant } => {
                self.clients.remove(client);
                if let Some((_, count)) = self.tenants.get_mut(tenant) {
                    *count = count.saturating_sub(1);
                    if *count == 0 {
                        self.tenants.remove(tenant);
                    }
                }
            }
            Note::DebtWait { client, until, .. } => {
                let name = self.clients.get(client).cloned();
                self.state(now, (Kind::Debt, *client), name, Rule::of(note), *until);
            }
            Note::Throttled { tenant, until, .. } => {
                let name = self.tenants.get(tenant).map(|(name, _)| Arc::clone(name));
                self.state(now, (Kind::Limit, *tenant), name, Rule::of(note), *until);
            }
            Note::MemoryDenied { client, .. } => {
                let name = self.clients.get(client).cloned();
                self.decide(now, name, Rule::of(note));
            }
            Note::Refused { name, .. } | Note::NotScaled { name, .. } => {
                self.decide(now, Some(name.as_str().into()), Rule::of(note));
            }
            _ => {}
        }
    }

    fn state(
        &mut self,
        now: Timestamp,
        of: (Kind, ClientId),
        name: Option<Arc<str>>,
        rule: Option<Rule>,
        until: Timestamp,
    ) {
        let Some(rule) = rule else { return };
        if self.stated.len() >= STATED {
            self.stated.retain(|_, (_, until)| *until > now);
        }
        self.decide(now, name, Some(rule.clone()));
        self.stated.insert(of, (rule, until));
    }

    fn decide(&mut self, at: Timestamp, name: Option<Arc<str>>, rule: Option<Rule>) {
        let (Some(name), Some(rule)) = (name, rule) else { return };
        let alike = |kept: &Kept| kept.rule.same_kind(&rule);
        let before = self.decisions.iter().position(|kept| kept.name == name && alike(kept));
        let before = before.and_then(|place| self.decisions.remove(place));
        if before.is_none() && self.decisions.iter().filter(|kept| alike(kept)).count() >= PER_RULE {
            let oldest = self.decisions.iter().position(alike);
            oldest.and_then(|place| self.decisions.remove(place));
        }
        let count = before.map_or(0, |before| before.count).saturating_add(1);
        self.decisions.push_back(Kept { at, name, count, rule });
    }

    /// The last decisions, the newest first.
    pub(crate) fn decisions(&self) -> Vec<Decision> {
        let shown = |kept: &Kept| Decision {
            at_ns: kept.at,
            name: kept.name.to_string(),
            count: kept.count,
            what: [Some(kept.rule.sentence()), kept.rule.end()]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join("; "),
        };
        self.decisions.iter().rev().map(shown).collect()
    }

    /// Why a client waits now, and how much longer at least; `None` if it does not.
    pub(crate) fn waits(
        &self,
        now: Timestamp,
        node: &Node,
        tenants: &[TenantView],
        view: &ClientView,
    ) -> Option<String> {
        // A holder that has asked for more is not held up.
        view.waiting_since.filter(|_| !view.holds_token)?;
        let stated = |of: ClientId, kind: Kind| {
            self.stated.get(&(kind, of)).filter(|(_, until)| *until > now).cloned()
        };
        let (rule, until) = cause(node.window(), tenants, view, &stated);
        let sentence = rule.sentence();
        Some(match until {
            Some(until) => format!("{sentence}; not before another {}", until.saturating_since(now)),
            None => sentence,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{ConnId, GpuId, Quota};

    fn denied(client: ClientId, gib: u64) -> Note {
        let (limit, free) = (Bytes::from_gib(2), Bytes::from_mib(512));
        let held = limit.saturating_sub(free);
        Note::MemoryDenied {
            client,
            asked: Bytes::from_gib(gib),
            free,
            of: MemoryBound::Instance,
            limit,
            held,
        }
    }

    #[test]
    fn a_rule_that_is_applied_all_the_time_drives_out_no_other() {
        let mut reasons = Reasons::default();
        let at = Timestamp::from_millis;
        let alice = ClientId::new(0, 0);
        let mut note = |now: u64, note: Note| reasons.observe(at(now), &[NodeAction::Note(note)]);
        for slot in 0..1_000 {
            let client = ClientId::new(slot, 0);
            let (conn, name) = (ConnId::new(slot, 0), format!("client-{slot}"));
            note(0, Note::Admitted { conn, client, tenant: client, gpu: GpuId::new(0), name, pid: 1 });
        }
        note(1, denied(alice, 1));
        note(2, denied(alice, 3));
        for slot in 0..1_000 {
            let (used, window) = (Duration::from_millis(60), Duration::from_millis(100));
            let (tenant, limit, until) = (ClientId::new(slot, 0), Quota::from_percent(50).unwrap(), at(100));
            note(3, Note::Throttled { tenant, until, used, limit, window });
        }
        for slot in 0..1_000 {
            note(4, Note::Left { client: ClientId::new(slot, 0), tenant: ClientId::new(slot, 0) });
        }
        let decisions = reasons.decisions();
        assert_eq!(decisions.len(), PER_RULE + 1);
        assert_eq!(decisions[0].name, "client-999");
        assert_eq!(
            decisions[0].what,
            "throttle: 60ms used, overuse of earlier windows included; the limit is 50% of a window of 100ms"
        );
        let last = decisions.last().unwrap();
        assert_eq!((last.name.as_str(), last.count, last.at_ns), ("client-0", 2, at(2)));
        assert_eq!(
            last.what,
            "memory denial: 3 GiB asked, 512 MiB free: 1.5 GiB of the instance's 2 GiB are held; \
             for good: the instance has no more than 2 GiB"
        );
        assert!(reasons.clients.is_empty() && reasons.tenants.is_empty());
    }
}
