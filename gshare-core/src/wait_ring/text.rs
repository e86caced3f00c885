//! Records as sentences.

use core::fmt;

use super::{Denial, End, Event, FromDaemon, Record, Why};
use crate::units::Quota;
use crate::wire::RefusalCode;

/// A time in the unit that fits, with three digits.
struct Time(u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..1_000 => return write!(f, "{} ns", self.0),
            1_000..1_000_000 => (1_000, "us"),
            1_000_000..1_000_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        match self.0 / unit {
            whole @ 100.. => write!(f, "{whole} {name}"),
            whole => write!(f, "{whole}.{} {name}", self.0 % unit * 10 / unit),
        }
    }
}

struct Share(Quota);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let points = self.0.get();
        match points % 100 {
            0 => write!(f, "{} %", points / 100),
            rest => write!(f, "{}.{rest:02} %", points / 100),
        }
    }
}

struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX { write!(f, "no limit") } else { crate::units::Bytes(self.0).fmt(f) }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Credit {} => write!(f, "for the helper thread to let in what the token leaves"),
            Self::Token { asked_ns } => {
                write!(f, "for a token: the daemon was asked {} ago, others have the device", Time(asked_ns))
            }
            Self::Throttled { limit, left_ns } => {
                write!(f, "for a token: limit {} used up, next token in {}", Share(limit), Time(left_ns))
            }
            Self::InFlight { bound_ns } => {
                write!(f, "for the device: {} of work may be queued, and is", Time(bound_ns))
            }
            Self::Draining { queued_ns } => write!(
                f,
                "for a token: the last one is used up, and is given back when the queued work ({}) is done",
                Time(queued_ns)
            ),
            Self::Attaching {} => write!(f, "for the daemon to say what becomes of this device"),
            Self::Closed { left_ns } => {
                write!(
                    f,
                    "for a daemon: none answers and the policy is closed, launches fail in {}",
                    Time(left_ns)
                )
            }
            Self::LocalWindow { limit, left_ns } => write!(
                f,
                "for its own clock, without a daemon: limit {} used up, next window in {}",
                Share(limit),
                Time(left_ns)
            ),
            Self::NoDaemon { retry_ns } => {
                write!(f, "for a daemon: none answers, next attempt in {}", Time(retry_ns))
            }
            Self::Refused { left_ns } => {
                write!(f, "for the daemon, which refuses this process: launches fail in {}", Time(left_ns))
            }
            Self::Measuring {} => write!(f, "for the first measurement of the same kernel"),
        }
    }
}

fn refusal(code: RefusalCode) -> &'static str {
    match code {
        RefusalCode::DuplicateName => "another run uses its name",
        RefusalCode::NotAllowed => "its user may not use this daemon",
        RefusalCode::Full => "the daemon serves as many clients as it may",
        RefusalCode::BadSpec => "the device cannot meet its request",
        RefusalCode::UnknownDevice => "the daemon does not manage this device",
        RefusalCode::Protocol => "a message did not fit the state of the connection",
    }
}

/// The event as a sentence whose subject is the thread.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Waiting { why, waited_ns } => {
                write!(f, "has waited {} and waits {why}", Time(waited_ns))
            }
            Self::Waited { why, waited_ns, end, .. } => {
                write!(f, "waited {} {why}", Time(waited_ns))?;
                match end {
                    End::Launched => Ok(()),
                    End::Failed => write!(f, "; the launch failed"),
                    End::NotMetered => write!(f, "; launches are not metered any more"),
                }
            }
            Self::Charged { bytes, used, limit } => {
                write!(f, "took {} of memory: {} used of {}", Size(bytes), Size(used), Size(limit))
            }
            Self::Released { bytes, used, limit } => {
                write!(f, "gave {} of memory back: {} used of {}", Size(bytes), Size(used), Size(limit))
            }
            Self::Denied { bytes, used, limit, denial } => {
                write!(f, "was denied {} of memory: ", Size(bytes))?;
                match denial {
                    Denial::OverLimit => write!(
                        f,
                        "this process uses {} of {}, and less is left for it",
                        Size(used),
                        Size(limit)
                    ),
                    Denial::NoAnswer => write!(f, "the daemon did not answer"),
                }
            }
            Self::DeviceAsked { waited_ns, answer } => {
                write!(f, "waited {} for the daemon's word about the device: ", Time(waited_ns))?;
                f.write_str(match answer {
                    FromDaemon::Taken => "the daemon shares it out",
                    FromDaemon::Alone => "no daemon does, the process keeps to its limits by itself",
                    FromDaemon::NoAnswer => "no answer so far",
                })
            }
            Self::Connected {} => write!(f, "connected to the daemon and said who the process is"),
            Self::NotConnected { errno, retry_ns } => {
                write!(f, "found no daemon (error {errno}), next attempt in {}", Time(retry_ns))
            }
            Self::Welcome { epoch } => write!(f, "was let in by the daemon (run {epoch:#x} of it)"),
            Self::Lost { welcomed: true, retry_ns } => {
                write!(f, "lost the daemon, next attempt in {}", Time(retry_ns))
            }
            Self::Lost { welcomed: false, retry_ns } => {
                write!(f, "was not let in by the daemon, next attempt in {}", Time(retry_ns))
            }
            Self::Refused { code } => write!(f, "was refused by the daemon: {}", refusal(code)),
            Self::Attached { request, limit, memory, window_ns } => write!(
                f,
                "attached the device: {} of its time guaranteed, at most {} in {}; memory: {}",
                Share(request),
                Share(limit),
                Time(window_ns),
                Size(memory)
            ),
            Self::ShareChanged { request, limit, memory } => write!(
                f,
                "has another share: {} of the device's time guaranteed, at most {}; memory: {}",
                Share(request),
                Share(limit),
                Size(memory)
            ),
            Self::TokenRequested {} => write!(f, "asked for a token"),
            Self::Granted { lease, budget_ns, .. } => {
                write!(f, "got token {lease}: {} of GPU time in all", Time(budget_ns))
            }
            Self::Returned { lease, used_ns, again } => {
                let again = if again { " and asked for another" } else { "" };
                write!(f, "gave token {lease} back after {} of GPU time{again}", Time(used_ns))
            }
            Self::Revoked { lease } => write!(f, "was told that token {lease} is void"),
            Self::Throttled { .. } => write!(f, "was told that its limit is reached"),
            Self::StoodAside {} => write!(f, "stopped metering this process"),
        }
    }
}

impl Record {
    /// The sentence, with the time since `begun_ns`.
    pub fn sentence(&self, begun_ns: u64) -> String {
        let since = self.time_ns.saturating_sub(begun_ns);
        let device = self.device.map_or_else(String::new, |device| format!("  device {device}"));
        let (seconds, millis) = (since / 1_000_000_000, since / 1_000_000 % 1_000);
        format!("{seconds:>5}.{millis:03} s  thread {}{device}  {}", self.thread, self.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_a_sentence() {
        let limit = Quota::new(3000).unwrap();
        let why = Why::Throttled { limit, left_ns: 51_000_000 };
        let event = Event::Waited { why, waited_ns: 43_200_000, cost_ns: 1, end: End::Launched };
        let record = Record { number: 0, time_ns: 13_345_000_000, thread: 4711, device: Some(0), event };
        assert_eq!(
            record.sentence(1_000_000_000),
            "   12.345 s  thread 4711  device 0  waited 43.2 ms for a token: limit 30 % used up, next token in 51.0 ms"
        );
    }

    #[test]
    fn times_and_shares_have_few_digits() {
        let times = [999, 1_000, 43_210_000, 999_900_000, 61_000_000_000].map(|ns| Time(ns).to_string());
        assert_eq!(times, ["999 ns", "1.0 us", "43.2 ms", "999 ms", "61.0 s"]);
        let shares = [10_000, 3_333].map(|points| Share(Quota::new(points).unwrap()).to_string());
        assert_eq!(shares, ["100 %", "33.33 %"]);
    }
}
