//! The whole platform in virtual time: functions, requests, instances, devices and faults around one engine.
//!
//! # Problem
//! Engines for scaling, placement, pipelines and routing each hold alone and fail together: what one frees the other has not
//! given back yet, a report comes late, a device is lost between two orders. [`run`] drives any engine that speaks
//! [`PlatformEvent`] and [`PlatformAction`] through all of it, and a [`Book`] that knows nothing of engine and simulation
//! checks each event and order. The same run answers what a policy is worth: SLO attainment, latencies, cold starts, GPU time.
//!
//! # Model
//! At [`Depth::Requests`] devices serve by the profile; there are no kernels.
//! - a `Start` and an `Unpark` take what the order says, a `Park` the time of the memory over a link of 12 GB/s and the end of a
//!   stopped instance 5 ms to 50 ms, unless the plan says otherwise, a profile 5 s to 20 s; all with jitter;
//! - an **inference** request takes the median of the nearest measured point of the profile, at the batch size that it makes
//!   up with the requests its instance has already. On a slice that is the point of the slice's part of the SMs, on a whole
//!   device that of all of it, on a fractional device that of the share's limits, or by [`Limits`] of its requests. While the programs on a fractional device
//!   want more than it has, each has its request and a part of the rest, SLO-sensitive ones first. It is then as slow as the
//!   profile says of that part of its SMs; of what goes below the guaranteed SMs it loses time, in proportion. Where the SMs of
//!   two programs do not fit beside each other they take turns: a program that begins to work, while the other has more to do than
//!   a turn, waits for up to two tokens of 10 ms first. Caches and memory bandwidth are left out;
//! - a **pipeline** runs stage after stage, and each part one request after the other, by the profiles of its components on
//!   its slice, with hand-offs; the components behind a branch are drawn for each request;
//! - a **training** job does its work at the pace of its slowest worker. What is done is kept when it dies (a checkpoint), and
//!   a job that has completed begins from the start when it is started again.
//!
//! At [`Depth::Kernels`] fractional devices belong to nodes as [`node`](crate::node) simulates them: the daemon's engine, the
//! hook's engine in a process of each part, and kernels of 1 ms. A request is the GPU time that its profile has at the whole
//! quota, divided by its batch; how long that takes is decided by tokens. Training does all of its work on each of its parts,
//! and ends with the last of them. Slices and whole devices are their holder's alone: they serve by the profile here too.
//! GPU time that was used is what kernels took.
//!
//! # Faults
//! See [`Fault`], and [`Change`] for functions that are removed, deployed again or bounded otherwise while load comes. At the depth
//! of kernels daemons are killed and stopped besides, processes are stopped, frames come late and clocks are set back. A platform is
//! told late, and then believes what is no longer so: the book goes by what it was told, the devices by what is there.
//!
//! # The end
//! Load and faults come for the plan's length. Within its `settle` everything has to be quiet then: no request is left, no
//! order unfinished. Then all functions are removed, and within another `settle` nothing may be left.
//!
//! # Replay
//! All is drawn from the seed, in the order in which it happens. A seed that fails is run again, to tell its last events. The
//! branches and the jitter of a request are drawn from its number, so that two engines have the same requests.
//!
//! # Cost
//! `O(log n)` per event in n events to come, `O(programs that run on a device)` where the pace on it changes. Memory: one
//! entry per open request, and 8 bytes per answered one for its latency.
//!
//! # Example
//! ```
//! # use gshare_sched::platform::{DeviceSpec, FunctionSpec, PlatformAction, PlatformEvent, Rejection, Work};
//! # use gshare_core::{NodeId, Bytes, Duration, Engine, FunctionId, Timestamp};
//! use gshare_sim::arrivals::Arrivals;
//! use gshare_sim::world::{self, Function, Plan};
//! /// Serves no function, and says so.
//! struct Closed;
//! impl Engine for Closed {
//!     type Event = PlatformEvent;
//!     type Action = PlatformAction;
//!     type Error = std::fmt::Error;
//!     fn handle(&mut self, _: Timestamp, event: PlatformEvent, actions: &mut Vec<PlatformAction>) -> Result<(), Self::Error> {
//!         if let PlatformEvent::RequestArrived { request, .. } = event {
//!             actions.push(PlatformAction::Reject { request, reason: Rejection::QueueFull });
//!         }
//!         Ok(())
//!     }
//!     fn next_deadline(&self) -> Option<Timestamp> {
//!         None
//!     }
//! }
//! let spec = FunctionSpec::new(Work::Inference { profile: None }, Bytes::from_gib(1));
//! let function = Function::new("classify", spec).with_arrivals(Arrivals::poisson(10.0)?);
//! let plan = Plan::new(vec![DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16))], vec![function], Duration::from_secs(60));
//! let outcome = world::run(&plan, 1, || Ok(Closed))?;
//! assert_eq!(outcome.functions[0].requests, outcome.functions[0].rejected[&Rejection::QueueFull]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod book;
mod curve;
mod drive;
mod faults;
mod kernels;
mod outcome;
mod run_plan;
mod simulated;
mod slow_down;
pub(crate) mod stages;
mod tenants;
#[cfg(test)]
mod tests;

pub(crate) use book::Device;
pub use book::{Book, room};
pub use drive::{Failure, run, story};
pub use faults::{Fault, Faults};
pub use outcome::{ACTIONS, Ended, FunctionOutcome, Outcome, Record, Sample, Spans, Spent, name_of};
pub use run_plan::{Change, Depth, Function, Limits, Load, Plan};

#[cfg(doc)]
use gshare_sched::platform::{PlatformAction, PlatformEvent};
