//! `gshare why`: the reason for a wait, a denial or a refusal; now from the daemon, and for the past from its journal.

use super::{Form, Where, bypass, print_json};
use anyhow::Context as _;
use gshare_core::reason::{Reason, Wait};
use gshare_core::{Duration, Timestamp};
use gshared::why::Finding;
use gshared::{Snapshot, journal};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Explain why a client waits, or was denied memory or refused.
///
/// An answer has the rule, and since when and until when it holds the client up.
///
/// Without --at and --since the daemon answers for the present. With --at, --since or --journal, the answer comes from the
/// journal, which records each wait of 10 ms and more, each denial of memory and each refusal. Times count back from now,
/// or from the end of the journal of a daemon that has ended.
///
/// --json prints {"findings": […]} and `now_ns`; times are in ns of the monotonic clock of the node.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare why                                            everything that waits now, and the last denials and refusals
  gshare why alice                                      the clients of the instance alice
  gshare why 4711                                       process 4711 (also of `gshare run`), and what it has started
  gshare why alice --since 300s                           what held alice up in the last 300 s
  gshare why alice --at 90s                             what held her up 90 s ago
  gshare why alice --journal /var/lib/gshare/journal    everything that the journal knows of her")]
pub(crate) struct Options {
    /// Name of an instance, or number of a process [default: everything].
    #[arg(value_name = "NAME|PID")]
    of: Option<String>,
    /// The waits in progress this long ago; if there were none, the last finding before.
    #[arg(long, value_name = "TIME")]
    at: Option<Duration>,
    /// The waits, denials and refusals within this last span of time.
    #[arg(long, value_name = "TIME", conflicts_with = "at")]
    since: Option<Duration>,
    /// Folder of a journal [default: the daemon's].
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    form: Form,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let past = options.at.is_some() || options.since.is_some() || options.journal.is_some();
    let snapshot = options.place.snapshot();
    let (now, findings) = match (past, snapshot) {
        (false, snapshot) => {
            let snapshot = snapshot.map_err(|error| without_daemon(options.of.as_deref(), error))?;
            let wanted = Wanted::among(options.of.as_deref(), Some(&snapshot), &[])?;
            (snapshot.now_ns, present(snapshot, &wanted))
        }
        (true, snapshot) => {
            let snapshot = if options.journal.is_some() { snapshot.ok() } else { Some(snapshot?) };
            let told = snapshot.as_ref().and_then(|snapshot| snapshot.journal.clone());
            let dir = options.journal.clone().or(told).context(
                "the daemon keeps no journal: configure [journal] in gshared.toml, or name a folder with --journal",
            )?;
            let recorded = Recorded::read(&dir)?;
            let live = snapshot.filter(|snapshot| recorded.epoch == snapshot.epoch);
            let now = live.as_ref().map_or(recorded.last, |snapshot| snapshot.now_ns);
            let wanted = Wanted::among(options.of.as_deref(), live.as_ref(), &recorded.findings)?;
            let of_it = recorded.findings.into_iter().filter(|finding| wanted.has(finding)).collect();
            (now, chosen(of_it, now, options))
        }
    };
    if options.form.json {
        return print_json(&serde_json::json!({ "now_ns": now, "findings": findings }));
    }
    if findings.is_empty() {
        println!(
            "nothing {} {} up",
            if past { "held" } else { "holds" },
            options.of.as_deref().unwrap_or("any client")
        );
    }
    findings.iter().for_each(|finding| println!("{}", line(finding, now)));
    Ok(())
}

/// Without a daemon, a process keeps its last share.
fn without_daemon(of: Option<&str>, error: anyhow::Error) -> anyhow::Error {
    let Some(pid) = of.and_then(|of| of.parse().ok()) else { return error };
    let policy = match bypass::variable(pid, "GSHARE_ON_DAEMON_LOSS").as_deref() {
        Some("closed") => "its policy is closed: its launches wait for a daemon, and then fail",
        _ => "where it has a limit, it keeps that by its own clock",
    };
    error.context(format!("process {pid} has no daemon to wait for; {policy}"))
}

/// The findings to show.
#[derive(Debug)]
enum Wanted {
    All,
    /// By the name of an instance.
    Name(String),
    /// By these processes, and by their own names for themselves, since a refused process is no client.
    Processes(BTreeSet<i32>, BTreeSet<String>),
}

impl Wanted {
    /// Finds the argument's subject among all known subjects.
    fn among(of: Option<&str>, snapshot: Option<&Snapshot>, recorded: &[Finding]) -> anyhow::Result<Self> {
        let Some(of) = of else { return Ok(Self::All) };
        let clients = snapshot.iter().flat_map(|snapshot| &snapshot.clients);
        let decided = snapshot.iter().flat_map(|snapshot| &snapshot.decisions);
        let decided = decided.map(|decision| &decision.finding).chain(recorded);
        let names: BTreeSet<&str> = clients
            .clone()
            .map(|client| client.name.as_str())
            .chain(decided.clone().map(|finding| finding.name.as_str()))
            .collect();
        if names.contains(of) {
            return Ok(Self::Name(of.to_owned()));
        }
        let known = match names.len() {
            0 => "no name is known".to_owned(),
            _ => format!("known are {}", names.iter().copied().collect::<Vec<_>>().join(", ")),
        };
        let Ok(pid) = of.parse::<u32>() else { anyhow::bail!("no client `{of}`: {known}") };
        let family = family(pid);
        let own: BTreeSet<String> =
            family.iter().filter_map(|pid| bypass::variable(*pid, "GSHARE_NAME")).collect();
        let family: BTreeSet<i32> = family.iter().filter_map(|pid| i32::try_from(*pid).ok()).collect();
        let is_known = clients.map(|client| client.pid).any(|pid| family.contains(&pid))
            || decided.clone().filter_map(|finding| finding.pid).any(|pid| family.contains(&pid))
            || decided.clone().any(|finding| own.contains(&finding.name));
        if is_known {
            return Ok(Self::Processes(family, own));
        }
        anyhow::ensure!(
            Path::new(&format!("/proc/{pid}")).exists(),
            "no process {pid}, and no client of this number: {known}"
        );
        let why = bypass::why(pid);
        anyhow::bail!("process {pid} and its children are no clients of the daemon ({why}): {known}")
    }

    fn has(&self, finding: &Finding) -> bool {
        match self {
            Self::All => true,
            Self::Name(name) => finding.name == *name,
            Self::Processes(family, names) => match finding.pid {
                Some(pid) => family.contains(&pid),
                None => names.contains(&finding.name),
            },
        }
    }
}

/// A process and all its descendants.
fn family(pid: u32) -> BTreeSet<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The name in parentheses may hold anything; the parent is the second field after it.
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(child);
    }
    let (mut family, mut next) = (BTreeSet::new(), vec![pid]);
    while let Some(pid) = next.pop() {
        if family.insert(pid) {
            next.extend(children.get(&pid).into_iter().flatten());
        }
    }
    family
}

/// The present waits, and the last decisions.
fn present(snapshot: Snapshot, wanted: &Wanted) -> Vec<Finding> {
    let waits = snapshot.clients.into_iter().filter_map(|client| client.why);
    let is_decision = |finding: &Finding| !matches!(finding.reason, Reason::Wait(_));
    let decided = snapshot.decisions.into_iter().map(|decision| decision.finding).filter(is_decision);
    waits.chain(decided).filter(|finding| wanted.has(finding)).collect()
}

/// The findings of a journal, since the last boot of the machine in the journal.
#[derive(Debug)]
struct Recorded {
    epoch: u64,
    last: Timestamp,
    findings: Vec<Finding>,
}

impl Recorded {
    fn read(dir: &Path) -> anyhow::Result<Self> {
        let name = || dir.display().to_string();
        let files = journal::segments(dir).with_context(name)?;
        let (mut epoch, mut last, mut findings) = (None, Timestamp::ZERO, Vec::<Finding>::new());
        for file in &files {
            let name = || file.display().to_string();
            for (line, number) in journal::read(file).with_context(name)?.zip(1u64..) {
                let line = line.with_context(|| format!("{}:{number}", file.display()))?;
                if let Some(version) = line.journal {
                    anyhow::ensure!(
                        version == journal::VERSION,
                        "{}: a journal of version {version}, and this program reads version {}",
                        file.display(),
                        journal::VERSION
                    );
                    epoch = line.epoch;
                }
                anyhow::ensure!(
                    epoch.is_some(),
                    "{}: does not begin with a journal's header",
                    file.display()
                );
                let Some(now) = line.now_ns.map(Timestamp::from_nanos) else { continue };
                if now < last {
                    // The clock restarts at boot.
                    findings.clear();
                }
                last = now;
                let Some(finding) = line.why else { continue };
                let began = |open: &Finding| {
                    (open.client, open.from_ns, open.reason)
                        == (finding.client, finding.from_ns, finding.reason)
                };
                match findings.iter_mut().rfind(|open| open.ended_ns.is_none() && began(open)) {
                    Some(open) => *open = finding,
                    None => findings.push(finding),
                }
            }
        }
        let epoch =
            epoch.with_context(|| format!("{}: no journal of a daemon is there, or an empty one", name()))?;
        Ok(Self { epoch, last, findings })
    }
}

/// The findings requested by the options, the last first.
fn chosen(mut findings: Vec<Finding>, now: Timestamp, options: &Options) -> Vec<Finding> {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.from_ns));
    let end = |finding: &Finding| match finding.reason {
        Reason::Wait(_) => finding.ended_ns.unwrap_or(now),
        _ => finding.from_ns,
    };
    if let Some(since) = options.since {
        let since = now.saturating_sub(since);
        findings.retain(|finding| end(finding) >= since);
    } else if let Some(at) = options.at {
        let at = now.saturating_sub(at);
        findings.retain(|finding| finding.from_ns <= at);
        let lasted = findings.iter().filter(|finding| end(finding) >= at).count();
        match lasted {
            0 => findings.truncate(1),
            _ => findings.retain(|finding| end(finding) >= at),
        }
    }
    findings
}

fn line(finding: &Finding, now: Timestamp) -> String {
    let Finding { name, pid, reason, from_ns, ended_ns, text, .. } = finding;
    let whose = pid.map_or_else(|| name.clone(), |pid| format!("{name} (pid {pid})"));
    let ago = |at: Timestamp| now.saturating_since(at);
    let label = reason.label();
    match (reason, ended_ns) {
        (Reason::Wait(Wait::Parked), None) => {
            format!("{whose} has been parked for {} [{label}]: {text}", ago(*from_ns))
        }
        (Reason::Wait(_), None) => format!("{whose} has waited for {} [{label}]: {text}", ago(*from_ns)),
        (Reason::Wait(_), Some(ended)) => {
            let waited = ended.saturating_since(*from_ns);
            format!("{} ago {whose} waited for {waited} [{label}]: {text}", ago(*from_ns))
        }
        _ => format!("{} ago {whose} was refused or denied [{label}]: {text}", ago(*from_ns)),
    }
}
