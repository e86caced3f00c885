//! Graphs: construction, inspection, executable forms and launches.
//!
//! A launch runs the graph's nodes one by one on its stream, in an order which respects the edges. Branches do not overlap, as they would
//! on hardware.

use super::capture::{legacy_not_implied, nodes, submit};
use super::module::{Function, Geometry, Launch};
use super::stream::{HostCall, MemOps, Record, Wait, read_mem_ops};
use super::stream_ordered::{GraphAlloc, GraphFree, graph_address, graph_free};
use super::tasks::{Child, Empty, Graph, GraphNode, Node, NodeRef, replace, task_as};
use super::xfer::{Fill, from_3d};
use super::*;

type Nodes = *const sys::CUgraphNode;
type NodesOut = *mut sys::CUgraphNode;
type DataOut = *mut sys::CUgraphEdgeData;

entry!(cuGraphCreate, driver, |phGraph, flags| {
    invalid_if(flags != 0)?;
    put(phGraph, Graph::create().handle())
});

entry!(cuGraphDestroy, driver, |graph: Graph| {
    graph.retire();
    for node in &lock(&graph.state).nodes {
        node.retire();
    }
});

entry!(cuGraphClone, driver, |copy, original: Graph| put(copy, original.copy().handle()));

entry!(cuGraphNodeFindInClone, |phNode, original: GraphNode, hClonedGraph: Graph| {
    let found = lock(&hClonedGraph.state).origin.get(&original.id).copied();
    put(phNode, found.ok_or(INVALID_VALUE)?.handle())
});

unsafe fn add(out: NodesOut, graph: Ref<Graph>, after: Nodes, count: usize, node: Node) -> Answer {
    invalid_if(out.is_null())?;
    put(out, Graph::add(graph, node, &nodes(after, count)?)?.handle())
}

/// `CUDA_KERNEL_NODE_PARAMS`: function, grid, block, shared bytes, arguments, extra; v2 adds kernel and context.
unsafe fn read_kernel(params: *const c_void, v2: bool) -> Res<Launch> {
    invalid_if(params.is_null())?;
    let at = |offset: usize| params.cast::<u8>().add(offset).cast::<*mut *mut c_void>().read_unaligned();
    let function = if at(0).is_null() && v2 { at(56) } else { at(0) };
    let [gx, gy, gz, bx, by, bz, shared] = params.cast::<u8>().add(8).cast::<[u32; 7]>().read_unaligned();
    let function = Object::<Function>::get(function)?;
    let geometry = Geometry { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: false };
    Launch::new(function, geometry, (at(40), at(48)))
}

unsafe fn read_memset(params: *const c_void) -> Res<Fill> {
    let fill: Fill = read(params)?;
    invalid_if(!matches!(fill.element, 1 | 2 | 4))?;
    Ok(fill)
}

unsafe fn read_host(params: *const sys::CUDA_HOST_NODE_PARAMS) -> Res<HostCall> {
    invalid_if(params.is_null())?;
    Ok(HostCall { function: (*params).fn_.ok_or(INVALID_VALUE)?, data: (*params).userData as usize })
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`: context, count, operations, flags.
unsafe fn read_batch(params: *const c_void) -> Res<MemOps> {
    invalid_if(params.is_null())?;
    let count = params.cast::<u8>().add(8).cast::<u32>().read_unaligned();
    read_mem_ops(params.cast::<u8>().add(16).cast::<*const c_void>().read_unaligned(), count)
}

unsafe fn read_child(graph: sys::CUgraph) -> Res<Child> {
    Ok(Child(Object::<Graph>::get(graph)?.copy()))
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: pool properties (88 bytes: type, handle types, location kind, id, …), access descriptions, their number,
/// bytes, and the returned address.
unsafe fn read_alloc(params: *mut c_void) -> Res<GraphAlloc> {
    let [kind, _, location, ordinal] = read::<[u32; 4]>(params)?;
    let bytes = params.cast::<u8>().add(ALLOC_BYTES_AT).cast::<u64>().read_unaligned();
    invalid_if(kind != 1 || location != 1 || bytes == 0)?;
    let device = Device::at(ordinal as i32)?;
    let address = graph_address(device, bytes)?;
    params.cast::<u8>().add(ALLOC_BYTES_AT + 8).cast::<u64>().write_unaligned(address);
    Ok(GraphAlloc { device, bytes, address })
}

const ALLOC_BYTES_AT: usize = std::mem::offset_of!(sys::CUDA_MEM_ALLOC_NODE_PARAMS_v1, bytesize);
const _: () = assert!(std::mem::offset_of!(sys::CUDA_MEM_ALLOC_NODE_PARAMS_v1, dptr) == ALLOC_BYTES_AT + 8);

/// The general form: type, three reserved words, then the parameters of that type.
unsafe fn read_general(params: *mut c_void) -> Res<Node> {
    let kind: u32 = read(params)?;
    let at = params.cast::<u8>().add(16);
    let handle = || at.cast::<*mut c_void>().read_unaligned();
    Ok(match kind {
        0 => Arc::new(read_kernel(at.cast(), true)?),
        // Flags and context stand before the copy's description.
        1 => Arc::new(from_3d(at.add(16).cast())?),
        2 => Arc::new(read_memset(at.cast())?),
        3 => Arc::new(read_host(at.cast())?),
        4 => Arc::new(read_child(handle().cast())?),
        5 => Arc::new(Empty),
        6 => Arc::new(Wait(Object::get(handle())?)),
        7 => Arc::new(Record(Object::get(handle())?)),
        10 => Arc::new(read_alloc(at.cast())?),
        11 => Arc::new(GraphFree(at.cast::<u64>().read_unaligned())),
        12 => Arc::new(read_batch(at.cast())?),
        _ => return Err(NOT_SUPPORTED),
    })
}

/// Replaces the task of a node in an executable graph by another of the same kind.
unsafe fn set_step(exec: sys::CUgraphExec, node: sys::CUgraphNode, new: Node) -> Answer {
    Object::<Exec>::get(exec)?.step(Object::get(node)?, |step| replace(&mut step.node, new))
}

// --- Nodes by kind ---------------------------------------------------------------------------------

/// The three calls for a kind of node: add a node, change its parameters, and change them in an executable graph.
///
/// `add set set_in_executable (parameters) node`, with `_` for a missing call; a `_` follows the parameters if adding takes a context as
/// well.
macro_rules! node_kinds {
    ($($add:ident $set:tt $step:tt ($params:ident $(, $context:tt)?) $task:expr;)*) => {$(
        entry!($add, driver, |out, graph: Graph, after, count, $params $(, $context)?| {
            add(out, graph, after, count, Arc::new($task))
        });
        node_kinds!(@set $set ($params) $task);
        node_kinds!(@step $step ($params $(, $context)?) $task);
    )*};
    (@ $what:ident _ $params:tt $task:expr) => {};
    (@set $set:ident ($params:ident) $task:expr) => {
        entry!($set, |node: GraphNode, $params| node.set(Arc::new($task)));
    };
    (@step $step:ident ($($params:tt)*) $task:expr) => {
        entry!($step, |exec, node, $($params)*| set_step(exec, node, Arc::new($task)));
    };
}
node_kinds! {
    cuGraphAddKernelNode cuGraphKernelNodeSetParams cuGraphExecKernelNodeSetParams
        (params) read_kernel(params.cast(), false)?;
    cuGraphAddKernelNode_v2 cuGraphKernelNodeSetParams_v2 cuGraphExecKernelNodeSetParams_v2
        (params) read_kernel(params.cast(), true)?;
    cuGraphAddMemcpyNode cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams
        (params, _) from_3d(params.cast())?;
    cuGraphAddMemsetNode cuGraphMemsetNodeSetParams cuGraphExecMemsetNodeSetParams
        (params, _) read_memset(params.cast())?;
    cuGraphAddHostNode cuGraphHostNodeSetParams cuGraphExecHostNodeSetParams (params) read_host(params)?;
    cuGraphAddEventRecordNode cuGraphEventRecordNodeSetEvent cuGraphExecEventRecordNodeSetEvent
        (event) Record(Object::get(event)?);
    cuGraphAddEventWaitNode cuGraphEventWaitNodeSetEvent cuGraphExecEventWaitNodeSetEvent
        (event) Wait(Object::get(event)?);
    cuGraphAddBatchMemOpNode cuGraphBatchMemOpNodeSetParams _ (params) read_batch(params.cast())?;
    cuGraphAddChildGraphNode _ cuGraphExecChildGraphNodeSetParams (child) read_child(child)?;
    cuGraphAddMemAllocNode _ _ (params) read_alloc(params.cast())?;
    cuGraphAddMemFreeNode _ _ (address) GraphFree(address);
}

entry!(cuGraphAddEmptyNode, driver, |out, graph: Graph, after, count| {
    add(out, graph, after, count, Arc::new(Empty))
});

entry!(cuGraphAddNode_v2 | cuGraphAddNode_v3, driver, |out, graph: Graph, after, _, count, params| {
    add(out, graph, after, count, read_general(params.cast())?)
});
alias!(
    cuGraphAddNode(out, graph, after, count, params) =
        cuGraphAddNode_v2(out, graph, after, std::ptr::null(), count, params)
);

entry!(cuGraphNodeSetParams | cuGraphNodeSetParams_v2, |node: GraphNode, params| {
    node.set(read_general(params.cast())?)
});

entry!(cuGraphExecNodeSetParams, |exec, node, params| set_step(exec, node, read_general(params.cast())?));

/// Calls which return the parameters of a kind of node.
macro_rules! node_values {
    ($($name:ident |$task:ident: $kind:ty, $out:ident| $answer:expr;)*) => {$(
        entry!($name, |node: GraphNode, $out| {
            let node = node.node();
            let $task = task_as::<$kind>(&node).ok_or(INVALID_VALUE)?;
            $answer
        });
    )*};
}
node_values! {
    cuGraphKernelNodeGetParams |launch: Launch, out| put_kernel(launch, out.cast(), 56);
    cuGraphKernelNodeGetParams_v2 |launch: Launch, out| put_kernel(launch, out.cast(), 72);
    cuGraphChildGraphNodeGetGraph |child: Child, out| put(out, child.0.handle());
    cuGraphEventRecordNodeGetEvent |record: Record, out| put(out, record.0.handle());
    cuGraphEventWaitNodeGetEvent |wait: Wait, out| put(out, wait.0.handle());
    cuGraphMemFreeNodeGetParams |free: GraphFree, out| put(out, free.0);
    cuGraphMemAllocNodeGetParams |alloc: GraphAlloc, out| {
        invalid_if(out.is_null())?;
        std::ptr::write_bytes(out, 0, 1);
        put(out.cast::<[u32; 4]>(), [1, 0, 1, alloc.device.ordinal as u32])?;
        put(out.cast::<u8>().add(ALLOC_BYTES_AT).cast::<[u64; 2]>(), [alloc.bytes, alloc.address])
    };
    cuGraphHostNodeGetParams |host: HostCall, out| {
        put(out, sys::CUDA_HOST_NODE_PARAMS { fn_: Some(host.function), userData: host.data as *mut c_void })
    };
}

unsafe fn put_kernel(launch: &Launch, out: *mut c_void, size: usize) -> Answer {
    invalid_if(out.is_null())?;
    std::ptr::write_bytes(out.cast::<u8>(), 0, size);
    out.cast::<*mut c_void>().write_unaligned(launch.function.handle());
    let Geometry { grid: [a, b, c], block: [d, e, f], shared, .. } = launch.geometry;
    out.cast::<u8>().add(8).cast::<[u32; 7]>().write_unaligned([a, b, c, d, e, f, shared]);
    put(out.cast::<u8>().add(40).cast::<[usize; 2]>(), [launch.params, launch.extra])
}

// --- Edges -----------------------------------------------------------------------------------------

/// Pairs of node ids.
type Edges = Vec<(u64, u64)>;

unsafe fn edges(from: Nodes, to: Nodes, count: usize) -> Res<Edges> {
    let (from, to) = (nodes(from, count)?, nodes(to, count)?);
    Ok(from.iter().zip(to).map(|(a, b)| (a.id, b.id)).collect())
}

entry!(cuGraphAddDependencies, |graph: Graph, from, to, count| {
    let new = edges(from, to, count)?;
    let mut state = lock(&graph.state);
    let known = |id: u64| state.nodes.iter().any(|n| n.id == id);
    invalid_if(new.iter().any(|e| e.0 == e.1 || state.edges.contains(e) || !known(e.0) || !known(e.1)))?;
    let before = state.edges.len();
    state.edges.extend(new);
    if state.ordered().is_none() {
        state.edges.truncate(before);
        return Err(INVALID_VALUE);
    }
});
alias!(cuGraphAddDependencies_v2(graph, from, to, _, count) = cuGraphAddDependencies(graph, from, to, count));

entry!(cuGraphRemoveDependencies, |graph: Graph, from, to, count| {
    let old = edges(from, to, count)?;
    let mut state = lock(&graph.state);
    invalid_if(old.iter().any(|e| !state.edges.contains(e)))?;
    state.edges.retain(|e| !old.contains(e));
});
alias!(cuGraphRemoveDependencies_v2(graph, from, to, _, n) = cuGraphRemoveDependencies(graph, from, to, n));

entry!(cuGraphDestroyNode, |node: GraphNode| {
    let mut state = lock(&node.graph.state);
    state.nodes.retain(|n| n.id != node.id);
    state.edges.retain(|e| e.0 != node.id && e.1 != node.id);
    node.retire();
});

// --- Looking ---------------------------------------------------------------------------------------

/// Returns a list as the driver does: a null list asks for the number, and a longer list ends in nulls. A call which asks for edge data
/// gets none.
unsafe fn put_nodes(list: &[NodeRef], out: NodesOut, data: DataOut, count: *mut usize) -> Answer {
    invalid_if(count.is_null())?;
    if out.is_null() {
        *count = list.len();
    } else {
        for i in 0..*count {
            put(out.add(i), list.get(i).map_or(null_mut(), |n| n.handle()))?;
        }
        *count = (*count).min(list.len());
    }
    if !data.is_null() {
        std::ptr::write_bytes(data, 0, *count);
    }
    Ok(())
}

entry!(cuGraphGetNodes, |graph: Graph, nodes, count| {
    put_nodes(&lock(&graph.state).nodes, nodes, null_mut(), count)
});

entry!(cuGraphGetRootNodes, |graph: Graph, nodes, count| {
    let state = lock(&graph.state);
    let is_root = |n: &NodeRef| !state.edges.iter().any(|e| e.1 == n.id);
    let roots: Vec<NodeRef> = state.nodes.iter().copied().filter(is_root).collect();
    put_nodes(&roots, nodes, null_mut(), count)
});

entry!(cuGraphGetEdges_v2, |graph: Graph, from, to, data, count| {
    let state = lock(&graph.state);
    let by_id: BTreeMap<u64, NodeRef> = state.nodes.iter().map(|n| (n.id, *n)).collect();
    let ends = |pick: fn(&(u64, u64)) -> u64| -> Vec<NodeRef> {
        state.edges.iter().filter_map(|e| by_id.get(&pick(e)).copied()).collect()
    };
    invalid_if(count.is_null() || from.is_null() != to.is_null())?;
    let mut number = *count;
    put_nodes(&ends(|e| e.0), from, null_mut(), &raw mut number)?;
    put_nodes(&ends(|e| e.1), to, data, count)
});
alias!(cuGraphGetEdges(graph, from, to, count) = cuGraphGetEdges_v2(graph, from, to, null_mut(), count));

/// The nodes at the other ends of a node's edges; `end` picks the other end of an edge of this node.
fn neighbours(node: NodeRef, end: impl Fn(&(u64, u64)) -> Option<u64>) -> Vec<NodeRef> {
    let state = lock(&node.graph.state);
    let ids: Vec<u64> = state.edges.iter().filter_map(end).collect();
    state.nodes.iter().copied().filter(|n| ids.contains(&n.id)).collect()
}

entry!(cuGraphNodeGetDependencies_v2, |node: GraphNode, list, data, count| {
    let before = neighbours(node, |(from, to)| (*to == node.id).then_some(*from));
    put_nodes(&before, list, data, count)
});
alias!(cuGraphNodeGetDependencies(node, list, n) = cuGraphNodeGetDependencies_v2(node, list, null_mut(), n));

entry!(cuGraphNodeGetDependentNodes_v2, |node: GraphNode, list, data, count| {
    let after = neighbours(node, |(from, to)| (*from == node.id).then_some(*to));
    put_nodes(&after, list, data, count)
});
alias!(
    cuGraphNodeGetDependentNodes(node, list, count) =
        cuGraphNodeGetDependentNodes_v2(node, list, null_mut(), count)
);

entry!(cuGraphNodeGetType, |node: GraphNode, type_| put(type_, node.node().kind()));
entry!(cuGraphNodeGetContainingGraph, |node: GraphNode, graph| put(graph, node.graph.handle()));
entry!(cuGraphGetId, |graph: Graph, graphId| put(graphId, graph.id as u32));

// --- Executable graphs -----------------------------------------------------------------------------

/// One node of an executable graph: the id of its original, its task, and whether it is enabled.
#[derive(Clone)]
struct Step {
    of: u64,
    node: Node,
    enabled: bool,
}

/// A graph ready to be launched: its nodes in order, with the graphs inside it laid out.
pub(crate) struct Exec {
    id: u64,
    flags: u64,
    steps: Mutex<Vec<Step>>,
}

object!(Exec, b"gshareEX", INVALID_VALUE);

impl Exec {
    fn step<R>(&self, node: NodeRef, f: impl FnOnce(&mut Step) -> Res<R>) -> Res<R> {
        let mut steps = lock(&self.steps);
        f(steps.iter_mut().find(|s| s.of == node.id).ok_or(INVALID_VALUE)?)
    }
}

fn steps_of(graph: &Graph) -> Res<Vec<Step>> {
    Ok(graph.ordered()?.into_iter().map(|n| Step { of: n.id, node: n.node(), enabled: true }).collect())
}

unsafe fn instantiate(out: *mut sys::CUgraphExec, graph: &Graph, flags: u64) -> Answer {
    invalid_if(flags & !0xf != 0)?;
    let steps = Mutex::new(steps_of(graph)?);
    put(out, Object::create(Exec { id: next_id(), flags, steps }).handle())
}

entry!(cuGraphInstantiate | cuGraphInstantiate_v2, driver, |phGraphExec, graph: Graph, phErrorNode, _, _| {
    put_opt(phErrorNode, null_mut());
    instantiate(phGraphExec, graph, 0)
});

entry!(cuGraphInstantiateWithFlags, driver, |exec, graph: Graph, flags| instantiate(exec, graph, flags));

// `CUDA_GRAPH_INSTANTIATE_PARAMS`: flags, upload stream, error node, result.
entry!(cuGraphInstantiateWithParams, driver, |_, exec, graph, params: Given| {
    let flags = params.cast::<u64>().read_unaligned();
    let answer = Object::<Graph>::get(graph).and_then(|graph| instantiate(exec, graph, flags));
    let at = params.cast::<u8>();
    at.add(16).cast::<*mut c_void>().write_unaligned(null_mut());
    at.add(24).cast::<u32>().write_unaligned(u32::from(answer.is_err()));
    answer
});

entry!(cuGraphExecDestroy, driver, |exec: Exec| invalid_if(!exec.retire()));
entry!(cuGraphExecGetFlags, |exec: Exec, flags| put(flags, exec.flags));
entry!(cuGraphExecGetId, |exec: Exec, graphId| put(graphId, exec.id as u32));
entry!(cuGraphUpload, |_exec: Exec, _stream: Stream| ());

entry!(cuGraphLaunch, |exec: Exec, stream: Stream| {
    legacy_not_implied(stream)?;
    let enabled = lock(&exec.steps).iter().filter(|s| s.enabled).count();
    calls::graph(enabled);
    let steps = lock(&exec.steps);
    if stream.capturing.load(Acquire) {
        // In a capture, the launched graph becomes a child graph with its nodes in a row.
        let child = Graph::create();
        let mut last = Vec::new();
        for step in steps.iter().filter(|s| s.enabled) {
            last = vec![Graph::add(child, step.node.clone(), &last)?];
        }
        return submit(stream, Child(child));
    }
    if exec.flags & 1 != 0 {
        // Auto free on launch: memory left by the previous launch goes first.
        for alloc in steps.iter().filter_map(|step| task_as::<GraphAlloc>(&step.node)) {
            let _ = graph_free(alloc.address, stream);
        }
    }
    steps.iter().filter(|s| s.enabled).try_for_each(|step| step.node.run(stream))
});

entry!(cuGraphNodeSetEnabled, |exec: Exec, node: GraphNode, isEnabled| {
    exec.step(node, |step| {
        // Kernels, copies and sets only.
        invalid_if(step.node.kind() > 2)?;
        step.enabled = isEnabled != 0;
        Ok(())
    })
});

entry!(cuGraphNodeGetEnabled, |exec: Exec, node: GraphNode, isEnabled| {
    put(isEnabled, exec.step(node, |step| Ok(u32::from(step.enabled)))?)
});

/// Takes the parameters of another graph of the same shape. `Err` carries the driver's reason: 2 topology, 3 node type.
fn update(exec: &Exec, graph: &Graph) -> Result<(), u32> {
    let new = steps_of(graph).map_err(|_| 1_u32)?;
    let mut steps = lock(&exec.steps);
    refuse_if(new.len() != steps.len(), 2_u32)?;
    refuse_if(new.iter().zip(steps.iter()).any(|(a, b)| a.node.kind() != b.node.kind()), 3_u32)?;
    for (old, new) in steps.iter_mut().zip(new) {
        old.node = new.node;
    }
    Ok(())
}

// `CUgraphExecUpdateResultInfo`: result, error node, error source.
entry!(cuGraphExecUpdate_v2, |exec: Exec, graph: Graph, info| {
    let updated = update(exec, graph);
    if !info.is_null() {
        std::ptr::write_bytes(info, 0, 1);
        info.cast::<u32>().write_unaligned(updated.err().unwrap_or(0));
    }
    updated.map_err(|_| CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
});

entry!(cuGraphExecUpdate, |exec: Exec, graph: Graph, error_node, reason| {
    let updated = update(exec, graph);
    put_opt(error_node, null_mut());
    put_opt(reason, updated.err().unwrap_or(0));
    updated.map_err(|_| CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
});

// --- User objects ----------------------------------------------------------------------------------

/// A counted object of the program, with the program's own destructor.
struct UserObject {
    count: AtomicUsize,
    data: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
}

object!(UserObject, b"gshareUO", INVALID_VALUE);

impl UserObject {
    fn retain(&self, count: c_uint) {
        self.count.fetch_add(count as usize, AcqRel);
    }

    unsafe fn release(this: Ref<Self>, count: c_uint) -> Answer {
        let left = this.count.fetch_update(AcqRel, Acquire, |n| n.checked_sub(count as usize));
        if left.map_err(|_| INVALID_VALUE)? == count as usize && this.retire() {
            (this.destroy)(this.data as *mut c_void);
        }
        Ok(())
    }
}

entry!(cuUserObjectCreate, driver, |object, ptr, destroy, initialRefcount, flags| {
    let destroy = destroy.ok_or(INVALID_VALUE)?;
    invalid_if(initialRefcount == 0 || flags != 1)?;
    let count = AtomicUsize::new(initialRefcount as usize);
    put(object, Object::create(UserObject { count, data: ptr as usize, destroy }).handle())
});

entry!(cuUserObjectRetain, |object: UserObject, count| object.retain(count));
entry!(cuUserObjectRelease, |object: UserObject, count| UserObject::release(object, count));

entry!(cuGraphRetainUserObject, |_graph: Graph, object, count, flags| {
    // CU_GRAPH_USER_OBJECT_MOVE takes the caller's references. The simulator never drops them.
    if flags & 1 == 0 {
        Object::<UserObject>::get(object)?.retain(count);
    }
});

entry!(cuGraphReleaseUserObject, |_graph: Graph, object: UserObject, count| {
    UserObject::release(object, count)
});
