//! The response when a limit was asked for and cannot be kept.
//!
//! No launch and no allocation goes through then, unless the operator has set `GSHARE_ON_FAILURE=run`. Each cause is told once.
//! Most causes may pass (a container at its limit of threads, a shortage of memory), so the next launch or allocation tries again.

use core::fmt;

use crate::device::Device;
use crate::launch::control::{CONTROL, State};
use crate::sys::config::OnFailure;
use crate::sys::stderr::tell;

/// The reason why this process cannot be metered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// No thread can be made.
    Thread(i32),
    /// The program has taken all keys for thread data.
    Key,
    /// No memory can be had.
    Memory,
    /// The driver lacks this function.
    Driver(&'static str),
    /// The driver does not name this device, or the device's number is too high.
    Device(i32),
    /// Another thread has been deciding for seconds.
    Undecided,
    /// A decision ended in a panic.
    Panic,
    /// The helper thread no longer runs or has ended in a panic, so its account is lost.
    Helper,
    /// The program's look-ups go past this library.
    Bypassed,
    /// The program has changed its root, in which the daemon's socket is not there.
    Root,
}

impl Why {
    fn bit(self) -> u32 {
        1 << match self {
            Self::Thread(_) => 0,
            Self::Key => 1,
            Self::Memory => 2,
            Self::Driver(_) => 3,
            Self::Device(_) => 4,
            Self::Undecided => 5,
            Self::Panic => 6,
            Self::Helper => 7,
            Self::Bypassed => 8,
            Self::Root => 9,
        }
    }

    /// Whether the reason stays for the life of the process.
    fn lasts(self) -> bool {
        matches!(self, Self::Helper | Self::Bypassed)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(errno) => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(
                    f,
                    "no thread is to be had ({error}): raise RLIMIT_NPROC, RLIMIT_AS or the container's pids limit"
                )
            }
            Self::Key => f.write_str("no pthread key is left: the program has taken all of them"),
            Self::Memory => {
                f.write_str("no memory is to be had: raise RLIMIT_AS or the container's memory limit")
            }
            Self::Driver(name) => write!(f, "the driver lacks {name}"),
            Self::Device(ordinal) => write!(f, "the driver does not name device {ordinal}"),
            Self::Undecided => f.write_str("another thread has been asking the driver for seconds"),
            Self::Panic => f.write_str("a decision ended in a panic, which is a fault of gshare"),
            Self::Helper => f.write_str("the helper thread is gone: restart the program"),
            Self::Bypassed => f.write_str("another library's dlsym leads past the hook"),
            Self::Root => f.write_str(
                "the program changed its root before its first launch, and the daemon's socket is not there: mount the socket's folder",
            ),
        }
    }
}

/// Tells once of a failure to meter the process, and obeys the policy. Returns whether launches and allocations go through.
#[cold]
pub(crate) fn cannot_meter(policy: OnFailure, why: Why) -> bool {
    let runs = policy == OnFailure::Run;
    if CONTROL.tells(why.bit()) {
        tell(&match policy {
            OnFailure::Run => format!("runs without limits, as GSHARE_ON_FAILURE=run says: {why}"),
            OnFailure::Closed => {
                format!(
                    "no launch and no allocation goes through, since no limit can be kept: {why} (GSHARE_ON_FAILURE=run lets it run)"
                )
            }
        });
    }
    if runs || why.lasts() {
        CONTROL.set_state(if runs { State::Off } else { State::Shut });
        CONTROL.metering().into_iter().flat_map(|metering| metering.devices.iter()).for_each(Device::wake);
    }
    runs
}
