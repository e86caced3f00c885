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
//! | `GSHARE_MEM` | GPU memory: a limit such as `256MiB`, or `guaranteed:most`; with `GSHARE_RUN` of all processes of the run together, so none has any before a daemon has divided it | no limit |
//! | `GSHARE_OBSERVE` | `1`: no limit and no wait, the use is measured and reported; not beside a quota, SMs or memory | off |
//! | `GSHARE_PARK` | `1`: device memory can go to host memory and come back; for a process that sees one device | off |
//! | `GSHARE_CLASS` | `slo-sensitive[:PERCENT]` or `best-effort`: how it is treated beside others | its share is fixed |
//! | `GSHARE_ON_DAEMON_LOSS` | `open`: keep the share by the local clock; `closed`: launches fail | `open` |
//! | `GSHARE_DAEMON_WAIT` | how long launches and allocations wait for a daemon that is gone or says nothing: `200ms` to `600s` | `5s` |
//! | `GSHARE_ON_FAILURE` | when a limit cannot be kept (no thread to be had, no memory, a driver that lacks functions): `closed`: launches and allocations fail; `run`: the program runs without limits | `closed` |
//!
//! A file `share.env` beside the library, of lines such as `GSHARE_QUOTA=30%:80%`, takes precedence over the environment. So a
//! program that clears its environment (`su`, `sudo`, `cron`, `env -i`) keeps the share of its container.
//!
//! The daemon's own configuration takes precedence over the variables. Without a daemon and without limits the hook stands aside. A
//! value that cannot be read is reported once on stderr and left out, because the hook never stops a program from starting.

use std::ffi::OsString;

use gshare_core::wire::{DaemonWait, OnDaemonLoss};
use gshare_core::{MemoryRange, QuotaRange, ResourceSpec, RunId, ServiceClass, SmShare};

/// The daemon's socket, unless the settings name another.
pub(crate) const DEFAULT_SOCKET: &str = "/run/gshare/gshare.sock";

/// The value in a line `KEY=VALUE` of the file, where the last of several lines counts.
pub(crate) fn line<'a>(file: &'a str, key: &str) -> Option<&'a str> {
    let lines = file.lines().rev().filter_map(|line| line.trim().split_once('='));
    lines.filter(|(name, _)| name.trim_end() == key).map(|(_, value)| value.trim_start()).next()
}

/// The reaction when a limit was asked for and cannot be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// Launches and allocations fail.
    #[default]
    Closed,
    /// The program runs without limits.
    Run,
}

/// The settings of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Whether the hook stands aside entirely and passes every call to the driver.
    pub(crate) disabled: bool,
    /// The daemon's socket.
    pub(crate) socket: OsString,
    /// Name of the instance, if given.
    pub(crate) name: Option<String>,
    /// Number of the run, if given.
    pub(crate) run: Option<RunId>,
    /// The resources asked for.
    pub(crate) spec: ResourceSpec,
    /// Whether the process's device memory shall be able to go to host memory.
    pub(crate) parks: bool,
    /// Whether any limit was asked for, which then holds even without a daemon.
    pub(crate) limited: bool,
    /// The requested treatment beside others.
    pub(crate) class: Option<ServiceClass>,
    /// The reaction to the loss of the daemon.
    pub(crate) on_loss: OnDaemonLoss,
    /// Longest wait of launches and allocations for a daemon.
    pub(crate) daemon_wait: DaemonWait,
    /// The reaction when the process cannot be metered.
    pub(crate) on_failure: OnFailure,
    /// Messages for people about settings that could not be read.
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
        let observe = text("GSHARE_OBSERVE").is_some_and(|value| value != "0");
        let parks = text("GSHARE_PARK").is_some_and(|value| value != "0");
        let (class, on_loss) = (text("GSHARE_CLASS"), text("GSHARE_ON_DAEMON_LOSS"));
        let daemon_wait = text("GSHARE_DAEMON_WAIT");
        let on_failure = text("GSHARE_ON_FAILURE");
        let run = parsed("GSHARE_RUN", run, read::<RunId>, &mut complaints);
        let quota = parsed("GSHARE_QUOTA", quota, read::<QuotaRange>, &mut complaints);
        let sm = parsed("GSHARE_SM", sm, read::<SmShare>, &mut complaints);
        let memory = parsed("GSHARE_MEM", memory, read::<MemoryRange>, &mut complaints);
        let class = parsed("GSHARE_CLASS", class, read::<ServiceClass>, &mut complaints);
        let on_loss =
            parsed("GSHARE_ON_DAEMON_LOSS", on_loss, read_on_loss, &mut complaints).unwrap_or_default();
        let daemon_wait = parsed("GSHARE_DAEMON_WAIT", daemon_wait, read::<DaemonWait>, &mut complaints)
            .unwrap_or_default();
        let on_failure =
            parsed("GSHARE_ON_FAILURE", on_failure, read_on_failure, &mut complaints).unwrap_or_default();
        let range = quota.unwrap_or(QuotaRange::BEST_EFFORT);
        let spec = ResourceSpec::new(range, sm.unwrap_or(SmShare::WHOLE), None).unwrap_or_else(|error| {
            complaints.push(format!("GSHARE_SM: {error}"));
            ResourceSpec::UNLIMITED.with_quota(range)
        });
        let spec = memory.map_or(spec, |memory| spec.with_memory(memory));
        let limited = quota.is_some_and(|q| q.limit() != QuotaRange::BEST_EFFORT.limit())
            || memory.is_some_and(|memory| memory.most().is_some());
        let asks = limited || quota.is_some() || sm.is_some() || memory.is_some();
        if observe && asks {
            complaints.push("GSHARE_OBSERVE=1: a share is asked for as well".into());
        }
        // A program that is only observed has nothing to lose by a failure to measure it.
        let (spec, on_failure) =
            if observe && !asks { (ResourceSpec::OBSERVED, OnFailure::Run) } else { (spec, on_failure) };
        Self {
            disabled: disable.is_some_and(|value| value != "0"),
            socket: socket(get("GSHARE_SOCKET")),
            name,
            run,
            spec,
            parks,
            limited,
            class,
            on_loss,
            daemon_wait,
            on_failure,
            complaints,
        }
    }
}

/// The daemon's socket, by the value of its variable.
pub(crate) fn socket(named: Option<OsString>) -> OsString {
    named.filter(|path| !path.is_empty()).unwrap_or_else(|| DEFAULT_SOCKET.into())
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

fn read_on_loss(text: &str) -> Result<OnDaemonLoss, String> {
    match text {
        "open" => Ok(OnDaemonLoss::Open),
        "closed" => Ok(OnDaemonLoss::Closed),
        _ => Err("expected open or closed".into()),
    }
}

fn read_on_failure(text: &str) -> Result<OnFailure, String> {
    match text {
        "closed" => Ok(OnFailure::Closed),
        "run" => Ok(OnFailure::Run),
        _ => Err("expected closed or run".into()),
    }
}
