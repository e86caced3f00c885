//! The whole platform in virtual time: functions, requests, instances, devices and faults around one engine.
//!
//! # Problem
//! Engines for scaling, placement, pipelines and routing may each work alone and fail together: one engine counts on resources that
//! another has not given back yet, a report comes late, a device is lost between two orders. [`run`] drives any engine of
//! [`PlatformEvent`] and [`PlatformAction`] through all of it, an independent [`Book`] checks each event and order, and the outcome
//! measures a policy's worth.
//!
//! # Model
//! At [`Depth::Requests`] devices serve by the profile, without kernels.
//! - A `Start` and an `Unpark` take the time in the order, a profile 5 s to 20 s, and, unless the plan says otherwise, a `Park` the time
//!   of the memory over a link of 12 GB/s and the end of a stopped instance 5 ms to 50 ms; all with jitter.
//! - An **inference** request takes the median of the profile's nearest measured point, for a batch of itself and its instance's present
//!   requests. The point is for the slice's part of the SMs, for the whole device, or on a fractional device for the share's limits or,
//!   with [`Limits`], its requests. While the programs of a fractional device want more than the device, each has its request and a part of
//!   the rest, SLO-sensitive programs first. Its pace follows the profile at its part of the SMs; a loss below the guaranteed SMs costs
//!   time in proportion. Programs without room side by side take turns: a new program, beside work for more than a turn, first waits for up
//!   to two tokens of 10 ms. Caches and memory bandwidth are left out.
//! - A **pipeline** runs stage after stage, and each part one request after the other, by the profiles of its components on its slice,
//!   with hand-offs; each request draws the components behind a branch.
//! - A **training** job works at the pace of its slowest worker. A dead job keeps its completed work (a checkpoint), and a completed job
//!   starts again from the beginning.
//!
//! At [`Depth::Kernels`] fractional devices belong to nodes of [`node`](crate::node): the daemon's engine, the hook's engine in a process
//! of each part, and kernels of 1 ms. A request needs the GPU time of its profile at the whole quota, divided by its batch, and tokens
//! decide how long it takes. Training does all its work on each part, and ends with the last. Slices and whole devices belong to one
//! holder, and serve by the profile here too. Used GPU time is the time of the kernels.
//!
//! # Faults and the end
//! See [`Fault`], and [`Change`] for functions removed, deployed again or with other bounds under load. With kernels, daemons are also
//! killed and stopped, processes are stopped, frames come late and clocks are set back. A platform hears late and then holds outdated
//! beliefs: the book follows the platform's events, the devices follow the truth.
//! Load and faults come for the plan's length. Within its `settle` all requests and orders must end. Then all functions are removed, and
//! nothing may be left within another `settle`.
//!
//! # Replay and cost
//! The seed gives everything, in the order of events, and a failed seed runs again to tell its last events. A request's number gives its
//! branches and jitter, so that two engines have the same requests. An event costs `O(log n)` in n events to come, and a change of pace
//! `O(programs at work on the device)`. Memory: one entry per open request, and 8 bytes per answered request for its latency.
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
mod deadlines;
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

#[cfg(test)]
pub(crate) use book::Device;
pub use book::{Book, room};
pub use drive::{run, story};
pub use faults::{Fault, Faults};
pub use outcome::{ACTIONS, Ended, FunctionOutcome, Outcome, Record, Sample, Spans, Spent, name_of};
pub use run_plan::{Change, Depth, Function, Limits, Load, Plan};

#[cfg(doc)]
use gshare_sched::platform::{PlatformAction, PlatformEvent};
