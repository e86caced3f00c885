//! Depth: kernels. On fractional devices the daemon's [`Node`](gshare_sched::node::Node) of each node and a
//! [`Meter`](gshare_meter::Meter) in each process decide, kernel by kernel, how long work takes.

use super::run_plan::Plan;
use crate::node::{self, Done, GpuPlan, NodePlan, Setup, Shape};
use crate::rng::Rng;
use gshare_core::share::GpuShare;
use gshare_core::{Duration, ServiceClass, Timestamp};
use gshare_sched::platform::Regime;

/// The most devices of a daemon's token scheduler by default.
const MOST_DEVICES: usize = 64;

/// The nodes of a plan, before they run.
#[derive(Debug)]
pub(super) struct Nodes {
    plans: Vec<NodePlan>,
    /// The place of each device of the plan: its node, and its number there; none for a device without fractions.
    places: Vec<Option<(usize, usize)>>,
    setup: Setup,
}

impl Nodes {
    /// Nodes in the daemon's default configuration, with node faults if the plan has any faults.
    ///
    /// # Errors
    /// A node has more than [`MOST_DEVICES`] fractional devices.
    pub(super) fn new(plan: &Plan, seed: u64) -> Result<Self, String> {
        let mut rng = Rng::new(seed ^ 0x006b_6572_6e65_6c73);
        let (length, faulty) = (plan.length, !plan.faults.every.is_empty());
        let (mut ids, mut plans, mut places) = (Vec::new(), Vec::<NodePlan>::new(), Vec::new());
        for device in &plan.devices {
            if device.effective_regime() != Regime::Fractional {
                places.push(None);
                continue;
            }
            let node = ids.iter().position(|id| *id == device.node).unwrap_or_else(|| {
                ids.push(device.node);
                plans.push(NodePlan::host(rng.next_u64(), length, faulty));
                ids.len() - 1
            });
            let place = plans[node].gpus.len();
            if place == MOST_DEVICES {
                return Err(format!(
                    "{}: more than {MOST_DEVICES} fractional devices, at the depth of kernels",
                    device.node
                ));
            }
            places.push(Some((node, place)));
            plans[node].gpus.push(GpuPlan {
                shape: Shape::Any,
                memory: device.memory,
                instances: Vec::new(),
            });
        }
        let mut setup = Setup::daemon();
        if let Some(vertical) = &plan.vertical {
            setup.vertical = vertical.clone();
        }
        Ok(Self { plans, places, setup })
    }
}

/// A process of an instance on a fractional device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Worker {
    node: usize,
    number: usize,
    /// The SMs of its kernels, in basis points.
    sm: u64,
}

/// The nodes while they run.
#[derive(Debug)]
pub(super) struct Running<'a> {
    nodes: Vec<node::NodeWorld<'a>>,
    places: &'a [Option<(usize, usize)>],
    done: Vec<Done>,
}

impl<'a> Running<'a> {
    pub(super) fn new(nodes: &'a Nodes) -> Self {
        let worlds = nodes.plans.iter().map(|plan| node::NodeWorld::new(plan, &nodes.setup, false)).collect();
        Self { nodes: worlds, places: &nodes.places, done: Vec::new() }
    }

    /// The time of the next event on any node.
    pub(super) fn next_at(&self) -> Option<Timestamp> {
        self.nodes.iter().filter_map(node::NodeWorld::next_at).min()
    }

    /// Lets time pass on all nodes, and returns the completed tasks.
    ///
    /// # Errors
    /// The first violation in a node's book or token scheduler.
    pub(super) fn advance(&mut self, now: Timestamp) -> Result<Vec<u64>, String> {
        for (number, node) in self.nodes.iter_mut().enumerate() {
            node.advance(now).map_err(|what| format!("node {number}: {what}"))?;
            node.take_done(&mut self.done);
        }
        Ok(self.done.drain(..).map(|done| done.task).collect())
    }

    /// Starts a process with a share of a device; none if the device's kernels are not simulated.
    pub(super) fn start(
        &mut self,
        now: Timestamp,
        device: usize,
        share: &GpuShare,
        class: Option<ServiceClass>,
    ) -> Option<Worker> {
        let (node, gpu) = self.places.get(device).copied().flatten()?;
        let spec = share.spec().ok()?;
        let number = self.nodes[node].start_worker(now, gpu, spec, class);
        Some(Worker { node, number, sm: share.sm().get().into() })
    }

    pub(super) fn give(&mut self, now: Timestamp, worker: Worker, task: u64, work: Duration) {
        self.nodes[worker.node].give(now, worker.number, task, work);
    }

    pub(super) fn left(&self, worker: Worker, task: u64) -> Duration {
        self.nodes[worker.node].left(worker.number, task)
    }

    /// Ends a process, and returns its used part of a device: time in ns x SMs, of 10^8.
    pub(super) fn end(&mut self, now: Timestamp, worker: Worker, killed: bool) -> u128 {
        let node = &mut self.nodes[worker.node];
        node.end_worker(now, worker.number, killed);
        self.used(worker)
    }

    pub(super) fn used(&self, worker: Worker) -> u128 {
        let busy = self.nodes[worker.node].got(worker.number).busy;
        u128::from(busy.as_nanos()) * u128::from(10_000 * worker.sm)
    }

    /// The number of a process's ended kernels.
    pub(super) fn kernels_of(&self, worker: Worker) -> u64 {
        self.nodes[worker.node].got(worker.number).kernels
    }

    /// The number of ended kernels on all nodes.
    pub(super) fn kernels(&self) -> u64 {
        self.nodes.iter().map(node::NodeWorld::kernels).sum()
    }
}
