//! `gshare why`: which rule made a client wait, denied it memory or refused it, and until when.
//!
//! The journal is replayed on a [`Node`](gshare_sched::node::Node). After each event the client's state says what it waits
//! for; a wait is a list of stretches, each with one cause. What the node notes (a debt, a limit that is reached, a denial,
//! a refusal) names its figures and its end; the end of a wait for others is the grant that the replay comes to.

use super::{print_json, replay};
use gshare_core::{ClientId, Duration, Timestamp};
use gshare_sched::node::{ClientView, NodeAction, Note};
use gshared::journal::Replay;
use gshared::why::{Kind, Rule, cause};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Say why a client waited, was denied memory or was refused, and until when.
///
/// The journal is replayed, so it must have the run from its beginning. Without --at each wait, denial and refusal of the
/// client is printed, the last one first. Times count from the first event of the run.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare why --client alice /var/lib/gshare/journal               everything that held alice up, the last first
  gshare why --client alice --at 12.5s /var/lib/gshare/journal    what held her up 12.5 s after the run began
  gshare why --client alice --last 3 --json /var/lib/gshare/journal")]
pub(crate) struct Options {
    /// Name of the client's instance.
    #[arg(long, value_name = "NAME")]
    client: String,
    /// What held it up at this time since the run began, such as 12.5s; else what did so last before.
    #[arg(long, value_name = "TIME")]
    at: Option<Duration>,
    /// Print at most N.
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    last: usize,
    /// Print one JSON object: {"findings": […]}, times in ns of the daemon's clock.
    #[arg(long)]
    json: bool,
    /// Journal files, or directories of them.
    #[arg(required = true, value_name = "JOURNAL")]
    journal: Vec<PathBuf>,
}

/// A wait with one cause, a denial or a refusal.
#[derive(Debug, Clone, Serialize)]
struct Finding {
    #[serde(skip)]
    run_began: Timestamp,
    client: Option<ClientId>,
    from_ns: Timestamp,
    /// When it was over, or will be; `None`: it is not known.
    until_ns: Option<Timestamp>,
    /// The end in words.
    until: String,
    #[serde(flatten)]
    rule: Rule,
}

impl Finding {
    fn print(&self) {
        let since = |at: Timestamp| at.saturating_since(self.run_began).as_secs_f64();
        let client = self.client.map_or_else(String::new, |client| format!(" {client}"));
        println!("+{:.6}s{client} {}; {}", since(self.from_ns), self.rule.sentence(), self.until);
    }

    /// Whether it held the client up at this time. A denial and a refusal are answers of one instant.
    fn covers(&self, at: Timestamp) -> bool {
        match self.rule {
            Rule::MemoryDenial { .. } | Rule::Refusal { .. } => self.from_ns == at,
            _ => self.from_ns <= at && self.until_ns.is_none_or(|until| at < until),
        }
    }
}

/// The wait of the client of one id, at present.
#[derive(Debug)]
struct Wait {
    client: ClientId,
    since: Timestamp,
    rule: Rule,
    /// The end that the node stated.
    stated: Option<Timestamp>,
}

/// A run that is replayed, and what held the client up in it.
#[derive(Debug)]
struct Inquest {
    name: String,
    replay: Replay,
    began: Option<Timestamp>,
    waits: Vec<Wait>,
    /// The last note of the node about a debt (of a client) or a limit (of a tenant), and until when it holds.
    stated: BTreeMap<(Kind, ClientId), (Rule, Timestamp)>,
    findings: Vec<Finding>,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let files = replay::files(&options.journal)?;
    let mut runs: Vec<Inquest> = Vec::new();
    replay::read(&files, |_, _, line, begins| {
        if begins {
            let inquest = Inquest::new(&options.client, Replay::new(line)?);
            anyhow::ensure!(
                line.segment == Some(0),
                "the beginning of this run is missing: it cannot be replayed"
            );
            runs.push(inquest);
        }
        match runs.last_mut() {
            Some(run) => run.line(line),
            None => Ok(()),
        }
    })?;
    let mut findings: Vec<Finding> = runs.into_iter().rev().flat_map(Inquest::finish).collect();
    if let Some(at) = options.at {
        let at = |finding: &Finding| finding.run_began.saturating_add(at);
        let before = |finding: &&Finding| finding.from_ns <= at(finding);
        let covering: Vec<_> =
            findings.iter().filter(|finding| finding.covers(at(finding))).cloned().collect();
        let last = || findings.iter().filter(before).max_by_key(|finding| finding.from_ns).cloned();
        findings = if covering.is_empty() { last().into_iter().collect() } else { covering };
    }
    findings.truncate(options.last);
    if options.json {
        return print_json(&serde_json::json!({ "client": options.client, "findings": findings }));
    }
    if findings.is_empty() {
        println!("nothing held {} up in this journal", options.client);
    }
    findings.iter().for_each(Finding::print);
    Ok(())
}

impl Inquest {
    fn new(name: &str, replay: Replay) -> Self {
        let (waits, stated, findings) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { name: name.to_owned(), replay, began: None, waits, stated, findings }
    }

    fn line(&mut self, line: &gshared::journal::Line) -> anyhow::Result<()> {
        let Some(done) = self.replay.line(line)? else { return Ok(()) };
        let now = done.now;
        anyhow::ensure!(done.same != Some(false), "the replay differs from the run: see `gshare replay`");
        let notes: Vec<Note> = done
            .actions
            .iter()
            .filter_map(|action| match action {
                NodeAction::Note(note) => Some(note.clone()),
                _ => None,
            })
            .collect();
        let began = *self.began.get_or_insert(now);
        for note in &notes {
            self.note(now, began, note);
        }
        self.look(now);
        Ok(())
    }

    fn note(&mut self, now: Timestamp, began: Timestamp, note: &Note) {
        let Some(rule) = Rule::of(note) else { return };
        let client = match note {
            Note::DebtWait { client, until, .. } => return self.state((Kind::Debt, *client), rule, *until),
            Note::Throttled { tenant, until, .. } => return self.state((Kind::Limit, *tenant), rule, *until),
            Note::MemoryDenied { client, .. } => {
                let view = self.replay.node().clients(now).find(|view| view.client == *client);
                view.filter(|view| view.name == self.name).map(|_| Some(*client))
            }
            Note::Refused { name, .. } => (*name == self.name).then_some(None),
            _ => None,
        };
        if let Some(client) = client {
            let until = rule.end().unwrap_or_default();
            self.findings.push(Finding {
                run_began: began,
                client,
                from_ns: now,
                until_ns: None,
                until,
                rule,
            });
        }
    }

    /// Remembers what the node stated of a client or a tenant.
    fn state(&mut self, of: (Kind, ClientId), rule: Rule, until: Timestamp) {
        self.stated.insert(of, (rule, until));
    }

    /// Compares what each client of the name waits for with what it waited for before.
    fn look(&mut self, now: Timestamp) {
        self.stated.retain(|_, (_, until)| *until > now);
        let views: Vec<ClientView> =
            self.replay.node().clients(now).filter(|view| view.name == self.name).collect();
        let node = self.replay.node();
        let tenants: Vec<_> = node.tenants().collect();
        let stated = |of: ClientId, kind: Kind| self.stated.get(&(kind, of)).cloned();
        let waiting: Vec<(ClientId, Rule, Option<Timestamp>)> = views
            .iter()
            // A holder that has asked for more is not held up.
            .filter(|view| view.waiting_since.is_some() && !view.holds_token)
            .map(|view| {
                let (rule, stated) = cause(node.window(), &tenants, view, &stated);
                (view.client, rule, stated)
            })
            .collect();
        let (ended, going): (Vec<Wait>, Vec<Wait>) =
            std::mem::take(&mut self.waits).into_iter().partition(|wait| {
                !waiting.iter().any(|(client, rule, _)| *client == wait.client && goes_on(rule, &wait.rule))
            });
        self.waits = going;
        for wait in ended {
            let granted = views.iter().any(|view| view.client == wait.client && view.holds_token);
            let gone = !views.iter().any(|view| view.client == wait.client);
            self.end(
                wait,
                now,
                if granted {
                    "granted"
                } else if gone {
                    "gone"
                } else {
                    "another cause"
                },
            );
        }
        for (client, rule, stated) in waiting {
            match self.waits.iter_mut().find(|wait| wait.client == client) {
                // Figures become known late: a window may end after the first look.
                Some(wait) => wait.rule = rule,
                None => self.waits.push(Wait { client, since: now, rule, stated }),
            }
        }
    }

    fn end(&mut self, wait: Wait, now: Timestamp, how: &str) {
        let run_began = self.began.unwrap_or(now);
        if now == wait.since {
            return;
        }
        let at = |at: Timestamp| format!("+{:.6}s", at.saturating_since(run_began).as_secs_f64());
        let stated = wait.stated.map_or_else(String::new, |until| format!(", not before {}", at(until)));
        let waited = now.saturating_since(wait.since);
        let until = format!("until {} ({how}, after {waited}{stated})", at(now));
        let (client, from_ns, rule) = (Some(wait.client), wait.since, wait.rule);
        self.findings.push(Finding { run_began, client, from_ns, until_ns: Some(now), until, rule });
    }

    /// The findings, the last one first.
    fn finish(mut self) -> Vec<Finding> {
        for wait in std::mem::take(&mut self.waits) {
            let run_began = self.began.unwrap_or(wait.since);
            let at = |at: Timestamp| format!("+{:.6}s", at.saturating_since(run_began).as_secs_f64());
            let until = wait.stated.map_or_else(
                || "the journal ends before it is over".to_owned(),
                |until| format!("not before {}", at(until)),
            );
            let (client, from_ns, rule) = (Some(wait.client), wait.since, wait.rule);
            self.findings.push(Finding { run_began, client, from_ns, until_ns: None, until, rule });
        }
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.from_ns));
        self.findings
    }
}

/// True if a wait goes on: the same rule, even with other figures, and the same holders.
fn goes_on(rule: &Rule, before: &Rule) -> bool {
    match (rule, before) {
        (Rule::WaitForHolder { holders, .. }, Rule::WaitForHolder { holders: before, .. }) => {
            holders == before
        }
        _ => rule.same_kind(before),
    }
}
