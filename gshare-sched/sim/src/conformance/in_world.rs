//! A policy under the platform's pool in a [`world`](crate::world), whose book checks each order.

use super::story::Log;
use crate::story::Story;
use crate::world::{self, FunctionOutcome, Outcome, Plan};
use core::fmt::Display;
use gshare_core::Engine;
use gshare_sched::platform::{PlatformAction, PlatformEvent, Rejection};
use std::panic::{AssertUnwindSafe, catch_unwind};

const OBEYED: &str = "every order can be carried out, no device is oversold, and each request ends once";
const SERVED: &str = "without faults no request waits for as long as it may";

/// Runs a plan twice on the platforms of `platform`, whose policies are watched. Returns the outcome.
pub(super) fn repeated<E>(
    seed: u64,
    plan: Result<Plan, String>,
    platform: impl Fn(&Log) -> Result<E, String>,
) -> Result<Outcome, Story>
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    let run = || {
        let log = Log::default();
        // A pool panics if it and its policy disagree about an instance.
        let ran = catch_unwind(AssertUnwindSafe(|| {
            world::run(plan.as_ref().map_err(Clone::clone)?, seed, || platform(&log))
                .map_err(|failure| failure.wrong)
        }));
        let wrong = |wrong| log.story(seed, (OBEYED, wrong));
        let outcome = ran.map_err(|panic| wrong(said(&*panic)))?.map_err(wrong)?;
        log.is_unbroken().map_err(|broken| log.story(seed, broken))?;
        Ok((log, outcome))
    };
    let ((log, outcome), (again, _)) = (run()?, run()?);
    log.is_repeated_by(&again).map_err(|broken| log.story(seed, broken))?;
    let faultless = plan.is_ok_and(|plan| plan.faults.every.is_empty());
    let starves = |of: &&FunctionOutcome| of.rejected.contains_key(&Rejection::WaitedTooLong);
    if let Some(of) = outcome.functions.iter().find(starves).filter(|_| faultless) {
        return Err(log.story(seed, (SERVED, format!("{}: {:?}", of.name, of.rejected))));
    }
    Ok(outcome)
}

pub(super) fn text(error: impl Display) -> String {
    error.to_string()
}

/// The message of a panic.
fn said(panic: &(dyn core::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}
