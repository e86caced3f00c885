//! The environment, read once when a process first uses CUDA.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `GSHARE_DISABLE` | `1`: every call goes straight to the driver | off |
//! | `GSHARE_SOCKET` | the daemon's socket | `/run/gshare/gshare.sock` |
//! | `GSHARE_NAME` | name of this instance | program and pid, in a container with the number of its namespace |
//! | `GSHARE_RUN` | number shared by all processes of one run, in hexadecimal: they share its name and its share | a random one of its own |
//! | `GSHARE_QUOTA` | share of GPU time, `request:limit` or one share for both | no request, the whole GPU |
//! | `GSHARE_SM` | SM partition in per cent | 100 |
//! | `GSHARE_MEM` | GPU memory, such as `256MiB`; with `GSHARE_RUN` of all processes of the run together, so that none has any before a daemon has divided it | no limit |
//! | `GSHARE_CLASS` | `slo-sensitive[:PERCENT]` or `best-effort`: how it is treated beside others | its share is fixed |
//! | `GSHARE_TRACE`, `GSHARE_TRACE_RING` | what is written down for `gshare trace`: [`crate::wait_ring`] | waits, denials and the link |
//! | `GSHARE_ON_DAEMON_LOSS` | `open`: keep the share by the local clock; `closed`: launches fail | `open` |
//! | `GSHARE_DAEMON_WAIT` | how long launches and allocations wait for a daemon that is gone or says nothing: `200ms` to `600s` | `5s` |
//!
//! A file `share.env` beside the library, of lines `GSHARE_QUOTA=30%:80%`, goes before the environment: a program that clears its
//! environment (`su`, `sudo`, `cron`, `env -i`) keeps the share that its container was given.
//!
//! The daemon's own configuration goes before what is asked here. With no daemon and no limits the hook stands aside.
//! A value that cannot be read is reported on stderr, once, and left out: the hook never stops a program from starting.

use std::ffi::OsString;

use gshare_core::wait_ring::Category;
use gshare_core::wire::{DaemonWait, OnDaemonLoss};
use gshare_core::{Bytes, QuotaRange, ResourceSpec, RunId, ServiceClass, SmShare};

/// Where the daemon listens unless told otherwise.
pub(crate) const DEFAULT_SOCKET: &str = "/run/gshare/gshare.sock";

/// The file beside the library.
pub(crate) const FILE: &str = "share.env";

/// The value that a line `KEY=VALUE` of the file gives; the last one of several.
pub(crate) fn line<'a>(file: &'a str, key: &str) -> Option<&'a str> {
    let lines = file.lines().rev().filter_map(|line| line.trim().split_once('='));
    lines.filter(|(name, _)| name.trim_end() == key).map(|(_, value)| value.trim_start()).next()
}

/// What the environment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Stand aside entirely.
    pub(crate) disabled: bool,
    /// The daemon's socket.
    pub(crate) socket: OsString,
    /// Name of the instance, if given.
    pub(crate) name: Option<String>,
    /// Number of the run, if given.
    pub(crate) run: Option<RunId>,
    /// What is asked for.
    pub(crate) spec: ResourceSpec,
    /// Whether any limit was asked for, so that one must hold even without a daemon.
    pub(crate) limited: bool,
    /// How it wants to be treated beside others.
    pub(crate) class: Option<ServiceClass>,
    /// What to do when the daemon is gone.
    pub(crate) on_loss: OnDaemonLoss,
    /// How long launches and allocations wait for a daemon.
    pub(crate) daemon_wait: DaemonWait,
    /// What is written down of what happens.
    pub(crate) trace: Wanted,
    /// What could not be read, for people.
    pub(crate) complaints: Vec<String>,
}

impl Config {
    /// Reads the variables through `get`.
    pub(crate) fn read(get: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut complaints = Vec::new();
        let mut text = |key: &str| match get(key)?.into_string() {
            Ok(value) if value.is_empty() => None,
            Ok(value) => Some(value),
            Err(value) => {
                complaints.push(format!("{key}={}: not UTF-8", value.to_string_lossy()));
                None
            }
        };
        let (disable, name, run) = (text("GSHARE_DISABLE"), text("GSHARE_NAME"), text("GSHARE_RUN"));
        let (quota, sm, memory) = (text("GSHARE_QUOTA"), text("GSHARE_SM"), text("GSHARE_MEM"));
        let (class, on_loss) = (text("GSHARE_CLASS"), text("GSHARE_ON_DAEMON_LOSS"));
        let daemon_wait = text("GSHARE_DAEMON_WAIT");
        let words = text("GSHARE_TRACE").unwrap_or_default();
        let run = parsed("GSHARE_RUN", run, read::<RunId>, &mut complaints);
        let quota = parsed("GSHARE_QUOTA", quota, read::<QuotaRange>, &mut complaints);
        let sm = parsed("GSHARE_SM", sm, read::<SmShare>, &mut complaints);
        let memory = parsed("GSHARE_MEM", memory, read::<Bytes>, &mut complaints);
        let class = parsed("GSHARE_CLASS", class, read::<ServiceClass>, &mut complaints);
        let on_loss = parsed("GSHARE_ON_DAEMON_LOSS", on_loss, policy, &mut complaints).unwrap_or_default();
        let daemon_wait = parsed("GSHARE_DAEMON_WAIT", daemon_wait, read::<DaemonWait>, &mut complaints)
            .unwrap_or_default();
        let file = get("GSHARE_TRACE_RING").filter(|name| !name.is_empty());
        let (trace, unknown) = Wanted::read(&words, file);
        complaints.extend(unknown.err().map(|error| format!("GSHARE_TRACE={words}: {error}")));
        let range = quota.unwrap_or(QuotaRange::BEST_EFFORT);
        let spec = ResourceSpec::new(range, sm.unwrap_or(SmShare::WHOLE), memory).unwrap_or_else(|error| {
            complaints.push(format!("GSHARE_SM, GSHARE_MEM: {error}"));
            ResourceSpec::UNLIMITED.with_quota(range)
        });
        Self {
            disabled: disable.is_some_and(|value| value != "0"),
            socket: get("GSHARE_SOCKET").filter(|s| !s.is_empty()).unwrap_or_else(|| DEFAULT_SOCKET.into()),
            name,
            run,
            spec,
            limited: quota.is_some_and(|q| q.limit() != QuotaRange::BEST_EFFORT.limit()) || memory.is_some(),
            class,
            on_loss,
            daemon_wait,
            trace,
            complaints,
        }
    }
}

/// Words of the simulated driver, which reads the same variable.
const OF_THE_SIMULATOR: [&str; 3] = ["calls", "lookups", "tables"];

/// What is to be traced: `GSHARE_TRACE` and `GSHARE_TRACE_RING`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Bits of categories; 0 for no ring.
    pub(crate) traced: u64,
    /// Where the ring is to stay.
    pub(crate) file: Option<OsString>,
}

impl Wanted {
    /// Reads `GSHARE_TRACE`; a word that is not known is an error, and left out.
    pub(crate) fn read(words: &str, file: Option<OsString>) -> (Self, Result<(), String>) {
        let (mut traced, mut own, mut unknown) = (0, false, Vec::new());
        for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match Category::ALL.iter().find(|(name, _)| *name == word) {
                Some((_, category)) => (traced, own) = (traced | category.bit(), true),
                None if word == "none" => own = true,
                None if OF_THE_SIMULATOR.contains(&word) => {}
                None => unknown.push(word),
            }
        }
        if !own {
            traced = Category::Gate.bit() | Category::Link.bit();
        }
        let complaint = format!(
            "{} unknown; known are gate, memory, link, none, and for the simulated driver {}",
            unknown.join(", "),
            OF_THE_SIMULATOR.join(", ")
        );
        (Self { traced, file }, if unknown.is_empty() { Ok(()) } else { Err(complaint) })
    }
}

fn parsed<T>(
    key: &str,
    value: Option<String>,
    parse: impl Fn(&str) -> Result<T, String>,
    complaints: &mut Vec<String>,
) -> Option<T> {
    let value = value?;
    match parse(&value) {
        Ok(parsed) => Some(parsed),
        Err(error) => {
            complaints.push(format!("{key}={value}: {error}"));
            None
        }
    }
}

fn read<T: core::str::FromStr<Err: core::fmt::Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn policy(text: &str) -> Result<OnDaemonLoss, String> {
    match text {
        "open" => Ok(OnDaemonLoss::Open),
        "closed" => Ok(OnDaemonLoss::Closed),
        _ => Err("expected open or closed".into()),
    }
}
