//! The decision, made once per process, whether to meter it.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::Duration as StdDuration;

use gshare_cuda_abi::SYMBOLS;
use gshare_cuda_abi::types::CUdevice;

use crate::device::book::Book;
use crate::device::context::Contexts;
use crate::device::devices::{Devices, current_ordinal, exists, only_device_with_context, visible_devices};
use crate::launch::control::{CONTROL, Metering, State};
use crate::launch::failure::{Why, cannot_meter};
use crate::launch::threads::{self, Threads};
use crate::process::runtime::{Metered, PROCESS, Runtime};
use crate::process::{end, helper, helper_thread, parking};
use crate::sys::bell::Bell;
use crate::sys::config::Config;
use crate::sys::leak::leak;
use crate::sys::lock::Lock;
use crate::sys::stderr::tell;
use crate::sys::{clock, driver, setting_sources};

/// Longest wait for another thread's decision, in ms, which is more than a decision takes.
const DECIDES_FOR: u32 = 10_000;

/// The driver functions without which no limit can be enforced.
const NEEDED: [usize; 10] = {
    use gshare_cuda_abi::index as of;
    [
        of::cuCtxGetCurrent,
        of::cuCtxGetDevice,
        of::cuCtxSetCurrent,
        of::cuDeviceGetCount,
        of::cuDeviceGetUuid,
        of::cuDeviceTotalMem_v2,
        of::cuEventCreate,
        of::cuEventElapsedTime,
        of::cuEventQuery,
        of::cuEventRecord,
    ]
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Is(State),
    /// The driver has no such context or device, so it is too early to decide, and the driver fails the call by itself.
    TooEarly,
}

/// Decides whether this process is metered, unless that is decided already. Calls that need no context name their `device`.
#[cold]
pub(crate) fn arm(device: Option<CUdevice>) -> Metered<&'static Runtime> {
    // One thread decides. Its mark is on the page that a fork empties, so a child starts over.
    for _ in 0..DECIDES_FOR {
        if CONTROL.state() != State::Armed as u32 {
            break;
        }
        if PROCESS.begin_arming() {
            let decided = (CONTROL.state() == State::Armed as u32).then(|| decide_or_fail(device));
            PROCESS.end_arming();
            match decided {
                Some(Ok(Decision::TooEarly)) => return Metered::No,
                Some(Err(())) => return Metered::Refused,
                Some(Ok(Decision::Is(_))) | None => break,
            }
        }
        std::thread::sleep(StdDuration::from_millis(1));
    }
    match CONTROL.state() {
        state if state == State::Active as u32 => PROCESS.runtime().map_or(Metered::Refused, Metered::Yes),
        state if state == State::Off as u32 => Metered::No,
        state
            if state == State::Armed as u32
                && cannot_meter(setting_sources::read().on_failure, Why::Undecided) =>
        {
            Metered::No
        }
        _ => Metered::Refused,
    }
}

/// Returns `Err` if the call must fail.
fn decide_or_fail(device: Option<CUdevice>) -> Result<Decision, ()> {
    let decided = std::panic::catch_unwind(|| decide(device)).unwrap_or(Err(Why::Panic));
    match decided {
        Ok(decision) => {
            if let Decision::Is(state) = decision {
                CONTROL.set_state(state);
            }
            Ok(decision)
        }
        Err(why) if cannot_meter(setting_sources::read().on_failure, why) => Ok(Decision::Is(State::Off)),
        Err(_) => Err(()),
    }
}

fn decide(device: Option<CUdevice>) -> Result<Decision, Why> {
    let config = setting_sources::read();
    if config.disabled {
        return Ok(Decision::Is(State::Off));
    }
    // Asked before anything is made, since a runtime is permanent and comes with a thread and with a session under the process's name.
    let asked = setting_sources::ask_for_a_limit(&config);
    if driver::loaded_driver().is_some() && asked {
        let missing = NEEDED.into_iter().find(|&index| driver::pointer(index).is_none());
        if let Some(index) = missing {
            return Err(Why::Driver(SYMBOLS[index].name));
        }
    }
    let Some(ordinal) = current_ordinal().or(device) else { return Ok(Decision::TooEarly) };
    if !asked {
        config.complaints.iter().for_each(|complaint| tell(&format!("{complaint} (left out)")));
        return Ok(Decision::Is(State::Off));
    }
    if !exists(ordinal) {
        return Ok(Decision::TooEarly);
    }
    if setting_sources::root_hides_daemon(&config) {
        return Err(Why::Root);
    }
    if !threads::make_key() {
        return Err(Why::Key);
    }
    let daemon_expected = setting_sources::names_a_daemon(&config);
    let runtime = match PROCESS.runtime() {
        Some(runtime) => runtime,
        None => {
            config.complaints.iter().for_each(|complaint| tell(&format!("{complaint} (left out)")));
            let runtime = leak(new_runtime(config)).ok_or(Why::Memory)?;
            PROCESS.install(runtime);
            runtime
        }
    };
    helper::look_up();
    helper_thread::start(runtime)?;
    let device = runtime.attach(ordinal)?;
    let only = only_device_with_context(ordinal, &PROCESS.own_contexts);
    if only {
        runtime.metering.devices.set_sole(Some(device));
    }
    CONTROL.install(&runtime.metering);
    end::report_at_exit();
    // A daemon named in the settings may come later, and a daemon that serves the process may set a limit at any time.
    let alone = !daemon_expected && !runtime.served.load(Ordering::Relaxed);
    let idle = alone && !runtime.config.limited && !runtime.config.spec.is_observed();
    if idle && only && visible_devices() == 1 {
        return Ok(Decision::Is(State::Off));
    }
    if runtime.config.parks && runtime.parking.get().is_none() {
        parking::begin(runtime, ordinal);
    }
    Ok(Decision::Is(State::Active))
}

fn new_runtime(config: Config) -> Runtime {
    Runtime {
        run: config.run.unwrap_or_else(setting_sources::own_run),
        metering: Metering {
            contexts: Contexts::default(),
            devices: Devices::new(),
            threads: Threads::default(),
            bell: Bell::new(),
            beat: AtomicU64::new(clock::now_ns()),
            on_failure: config.on_failure,
        },
        config,
        book: Book::default(),
        parking: OnceLock::new(),
        attaching: Lock::default(),
        requests: Lock::default(),
        helped: false.into(),
        served: false.into(),
    }
}
