//! Graphs: their nodes, edges, executable forms and launches.
//!
//! A launch of a graph runs its nodes one after the other, in an order that respects the edges, on the stream it is
//! launched on: branches do not overlap (hardware would overlap them).

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::base::*;
use super::capture::legacy_not_implied;
use super::memory::Fill;
use super::module::{Function, Launch};
use super::stream::{Event, MemOp};
use super::xfer::Transfer;
use super::*;

/// One thing a stream can be asked to do.
#[derive(Clone)]
pub(crate) enum Node {
    Kernel(Launch),
    Copy(Transfer),
    Set(Fill),
    Host { function: sys::CUhostFn, data: usize },
    Callback { function: sys::CUstreamCallback, stream: usize, data: usize },
    Child(Ref<Graph>),
    Empty,
    Record(Ref<Event>),
    Wait(Ref<Event>),
    MemOps(Vec<MemOp>),
    Alloc { device: Device, bytes: u64, address: u64 },
    Free { address: u64 },
}

/// A node in a graph.
pub(crate) struct GraphNode {
    pub(crate) id: u64,
    pub(crate) graph: AtomicU64,
    pub(crate) node: Mutex<Node>,
}

impl Kind for GraphNode {
    const MAGIC: u64 = 0x6773_6861_7265_4e4f;
    const BAD: CUresult = INVALID_VALUE;
}

pub(crate) type NodeRef = Ref<GraphNode>;

#[derive(Default)]
pub(crate) struct GraphState {
    pub(crate) nodes: Vec<NodeRef>,
    /// From, to: ids.
    pub(crate) edges: Vec<(u64, u64)>,
    /// Node of the original -> node here, in a clone.
    pub(crate) origin: BTreeMap<u64, NodeRef>,
}

/// A graph.
pub(crate) struct Graph {
    pub(crate) id: u64,
    pub(crate) state: Mutex<GraphState>,
}

impl Kind for Graph {
    const MAGIC: u64 = 0x6773_6861_7265_4752;
    const BAD: CUresult = INVALID_VALUE;
}

impl Graph {
    pub(crate) fn create() -> Ref<Self> {
        Object::create(Self { id: next_id(), state: Mutex::default() })
    }

    pub(crate) fn add(&'static self, graph: u64, node: Node, after: &[NodeRef]) -> Res<NodeRef> {
        let mut state = lock(&self.state);
        invalid_if(after.iter().any(|d| !state.nodes.iter().any(|n| n.id == d.id)))?;
        let node =
            Object::create(GraphNode { id: next_id(), graph: AtomicU64::new(graph), node: Mutex::new(node) });
        state.nodes.push(node);
        for d in after {
            if !state.edges.contains(&(d.id, node.id)) {
                state.edges.push((d.id, node.id));
            }
        }
        Ok(node)
    }
}

impl GraphState {
    /// Nodes in an order that respects the edges, oldest first among the free ones; `None` if there is a cycle.
    pub(crate) fn ordered(&self) -> Option<Vec<NodeRef>> {
        let mut left: BTreeMap<u64, usize> = self.nodes.iter().map(|n| (n.id, 0)).collect();
        for (_, to) in &self.edges {
            *left.get_mut(to)? += 1;
        }
        let mut follow: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (from, to) in &self.edges {
            follow.entry(*from).or_default().push(*to);
        }
        let by_id: BTreeMap<u64, NodeRef> = self.nodes.iter().map(|n| (n.id, *n)).collect();
        let mut ready: std::collections::BTreeSet<u64> =
            left.iter().filter(|(_, n)| **n == 0).map(|(id, _)| *id).collect();
        let mut out = Vec::with_capacity(self.nodes.len());
        while let Some(id) = ready.pop_first() {
            out.push(*by_id.get(&id)?);
            for to in follow.get(&id).into_iter().flatten() {
                let count = left.get_mut(to)?;
                *count -= 1;
                if *count == 0 {
                    ready.insert(*to);
                }
            }
        }
        (out.len() == self.nodes.len()).then_some(out)
    }
}

// --- Running ---------------------------------------------------------------------------------------

/// Queues a node's work on a stream.
pub(crate) fn run_node(stream: Ref<Stream>, node: &Node) -> Answer {
    match node {
        Node::Kernel(launch) => launch.run(stream),
        Node::Copy(transfer) => transfer.run(stream),
        Node::Set(fill) => fill.run(stream),
        Node::Host { function, data } => {
            let (function, data) = (*function, *data);
            push_call(stream, move || {
                if let Some(function) = function {
                    // SAFETY: the caller of cuLaunchHostFunc gave the function and its argument for this call.
                    unsafe { function(data as *mut c_void) };
                }
            })
        }
        Node::Callback { function, stream: handle, data } => {
            let (function, handle, data) = (*function, *handle, *data);
            push_call(stream, move || {
                if let Some(function) = function {
                    let success = sys::CUresult::CUDA_SUCCESS;
                    // SAFETY: as above, for cuStreamAddCallback.
                    unsafe { function(handle as sys::CUstream, success, data as *mut c_void) };
                }
            })
        }
        Node::Child(graph) => {
            let order = lock(&graph.state).ordered().ok_or(INVALID_VALUE)?;
            for node in order {
                let node = lock(&node.node).clone();
                run_node(stream, &node)?;
            }
            Ok(())
        }
        Node::Empty => Ok(()),
        Node::Record(event) => event.record(stream),
        Node::Wait(event) => event.wait_on(stream),
        Node::MemOps(ops) => stream::run_mem_ops(stream, ops.clone()),
        Node::Alloc { device, bytes, address } => stream_ordered::graph_alloc(*device, *bytes, *address),
        Node::Free { address } => stream_ordered::graph_free(*address),
    }
}

// --- Building --------------------------------------------------------------------------------------

pub(super) unsafe fn nodes(list: *const sys::CUgraphNode, count: usize) -> Res<Vec<NodeRef>> {
    invalid_if(count > 0 && list.is_null())?;
    (0..count).map(|i| Object::<GraphNode>::get(*list.add(i))).collect()
}

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

entry!(cuGraphClone, driver, |phGraphClone, original: Graph| {
    put(phGraphClone, clone_graph(original).handle())
});

fn clone_graph(original: Ref<Graph>) -> Ref<Graph> {
    let copy = Graph::create();
    let of = copy.handle::<c_void>() as u64;
    let from = lock(&original.state);
    let mut to = lock(&copy.state);
    for node in &from.nodes {
        let inner = match &*lock(&node.node) {
            Node::Child(child) => Node::Child(clone_graph(child)),
            other => other.clone(),
        };
        let new =
            Object::create(GraphNode { id: next_id(), graph: AtomicU64::new(of), node: Mutex::new(inner) });
        to.nodes.push(new);
        to.origin.insert(node.id, new);
    }
    to.edges =
        from.edges.iter().filter_map(|(a, b)| Some((to.origin.get(a)?.id, to.origin.get(b)?.id))).collect();
    drop(to);
    copy
}

entry!(cuGraphNodeFindInClone, |phNode, original: GraphNode, hClonedGraph: Graph| {
    let found = lock(&hClonedGraph.state).origin.get(&original.id).copied();
    put(phNode, found.ok_or(INVALID_VALUE)?.handle())
});

unsafe fn add(
    out: *mut sys::CUgraphNode,
    graph: sys::CUgraph,
    after: *const sys::CUgraphNode,
    count: usize,
    node: Node,
) -> Answer {
    driver()?;
    invalid_if(out.is_null())?;
    let of = Object::<Graph>::get(graph)?;
    let made = of.add(graph as u64, node, &nodes(after, count)?)?;
    put(out, made.handle())
}

/// `CUDA_KERNEL_NODE_PARAMS`: function, grid, block, shared bytes, arguments, extra; v2 adds kernel and context.
unsafe fn read_kernel(params: *const c_void, v2: bool) -> Res<Launch> {
    invalid_if(params.is_null())?;
    let mut function = params.cast::<*mut c_void>().read_unaligned();
    let n = params.cast::<u8>().add(8).cast::<[u32; 7]>().read_unaligned();
    let at = |offset: usize| params.cast::<u8>().add(offset).cast::<*mut *mut c_void>().read_unaligned();
    if function.is_null() && v2 {
        function = params.cast::<u8>().add(56).cast::<*mut c_void>().read_unaligned();
    }
    let function = Object::<Function>::get(function)?;
    let first = module::first_argument(function, at(40), at(48));
    let launch = Launch {
        function,
        grid: [n[0], n[1], n[2]],
        block: [n[3], n[4], n[5]],
        shared: n[6],
        first,
        params: at(40) as usize,
        extra: at(48) as usize,
        cooperative: false,
    };
    launch.check()?;
    Ok(launch)
}

unsafe fn read_memset(params: *const c_void) -> Res<Fill> {
    invalid_if(params.is_null())?;
    let fill = params.cast::<Fill>().read_unaligned();
    invalid_if(!matches!(fill.element, 1 | 2 | 4))?;
    Ok(fill)
}

unsafe fn read_host(params: *const sys::CUDA_HOST_NODE_PARAMS) -> Res<Node> {
    invalid_if(params.is_null() || (*params).fn_.is_none())?;
    Ok(Node::Host { function: (*params).fn_, data: (*params).userData as usize })
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`: context, count, operations, flags.
unsafe fn read_batch(params: *const c_void) -> Res<Node> {
    invalid_if(params.is_null())?;
    let count = params.cast::<u8>().add(8).cast::<u32>().read_unaligned();
    let list = params.cast::<u8>().add(16).cast::<*const c_void>().read_unaligned();
    Ok(Node::MemOps(stream::read_mem_ops(list, count)?))
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: pool properties (88 bytes: type, handle types, location kind, id, …), access
/// descriptions, their number, bytes, and the address that comes back.
unsafe fn alloc_node(params: *mut c_void) -> Res<Node> {
    invalid_if(params.is_null())?;
    let [kind, _, location, ordinal] = params.cast::<[u32; 4]>().read_unaligned();
    let bytes = params.cast::<u8>().add(ALLOC_BYTES_AT).cast::<u64>().read_unaligned();
    invalid_if(kind != 1 || location != 1 || bytes == 0)?;
    let device = Device::at(ordinal as i32)?;
    let address = stream_ordered::graph_address(device, bytes)?;
    params.cast::<u8>().add(ALLOC_BYTES_AT + 8).cast::<u64>().write_unaligned(address);
    Ok(Node::Alloc { device, bytes, address })
}

const ALLOC_BYTES_AT: usize = std::mem::offset_of!(sys::CUDA_MEM_ALLOC_NODE_PARAMS_v1, bytesize);
const _: () = assert!(std::mem::offset_of!(sys::CUDA_MEM_ALLOC_NODE_PARAMS_v1, dptr) == ALLOC_BYTES_AT + 8);

entry!(cuGraphMemAllocNodeGetParams, |node: GraphNode, params_out| {
    let Node::Alloc { device, bytes, address } = *lock(&node.node) else { return Err(INVALID_VALUE) };
    invalid_if(params_out.is_null())?;
    std::ptr::write_bytes(params_out, 0, 1);
    put(params_out.cast::<[u32; 4]>(), [1, 0, 1, device.ordinal as u32])?;
    put(params_out.cast::<u8>().add(ALLOC_BYTES_AT).cast::<[u64; 2]>(), [bytes, address])
});

entry!(cuGraphMemFreeNodeGetParams, |node: GraphNode, dptr_out| {
    let Node::Free { address } = *lock(&node.node) else { return Err(INVALID_VALUE) };
    put(dptr_out, address)
});

/// The general form: type, three reserved words, then the parameters of that type.
unsafe fn read_general(params: *mut c_void) -> Res<Node> {
    invalid_if(params.is_null())?;
    let kind = params.cast::<u32>().read_unaligned();
    let at = params.cast::<u8>().add(16);
    Ok(match kind {
        0 => Node::Kernel(read_kernel(at.cast(), true)?),
        // Flags and context stand before the copy's description.
        1 => Node::Copy(xfer::from_3d(at.add(16).cast())?),
        2 => Node::Set(read_memset(at.cast())?),
        3 => read_host(at.cast())?,
        4 => Node::Child(clone_graph(Object::<Graph>::get(at.cast::<*mut c_void>().read_unaligned())?)),
        5 => Node::Empty,
        6 => Node::Wait(Object::<Event>::get(at.cast::<*mut c_void>().read_unaligned())?),
        7 => Node::Record(Object::<Event>::get(at.cast::<*mut c_void>().read_unaligned())?),
        10 => alloc_node(at.cast())?,
        11 => Node::Free { address: at.cast::<u64>().read_unaligned() },
        12 => read_batch(at.cast())?,
        _ => return Err(NOT_SUPPORTED),
    })
}

unsafe fn add_general(
    out: *mut sys::CUgraphNode,
    graph: sys::CUgraph,
    after: *const sys::CUgraphNode,
    count: usize,
    params: *mut sys::CUgraphNodeParams,
) -> Answer {
    Object::<Graph>::get(graph)?;
    add(out, graph, after, count, read_general(params.cast())?)
}

/// Replaces a node's parameters by others of its kind.
unsafe fn set_node(node: sys::CUgraphNode, new: Node) -> Answer {
    let node = Object::<GraphNode>::get(node)?;
    let mut old = lock(&node.node);
    invalid_if(kind_of(&old) != kind_of(&new))?;
    *old = new;
    Ok(())
}

/// As [`set_node`], in an executable graph.
unsafe fn set_step(exec: sys::CUgraphExec, node: sys::CUgraphNode, new: Node) -> Answer {
    let exec = Object::<Exec>::get(exec)?;
    let node = Object::<GraphNode>::get(node)?;
    let mut steps = lock(&exec.steps);
    let step = steps.iter_mut().find(|s| s.of == node.id).ok_or(INVALID_VALUE)?;
    invalid_if(kind_of(&step.node) != kind_of(&new))?;
    step.node = new;
    Ok(())
}

// --- Nodes by kind ---------------------------------------------------------------------------------

/// The three calls of a kind of node: one adds such a node, one gives it other parameters, one does that in an executable graph.
///
/// `add set set_in_executable: |parameters| node`; a `_` follows the parameters where adding takes a context as well.
macro_rules! node_kinds {
    ($($add:ident $set:ident $set_step:ident: |$params:ident $(, $context:tt)?| $node:expr;)*) => {$(
        entry!($add, |out, graph, after, count, $params $(, $context)?| add(out, graph, after, count, $node));
        entry!($set, |node, $params| set_node(node, $node));
        entry!($set_step, |exec, node, $params $(, $context)?| set_step(exec, node, $node));
    )*};
}
node_kinds! {
    cuGraphAddKernelNode cuGraphKernelNodeSetParams cuGraphExecKernelNodeSetParams:
        |params| Node::Kernel(read_kernel(params.cast(), false)?);
    cuGraphAddKernelNode_v2 cuGraphKernelNodeSetParams_v2 cuGraphExecKernelNodeSetParams_v2:
        |params| Node::Kernel(read_kernel(params.cast(), true)?);
    cuGraphAddMemcpyNode cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams:
        |params, _| Node::Copy(xfer::from_3d(params.cast())?);
    cuGraphAddMemsetNode cuGraphMemsetNodeSetParams cuGraphExecMemsetNodeSetParams:
        |params, _| Node::Set(read_memset(params.cast())?);
    cuGraphAddHostNode cuGraphHostNodeSetParams cuGraphExecHostNodeSetParams:
        |params| read_host(params)?;
    cuGraphAddEventRecordNode cuGraphEventRecordNodeSetEvent cuGraphExecEventRecordNodeSetEvent:
        |event| Node::Record(Object::<Event>::get(event)?);
    cuGraphAddEventWaitNode cuGraphEventWaitNodeSetEvent cuGraphExecEventWaitNodeSetEvent:
        |event| Node::Wait(Object::<Event>::get(event)?);
}

entry!(cuGraphAddEmptyNode, |out, graph, after, count| add(out, graph, after, count, Node::Empty));

entry!(cuGraphAddBatchMemOpNode, |out, graph, after, count, params| {
    add(out, graph, after, count, read_batch(params.cast())?)
});

entry!(cuGraphBatchMemOpNodeSetParams, |node, params| set_node(node, read_batch(params.cast())?));

entry!(cuGraphAddChildGraphNode, |out, graph, after, count, child: Graph| {
    add(out, graph, after, count, Node::Child(clone_graph(child)))
});

entry!(cuGraphExecChildGraphNodeSetParams, |exec, node, child: Graph| {
    set_step(exec, node, Node::Child(clone_graph(child)))
});

entry!(cuGraphAddMemAllocNode, |out, graph, after, count, params| {
    Object::<Graph>::get(graph)?;
    add(out, graph, after, count, alloc_node(params.cast())?)
});

entry!(cuGraphAddMemFreeNode, |out, graph, after, count, dptr| {
    add(out, graph, after, count, Node::Free { address: dptr })
});

entry!(cuGraphAddNode, |out, graph, after, count, params| add_general(out, graph, after, count, params));

entry!(cuGraphAddNode_v2 | cuGraphAddNode_v3, |out, graph, after, _, count, params| {
    add_general(out, graph, after, count, params)
});

entry!(cuGraphNodeSetParams | cuGraphNodeSetParams_v2, |node, params| {
    set_node(node, read_general(params.cast())?)
});

entry!(cuGraphExecNodeSetParams, |exec, node, params| set_step(exec, node, read_general(params.cast())?));

// --- Edges -----------------------------------------------------------------------------------------

/// Pairs of node ids.
type Edges = Vec<(u64, u64)>;

unsafe fn edges_of(
    graph: sys::CUgraph,
    from: *const sys::CUgraphNode,
    to: *const sys::CUgraphNode,
    count: usize,
) -> Res<(Ref<Graph>, Edges)> {
    let graph = Object::<Graph>::get(graph)?;
    let (from, to) = (nodes(from, count)?, nodes(to, count)?);
    Ok((graph, from.iter().zip(to).map(|(a, b)| (a.id, b.id)).collect()))
}

unsafe fn connect(
    graph: sys::CUgraph,
    from: *const sys::CUgraphNode,
    to: *const sys::CUgraphNode,
    count: usize,
) -> Answer {
    let (graph, new) = edges_of(graph, from, to, count)?;
    let mut state = lock(&graph.state);
    let known = |id: u64| state.nodes.iter().any(|n| n.id == id);
    invalid_if(new.iter().any(|e| e.0 == e.1 || state.edges.contains(e) || !known(e.0) || !known(e.1)))?;
    let before = state.edges.len();
    state.edges.extend(new);
    if state.ordered().is_none() {
        state.edges.truncate(before);
        return Err(INVALID_VALUE);
    }
    Ok(())
}

unsafe fn disconnect(
    graph: sys::CUgraph,
    from: *const sys::CUgraphNode,
    to: *const sys::CUgraphNode,
    count: usize,
) -> Answer {
    let (graph, old) = edges_of(graph, from, to, count)?;
    let mut state = lock(&graph.state);
    invalid_if(old.iter().any(|e| !state.edges.contains(e)))?;
    state.edges.retain(|e| !old.contains(e));
    Ok(())
}

entry!(cuGraphAddDependencies, |graph, from, to, count| connect(graph, from, to, count));
entry!(cuGraphAddDependencies_v2, |graph, from, to, _, count| connect(graph, from, to, count));
entry!(cuGraphRemoveDependencies, |graph, from, to, count| disconnect(graph, from, to, count));
entry!(cuGraphRemoveDependencies_v2, |graph, from, to, _, count| disconnect(graph, from, to, count));

entry!(cuGraphDestroyNode, |node: GraphNode| {
    let graph = Object::<Graph>::get(node.graph.load(Acquire) as *mut c_void)?;
    let mut state = lock(&graph.state);
    state.nodes.retain(|n| n.id != node.id);
    state.edges.retain(|e| e.0 != node.id && e.1 != node.id);
    node.retire();
});

// --- Looking ---------------------------------------------------------------------------------------

/// Gives a list out as the driver does: no list asks for the number; a longer one is filled up with nulls.
unsafe fn put_nodes(list: &[NodeRef], out: *mut sys::CUgraphNode, count: *mut usize) -> Answer {
    invalid_if(count.is_null())?;
    if out.is_null() {
        return put(count, list.len());
    }
    for i in 0..*count {
        put(out.add(i), list.get(i).map_or(null_mut(), |n| n.handle()))?;
    }
    put(count, (*count).min(list.len()))
}

/// As [`put_nodes`], with the data of as many edges: none of them has any.
unsafe fn put_nodes_and_data(
    list: &[NodeRef],
    out: *mut sys::CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
    put_nodes(list, out, count)?;
    if !data.is_null() {
        std::ptr::write_bytes(data, 0, *count);
    }
    Ok(())
}

entry!(cuGraphGetNodes, |hGraph: Graph, nodes, numNodes| {
    let list = lock(&hGraph.state).nodes.clone();
    put_nodes(&list, nodes, numNodes)
});

entry!(cuGraphGetRootNodes, |graph: Graph, rootNodes, numRootNodes| {
    let state = lock(&graph.state);
    let roots: Vec<NodeRef> =
        state.nodes.iter().copied().filter(|n| !state.edges.iter().any(|e| e.1 == n.id)).collect();
    put_nodes(&roots, rootNodes, numRootNodes)
});

unsafe fn put_edges(
    graph: sys::CUgraph,
    from: *mut sys::CUgraphNode,
    to: *mut sys::CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
    let graph = Object::<Graph>::get(graph)?;
    let state = lock(&graph.state);
    let by_id: BTreeMap<u64, NodeRef> = state.nodes.iter().map(|n| (n.id, *n)).collect();
    let ends = |pick: fn(&(u64, u64)) -> u64| -> Vec<NodeRef> {
        state.edges.iter().filter_map(|e| by_id.get(&pick(e)).copied()).collect()
    };
    invalid_if(count.is_null() || from.is_null() != to.is_null())?;
    let mut number = *count;
    put_nodes(&ends(|e| e.0), from, &raw mut number)?;
    put_nodes_and_data(&ends(|e| e.1), to, data, count)
}

entry!(cuGraphGetEdges, |graph, from, to, count| put_edges(graph, from, to, null_mut(), count));
entry!(cuGraphGetEdges_v2, |graph, from, to, data, count| put_edges(graph, from, to, data, count));

unsafe fn neighbours(node: sys::CUgraphNode, forward: bool) -> Res<Vec<NodeRef>> {
    let node = Object::<GraphNode>::get(node)?;
    let graph = Object::<Graph>::get(node.graph.load(Acquire) as *mut c_void)?;
    let state = lock(&graph.state);
    let ids: Vec<u64> = state
        .edges
        .iter()
        .filter(|e| if forward { e.0 == node.id } else { e.1 == node.id })
        .map(|e| if forward { e.1 } else { e.0 })
        .collect();
    Ok(state.nodes.iter().copied().filter(|n| ids.contains(&n.id)).collect())
}

entry!(cuGraphNodeGetDependencies, |node, list, count| put_nodes(&neighbours(node, false)?, list, count));

entry!(cuGraphNodeGetDependencies_v2, |node, list, data, count| {
    put_nodes_and_data(&neighbours(node, false)?, list, data, count)
});

entry!(cuGraphNodeGetDependentNodes, |node, list, count| put_nodes(&neighbours(node, true)?, list, count));

entry!(cuGraphNodeGetDependentNodes_v2, |node, list, data, count| {
    put_nodes_and_data(&neighbours(node, true)?, list, data, count)
});

fn kind_of(node: &Node) -> u32 {
    match node {
        Node::Kernel(_) => 0,
        Node::Copy(_) => 1,
        Node::Set(_) => 2,
        Node::Host { .. } | Node::Callback { .. } => 3,
        Node::Child(_) => 4,
        Node::Empty => 5,
        Node::Wait(_) => 6,
        Node::Record(_) => 7,
        Node::Alloc { .. } => 10,
        Node::Free { .. } => 11,
        Node::MemOps(_) => 12,
    }
}

entry!(cuGraphNodeGetType, |hNode: GraphNode, type_| put(type_, kind_of(&lock(&hNode.node))));

entry!(cuGraphNodeGetContainingGraph, |hNode: GraphNode, phGraph| {
    put(phGraph, hNode.graph.load(Acquire) as sys::CUgraph)
});

entry!(cuGraphGetId, |hGraph: Graph, graphId| put(graphId, hGraph.id as u32));

entry!(cuGraphChildGraphNodeGetGraph, |hNode: GraphNode, phGraph| {
    match &*lock(&hNode.node) {
        Node::Child(graph) => put(phGraph, graph.handle()),
        _ => Err(INVALID_VALUE),
    }
});

entry!(cuGraphEventRecordNodeGetEvent, |hNode: GraphNode, event_out| {
    match &*lock(&hNode.node) {
        Node::Record(event) => put(event_out, event.handle()),
        _ => Err(INVALID_VALUE),
    }
});

entry!(cuGraphEventWaitNodeGetEvent, |hNode: GraphNode, event_out| {
    match &*lock(&hNode.node) {
        Node::Wait(event) => put(event_out, event.handle()),
        _ => Err(INVALID_VALUE),
    }
});

unsafe fn put_kernel(node: sys::CUgraphNode, out: *mut c_void, v2: bool) -> Answer {
    let node = Object::<GraphNode>::get(node)?;
    let node = lock(&node.node);
    let Node::Kernel(launch) = &*node else { return Err(INVALID_VALUE) };
    invalid_if(out.is_null())?;
    std::ptr::write_bytes(out.cast::<u8>(), 0, if v2 { 72 } else { 56 });
    out.cast::<*mut c_void>().write_unaligned(launch.function.handle());
    let ([a, b, c], [d, e, f]) = (launch.grid, launch.block);
    out.cast::<u8>().add(8).cast::<[u32; 7]>().write_unaligned([a, b, c, d, e, f, launch.shared]);
    out.cast::<u8>().add(40).cast::<[usize; 2]>().write_unaligned([launch.params, launch.extra]);
    Ok(())
}

entry!(cuGraphKernelNodeGetParams_v2, |hNode, nodeParams| put_kernel(hNode, nodeParams.cast(), true));
entry!(cuGraphKernelNodeGetParams, |hNode, nodeParams| put_kernel(hNode, nodeParams.cast(), false));

entry!(cuGraphHostNodeGetParams, |hNode: GraphNode, nodeParams| {
    match *lock(&hNode.node) {
        Node::Host { function, data } => {
            put(nodeParams, sys::CUDA_HOST_NODE_PARAMS { fn_: function, userData: data as *mut c_void })
        }
        _ => Err(INVALID_VALUE),
    }
});

// --- Executable graphs -----------------------------------------------------------------------------

/// One node of an executable graph: the id of the node it was made from, what it does, whether it is on.
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

impl Kind for Exec {
    const MAGIC: u64 = 0x6773_6861_7265_4558;
    const BAD: CUresult = INVALID_VALUE;
}

fn steps_of(graph: &Graph) -> Res<Vec<Step>> {
    let order = lock(&graph.state).ordered().ok_or(INVALID_VALUE)?;
    Ok(order.into_iter().map(|n| Step { of: n.id, node: lock(&n.node).clone(), enabled: true }).collect())
}

unsafe fn instantiate(out: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: u64) -> Answer {
    driver()?;
    invalid_if(flags & !0xf != 0)?;
    let steps = Mutex::new(steps_of(Object::<Graph>::get(graph)?)?);
    put(out, Object::create(Exec { id: next_id(), flags, steps }).handle())
}

entry!(cuGraphInstantiate | cuGraphInstantiate_v2, |phGraphExec, hGraph, phErrorNode, _, _| {
    put_opt(phErrorNode, null_mut());
    instantiate(phGraphExec, hGraph, 0)
});

entry!(cuGraphInstantiateWithFlags, |phGraphExec, hGraph, flags| instantiate(phGraphExec, hGraph, flags));

// `CUDA_GRAPH_INSTANTIATE_PARAMS`: flags, upload stream, error node, result.
entry!(cuGraphInstantiateWithParams, |_, phGraphExec, hGraph, instantiateParams| {
    invalid_if(instantiateParams.is_null())?;
    let flags = instantiateParams.cast::<u64>().read_unaligned();
    let answer = instantiate(phGraphExec, hGraph, flags);
    let at = instantiateParams.cast::<u8>();
    at.add(16).cast::<*mut c_void>().write_unaligned(null_mut());
    at.add(24).cast::<u32>().write_unaligned(u32::from(answer.is_err()));
    answer
});

entry!(cuGraphExecDestroy, driver, |hGraphExec: Exec| {
    if hGraphExec.retire() { Ok(()) } else { Err(INVALID_VALUE) }
});

entry!(cuGraphExecGetFlags, |hGraphExec: Exec, flags| put(flags, hGraphExec.flags));
entry!(cuGraphExecGetId, |hGraphExec: Exec, graphId| put(graphId, hGraphExec.id as u32));

entry!(cuGraphUpload, |_hGraph: Exec, _hStream: Stream| ());

entry!(cuGraphLaunch, |exec: Exec, stream: Stream| {
    legacy_not_implied(stream)?;
    let enabled = lock(&exec.steps).iter().filter(|s| s.enabled).count();
    calls::graph(enabled);
    let steps = lock(&exec.steps);
    if stream.capturing.load(Acquire) {
        // The launched graph becomes a graph within the captured one, its nodes in a row.
        let child = Graph::create();
        let of = child.handle::<c_void>() as u64;
        let mut last = Vec::new();
        for step in steps.iter().filter(|s| s.enabled) {
            last = vec![child.add(of, step.node.clone(), &last)?];
        }
        return submit(stream, Node::Child(child));
    }
    if exec.flags & 1 != 0 {
        // Auto free on launch: what the launch before left allocated goes first.
        for step in steps.iter() {
            if let Node::Alloc { address, .. } = step.node {
                let _ = stream_ordered::graph_free(address);
            }
        }
    }
    for step in steps.iter().filter(|s| s.enabled) {
        run_node(stream, &step.node)?;
    }
});

entry!(cuGraphNodeSetEnabled, |exec: Exec, node: GraphNode, isEnabled| {
    let mut steps = lock(&exec.steps);
    let step = steps.iter_mut().find(|s| s.of == node.id).ok_or(INVALID_VALUE)?;
    // Kernels, copies and sets only.
    invalid_if(kind_of(&step.node) > 2)?;
    step.enabled = isEnabled != 0;
});

entry!(cuGraphNodeGetEnabled, |exec: Exec, node: GraphNode, isEnabled| {
    let steps = lock(&exec.steps);
    let step = steps.iter().find(|s| s.of == node.id).ok_or(INVALID_VALUE)?;
    put(isEnabled, u32::from(step.enabled))
});

/// Takes the parameters of another graph of the same shape. `Err` carries the driver's reason: 2 topology, 3 node type.
fn update(exec: &Exec, graph: &Graph) -> Result<(), u32> {
    let new = steps_of(graph).map_err(|_| 1_u32)?;
    let mut steps = lock(&exec.steps);
    refuse_if(new.len() != steps.len(), 2_u32)?;
    refuse_if(new.iter().zip(steps.iter()).any(|(a, b)| kind_of(&a.node) != kind_of(&b.node)), 3_u32)?;
    for (old, new) in steps.iter_mut().zip(new) {
        old.node = new.node;
    }
    Ok(())
}

// `CUgraphExecUpdateResultInfo`: result, error node, error source.
entry!(cuGraphExecUpdate_v2, |hGraphExec, hGraph, resultInfo| {
    let updated = update(Object::<Exec>::get(hGraphExec)?, Object::<Graph>::get(hGraph)?);
    if !resultInfo.is_null() {
        std::ptr::write_bytes(resultInfo, 0, 1);
        resultInfo.cast::<u32>().write_unaligned(updated.err().unwrap_or(0));
    }
    updated.map_err(|_| CUresult(910))
});

entry!(cuGraphExecUpdate, |hGraphExec, hGraph, hErrorNode_out, updateResult_out| {
    let updated = update(Object::<Exec>::get(hGraphExec)?, Object::<Graph>::get(hGraph)?);
    put_opt(hErrorNode_out, null_mut());
    put_opt(updateResult_out, updated.err().unwrap_or(0));
    updated.map_err(|_| CUresult(910))
});

// --- User objects ----------------------------------------------------------------------------------

/// A counted object of the program, destroyed by its own function.
struct UserObject {
    count: AtomicUsize,
    data: usize,
    destroy: sys::CUhostFn,
}

impl Kind for UserObject {
    const MAGIC: u64 = 0x6773_6861_7265_554f;
    const BAD: CUresult = INVALID_VALUE;
}

entry!(cuUserObjectCreate, driver, |object_out, ptr, destroy, initialRefcount, flags| {
    invalid_if(destroy.is_none() || initialRefcount == 0 || flags != 1)?;
    let count = AtomicUsize::new(initialRefcount as usize);
    put(object_out, Object::create(UserObject { count, data: ptr as usize, destroy }).handle())
});

unsafe fn retain(object: sys::CUuserObject, count: c_uint) -> Answer {
    Object::<UserObject>::get(object)?.count.fetch_add(count as usize, AcqRel);
    Ok(())
}

unsafe fn release_object(object: sys::CUuserObject, count: c_uint) -> Answer {
    let object = Object::<UserObject>::get(object)?;
    let left = object.count.fetch_update(AcqRel, Acquire, |n| n.checked_sub(count as usize));
    if left.map_err(|_| INVALID_VALUE)? == count as usize
        && object.retire()
        && let Some(destroy) = object.destroy
    {
        destroy(object.data as *mut c_void);
    }
    Ok(())
}

entry!(cuUserObjectRetain, |object, count| retain(object, count));
entry!(cuUserObjectRelease, |object, count| release_object(object, count));

entry!(cuGraphRetainUserObject, |_graph: Graph, object, count, flags| {
    // CU_GRAPH_USER_OBJECT_MOVE takes the caller's references; they are kept for good.
    if flags & 1 != 0 { Ok(()) } else { retain(object, count) }
});

entry!(cuGraphReleaseUserObject, |_graph: Graph, object, count| release_object(object, count));
