//! Reports of hosts about instances, and the end of an instance.

use super::{Cluster, Instance, Memory, SlicedPool};
use crate::pipeline::{AssignedSlice, InstanceEvent, RouteEvent};
use crate::platform::{InstanceReport, PlatformAction};
use gshare_core::{Duration, InstanceId, RequestId};

impl SlicedPool {
    pub(super) fn report(&mut self, id: InstanceId, report: InstanceReport, cluster: &mut Cluster) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        let (node, local) = (one.node, one.local);
        match report {
            InstanceReport::Ready => {
                one.up = true;
                let function = one.function;
                let service = self.service(id);
                self.keep(node, InstanceEvent::Started { instance: local });
                self.route(RouteEvent::InstanceUp { instance: id, function, service });
            }
            InstanceReport::Parked => {
                one.leaving = false;
                let slices: Vec<AssignedSlice> = one.home.slices().collect();
                self.unpark(node, &slices, cluster);
            }
            InstanceReport::Unparked => self.unparked(id, cluster),
            _ => {}
        }
    }

    fn unparked(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        one.memory = Memory::In;
        let (node, local, pending, draining) = (one.node, one.local, one.pending.take(), one.draining);
        self.keep(node, InstanceEvent::Loaded { instance: local });
        if !draining {
            self.route(RouteEvent::LoadChanged { instance: id, load: Duration::ZERO });
        }
        if let Some(request) = pending {
            self.send(request, id, cluster);
            if draining {
                cluster.order(PlatformAction::Drain { instance: id });
            }
        }
    }

    /// Forgets a gone instance and tells the router. The caller tells the keeper.
    pub(super) fn forget(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.instances.remove(&id) else { return };
        let Instance { function, node: at, local, ref home, up, .. } = one;
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
        if up {
            self.route(RouteEvent::InstanceDown { instance: id });
        }
        let given = self.given.iter().filter(|(request, on)| **on == id && !cluster.is_open(**request));
        for request in given.map(|(request, _)| *request).collect::<Vec<RequestId>>() {
            self.route(RouteEvent::Cancelled { request });
        }
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.instances.remove(&id);
        if cluster.is_removed(function) {
            self.route(RouteEvent::FunctionRemoved { function });
            self.forget_removed(function);
        }
        self.unpark(at, &slices, cluster);
    }
}
