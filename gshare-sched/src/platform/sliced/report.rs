//! Reports of hosts about instances, and the end of an instance.

use super::super::START_AGAIN;
use super::{Function, Instance, Memory, SlicedPool};
use crate::pipeline::{AssignedSlice, InstanceEvent, RouteEvent};
use crate::platform::{FunctionSpec, InstanceReport, Life, PoolAction, Work};
use gshare_core::{Duration, FunctionId, InstanceId, NodeId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

impl SlicedPool {
    pub(super) fn add(&mut self, function: FunctionId, spec: FunctionSpec, actions: &mut Vec<PoolAction>) {
        let Work::Pipeline { dag, mut goal } = spec.work else { return };
        if spec.slo.is_some() {
            goal.slo = spec.slo;
        }
        // The slices are fixed by the devices.
        goal.carve = false;
        let new = Function {
            dag,
            slo: goal.slo,
            goal,
            min_instances: spec.min_instances,
            max_instances: spec.max_instances,
            kept: BTreeMap::new(),
            not_before: Timestamp::ZERO,
            removed: false,
            nodes: BTreeSet::new(),
            instances: BTreeSet::new(),
            short: None,
            unmet: BTreeSet::new(),
            told_unmet: false,
            version: self.version,
        };
        self.functions.insert(function, new);
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in nodes {
            self.fit(function, node, actions);
        }
        self.look_at(function);
    }

    /// Takes a report. A report that fits no order of the instance, or a gone instance, is old and changes nothing.
    pub(super) fn report(&mut self, id: InstanceId, report: InstanceReport, actions: &mut Vec<PoolAction>) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        let (node, local) = (one.node, one.local);
        match report {
            InstanceReport::Ready if one.life == Life::Starting => {
                one.life = if one.is_shared() { Life::Parked } else { Life::Ready };
                one.up = true;
                let function = one.function;
                let service = self.service(id);
                self.keep(node, InstanceEvent::Started { instance: local });
                self.route(RouteEvent::InstanceUp { instance: id, function, service });
            }
            InstanceReport::Parked if one.leaving && one.life != Life::Stopped => {
                one.leaving = false;
                let slices: Vec<AssignedSlice> = one.home.slices().collect();
                self.unpark(node, &slices, actions);
            }
            InstanceReport::Unparked if one.memory == Memory::Unparking => self.unparked(id, actions),
            InstanceReport::Refused | InstanceReport::Gone | InstanceReport::Completed => {
                if one.life == Life::Starting
                    && let Some(of) = self.functions.get_mut(&one.function)
                {
                    of.not_before = self.now.saturating_add(START_AGAIN);
                }
                self.forget(id, actions);
                self.keep(node, InstanceEvent::Gone { instance: local });
                self.version += 1;
            }
            _ => {}
        }
    }

    fn unparked(&mut self, id: InstanceId, actions: &mut Vec<PoolAction>) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        one.memory = Memory::In;
        if one.life == Life::Parked {
            one.life = Life::Ready;
        }
        let (node, local, pending, draining) = (one.node, one.local, one.pending.take(), one.draining);
        self.keep(node, InstanceEvent::Loaded { instance: local });
        if !draining {
            self.route(RouteEvent::LoadChanged { instance: id, load: Duration::ZERO });
        }
        if let Some(ticket) = pending {
            self.send(ticket, id, actions);
            if draining {
                self.announce_drain(id, actions);
            }
        }
    }

    /// Forgets a gone instance and tells the router. The caller tells the keeper.
    pub(super) fn forget(&mut self, id: InstanceId, actions: &mut Vec<PoolAction>) {
        let Some(one) = self.instances.remove(&id) else { return };
        let Instance { function, node: at, local, ref home, ref requests, up, ref withdrawn, .. } = one;
        let slices: Vec<AssignedSlice> = home.slices().collect();
        if let Some(node) = self.nodes.get_mut(&at) {
            node.names.remove(&local);
            for slice in &slices {
                if let Some(on) = node.slices.get_mut(slice) {
                    on.remove(&id);
                    if on.is_empty() {
                        node.slices.remove(slice);
                    }
                }
            }
        }
        for &request in requests {
            self.tickets.wait(request);
        }
        if up {
            self.route(RouteEvent::InstanceDown { instance: id });
        }
        for &request in withdrawn {
            self.route(RouteEvent::Cancelled { request });
        }
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.instances.remove(&id);
        if of.removed {
            self.route(RouteEvent::FunctionRemoved { function });
            self.forget_removed(function);
        }
        self.look_at(function);
        self.unpark(at, &slices, actions);
    }
}
