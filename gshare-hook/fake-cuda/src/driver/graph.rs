//! Graphs: their nodes, edges, executable forms and launches.
//!
//! A launch of a graph runs its nodes one after the other, in an order that respects the edges, on the stream it is
//! launched on: branches do not overlap (hardware would overlap them).

use std::collections::BTreeSet;

use super::capture::legacy_not_implied;
use super::memory::Fill;
use super::module::{Function, Geometry, Launch};
use super::stream::{Event, MemOp};
use super::xfer::Transfer;
use super::*;

type StreamCallback = unsafe extern "C" fn(sys::CUstream, sys::CUresult, *mut c_void);

/// One thing a stream can be asked to do.
#[derive(Clone)]
pub(crate) enum Node {
    Kernel(Launch),
    Copy(Transfer),
    Set(Fill),
    Host { function: unsafe extern "C" fn(*mut c_void), data: usize },
    Callback { function: StreamCallback, stream: usize, data: usize },
    Child(Ref<Graph>),
    Empty,
    Record(Ref<Event>),
    Wait(Ref<Event>),
    MemOps(Vec<MemOp>),
    Alloc { device: Device, bytes: u64, address: u64 },
    Free { address: u64 },
}

/// What is submitted to a stream by files that know nothing of graphs.
macro_rules! nodes_of {
    ($($what:ty => $node:ident;)*) => {$(
        impl From<$what> for Node {
            fn from(what: $what) -> Self {
                Self::$node(what)
            }
        }
    )*};
}
nodes_of! { Launch => Kernel; Transfer => Copy; Fill => Set; }

/// A node in a graph.
pub(crate) struct GraphNode {
    pub(crate) id: u64,
    pub(crate) graph: AtomicU64,
    pub(crate) node: Mutex<Node>,
}

object!(GraphNode, b"gshareNO", INVALID_VALUE);

pub(crate) type NodeRef = Ref<GraphNode>;

impl GraphNode {
    fn create(graph: u64, node: Node) -> NodeRef {
        Object::create(Self { id: next_id(), graph: AtomicU64::new(graph), node: Mutex::new(node) })
    }
}

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

object!(Graph, b"gshareGR", INVALID_VALUE);

impl Graph {
    pub(crate) fn create() -> Ref<Self> {
        Object::create(Self { id: next_id(), state: Mutex::default() })
    }

    pub(crate) fn add(&'static self, graph: u64, node: Node, after: &[NodeRef]) -> Res<NodeRef> {
        let mut state = lock(&self.state);
        invalid_if(after.iter().any(|d| !state.nodes.iter().any(|n| n.id == d.id)))?;
        let node = GraphNode::create(graph, node);
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
        // Each node, and how many edges to it are not followed yet.
        let mut left: BTreeMap<u64, (NodeRef, usize)> = self.nodes.iter().map(|n| (n.id, (*n, 0))).collect();
        let mut follow: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (from, to) in &self.edges {
            left.get_mut(to)?.1 += 1;
            follow.entry(*from).or_default().push(*to);
        }
        let mut ready: BTreeSet<u64> = left.iter().filter(|(_, n)| n.1 == 0).map(|(id, _)| *id).collect();
        let mut out = Vec::with_capacity(self.nodes.len());
        while let Some(id) = ready.pop_first() {
            out.push(left.get(&id)?.0);
            for to in follow.get(&id).into_iter().flatten() {
                let (_, count) = left.get_mut(to)?;
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
        &Node::Host { function, data } => push_call(stream, move || {
            // SAFETY: the caller of cuLaunchHostFunc gave the function and its argument for this call.
            unsafe { function(data as *mut c_void) };
        }),
        &Node::Callback { function, stream: handle, data } => push_call(stream, move || {
            let success = sys::CUresult::CUDA_SUCCESS;
            // SAFETY: as above, for cuStreamAddCallback.
            unsafe { function(handle as sys::CUstream, success, data as *mut c_void) };
        }),
        Node::Child(graph) => {
            let order = lock(&graph.state).ordered().ok_or(INVALID_VALUE)?;
            order.into_iter().try_for_each(|node| {
                let node = lock(&node.node).clone();
                run_node(stream, &node)
            })
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

type Nodes = *const sys::CUgraphNode;
type NodesOut = *mut sys::CUgraphNode;

pub(super) unsafe fn nodes(list: Nodes, count: usize) -> Res<Vec<NodeRef>> {
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

entry!(cuGraphClone, driver, |copy, original: Graph| put(copy, clone_graph(original).handle()));

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
        let new = GraphNode::create(of, inner);
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

unsafe fn add(out: NodesOut, graph: sys::CUgraph, after: Nodes, count: usize, node: Node) -> Answer {
    driver()?;
    invalid_if(out.is_null())?;
    let of = Object::<Graph>::get(graph)?;
    let made = of.add(graph as u64, node, &nodes(after, count)?)?;
    put(out, made.handle())
}

/// `CUDA_KERNEL_NODE_PARAMS`: function, grid, block, shared bytes, arguments, extra; v2 adds kernel and context.
unsafe fn read_kernel(params: *const c_void, v2: bool) -> Res<Node> {
    invalid_if(params.is_null())?;
    let at = |offset: usize| params.cast::<u8>().add(offset).cast::<*mut *mut c_void>().read_unaligned();
    let function = if at(0).is_null() && v2 { at(56) } else { at(0) };
    let [gx, gy, gz, bx, by, bz, shared] = params.cast::<u8>().add(8).cast::<[u32; 7]>().read_unaligned();
    let function = Object::<Function>::get(function)?;
    let geometry = Geometry { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: false };
    Launch::new(function, geometry, (at(40), at(48))).map(Node::Kernel)
}

unsafe fn read_memset(params: *const c_void) -> Res<Node> {
    invalid_if(params.is_null())?;
    let fill = params.cast::<Fill>().read_unaligned();
    invalid_if(!matches!(fill.element, 1 | 2 | 4))?;
    Ok(Node::Set(fill))
}

unsafe fn read_host(params: *const sys::CUDA_HOST_NODE_PARAMS) -> Res<Node> {
    invalid_if(params.is_null())?;
    Ok(Node::Host { function: (*params).fn_.ok_or(INVALID_VALUE)?, data: (*params).userData as usize })
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

/// The general form: type, three reserved words, then the parameters of that type.
unsafe fn read_general(params: *mut c_void) -> Res<Node> {
    invalid_if(params.is_null())?;
    let kind = params.cast::<u32>().read_unaligned();
    let at = params.cast::<u8>().add(16);
    let handle = at.cast::<*mut c_void>();
    Ok(match kind {
        0 => read_kernel(at.cast(), true)?,
        // Flags and context stand before the copy's description.
        1 => Node::Copy(xfer::from_3d(at.add(16).cast())?),
        2 => read_memset(at.cast())?,
        3 => read_host(at.cast())?,
        4 => Node::Child(clone_graph(Object::get(handle.read_unaligned())?)),
        5 => Node::Empty,
        6 => Node::Wait(Object::get(handle.read_unaligned())?),
        7 => Node::Record(Object::get(handle.read_unaligned())?),
        10 => alloc_node(at.cast())?,
        11 => Node::Free { address: at.cast::<u64>().read_unaligned() },
        12 => read_batch(at.cast())?,
        _ => return Err(NOT_SUPPORTED),
    })
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
    Object::<Exec>::get(exec)?.step(Object::get(node)?, |step| {
        invalid_if(kind_of(&step.node) != kind_of(&new))?;
        step.node = new;
        Ok(())
    })
}

// --- Nodes by kind ---------------------------------------------------------------------------------

/// The three calls of a kind of node: one adds such a node, one gives it other parameters, one does that in an executable graph.
///
/// `add set set_in_executable (parameters) node`, with `_` where there is no such call; a `_` follows the parameters where adding
/// takes a context as well.
macro_rules! node_kinds {
    ($($add:ident $set:tt $step:tt ($params:ident $(, $context:tt)?) $node:expr;)*) => {$(
        entry!($add, |out, graph, after, count, $params $(, $context)?| add(out, graph, after, count, $node));
        node_kinds!(@set $set ($params) $node);
        node_kinds!(@step $step ($params $(, $context)?) $node);
    )*};
    (@ $what:ident _ $params:tt $node:expr) => {};
    (@set $set:ident ($params:ident) $node:expr) => {
        entry!($set, |node, $params| set_node(node, $node));
    };
    (@step $step:ident ($($params:tt)*) $node:expr) => {
        entry!($step, |exec, node, $($params)*| set_step(exec, node, $node));
    };
}
node_kinds! {
    cuGraphAddKernelNode cuGraphKernelNodeSetParams cuGraphExecKernelNodeSetParams
        (params) read_kernel(params.cast(), false)?;
    cuGraphAddKernelNode_v2 cuGraphKernelNodeSetParams_v2 cuGraphExecKernelNodeSetParams_v2
        (params) read_kernel(params.cast(), true)?;
    cuGraphAddMemcpyNode cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams
        (params, _) Node::Copy(xfer::from_3d(params.cast())?);
    cuGraphAddMemsetNode cuGraphMemsetNodeSetParams cuGraphExecMemsetNodeSetParams
        (params, _) read_memset(params.cast())?;
    cuGraphAddHostNode cuGraphHostNodeSetParams cuGraphExecHostNodeSetParams
        (params) read_host(params)?;
    cuGraphAddEventRecordNode cuGraphEventRecordNodeSetEvent cuGraphExecEventRecordNodeSetEvent
        (event) Node::Record(Object::get(event)?);
    cuGraphAddEventWaitNode cuGraphEventWaitNodeSetEvent cuGraphExecEventWaitNodeSetEvent
        (event) Node::Wait(Object::get(event)?);
    cuGraphAddBatchMemOpNode cuGraphBatchMemOpNodeSetParams _ (params) read_batch(params.cast())?;
    cuGraphAddChildGraphNode _ cuGraphExecChildGraphNodeSetParams
        (child) Node::Child(clone_graph(Object::get(child)?));
    cuGraphAddMemFreeNode _ _ (address) Node::Free { address };
}

entry!(cuGraphAddEmptyNode, |out, graph, after, count| add(out, graph, after, count, Node::Empty));

// What has effects of its own is read when the graph is known to exist.
entry!(cuGraphAddMemAllocNode, |out, graph, after, count, params| {
    Object::<Graph>::get(graph)?;
    add(out, graph, after, count, alloc_node(params.cast())?)
});

unsafe fn add_any(
    out: NodesOut,
    graph: sys::CUgraph,
    after: Nodes,
    count: usize,
    params: *mut sys::CUgraphNodeParams,
) -> Answer {
    Object::<Graph>::get(graph)?;
    add(out, graph, after, count, read_general(params.cast())?)
}

entry!(cuGraphAddNode, |out, graph, after, count, params| add_any(out, graph, after, count, params));

entry!(cuGraphAddNode_v2 | cuGraphAddNode_v3, |out, graph, after, _, count, params| {
    add_any(out, graph, after, count, params)
});

entry!(cuGraphNodeSetParams | cuGraphNodeSetParams_v2, |node, params| {
    set_node(node, read_general(params.cast())?)
});

entry!(cuGraphExecNodeSetParams, |exec, node, params| set_step(exec, node, read_general(params.cast())?));

/// Calls that tell what a node of a kind does.
macro_rules! node_values {
    ($($name:ident |$node:pat, $out:ident| $answer:expr;)*) => {$(
        entry!($name, |node: GraphNode, $out| {
            let node = lock(&node.node);
            let $node = &*node else { return Err(INVALID_VALUE) };
            $answer
        });
    )*};
}
node_values! {
    cuGraphKernelNodeGetParams |Node::Kernel(launch), out| put_kernel(launch, out.cast(), 56);
    cuGraphKernelNodeGetParams_v2 |Node::Kernel(launch), out| put_kernel(launch, out.cast(), 72);
    cuGraphChildGraphNodeGetGraph |Node::Child(graph), out| put(out, graph.handle());
    cuGraphEventRecordNodeGetEvent |Node::Record(event), out| put(out, event.handle());
    cuGraphEventWaitNodeGetEvent |Node::Wait(event), out| put(out, event.handle());
    cuGraphMemFreeNodeGetParams |Node::Free { address }, out| put(out, *address);
    cuGraphMemAllocNodeGetParams |Node::Alloc { device, bytes, address }, out| {
        invalid_if(out.is_null())?;
        std::ptr::write_bytes(out, 0, 1);
        put(out.cast::<[u32; 4]>(), [1, 0, 1, device.ordinal as u32])?;
        put(out.cast::<u8>().add(ALLOC_BYTES_AT).cast::<[u64; 2]>(), [*bytes, *address])
    };
    cuGraphHostNodeGetParams |Node::Host { function, data }, out| {
        put(out, sys::CUDA_HOST_NODE_PARAMS { fn_: Some(*function), userData: *data as *mut c_void })
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

entry!(
    cuGraphAddDependencies,
    cuGraphAddDependencies_v2(graph, from, to, _, count),
    |graph: Graph, from, to, count| {
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
    }
);

entry!(
    cuGraphRemoveDependencies,
    cuGraphRemoveDependencies_v2(graph, from, to, _, count),
    |graph: Graph, from, to, count| {
        let old = edges(from, to, count)?;
        let mut state = lock(&graph.state);
        invalid_if(old.iter().any(|e| !state.edges.contains(e)))?;
        state.edges.retain(|e| !old.contains(e));
    }
);

entry!(cuGraphDestroyNode, |node: GraphNode| {
    let graph = Object::<Graph>::get(node.graph.load(Acquire) as *mut c_void)?;
    let mut state = lock(&graph.state);
    state.nodes.retain(|n| n.id != node.id);
    state.edges.retain(|e| e.0 != node.id && e.1 != node.id);
    node.retire();
});

// --- Looking ---------------------------------------------------------------------------------------

/// Gives a list out as the driver does: no list asks for the number; a longer one is filled up with nulls. Where data of as many
/// edges are asked for: none of them has any.
unsafe fn put_nodes(
    list: &[NodeRef],
    out: NodesOut,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
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

unsafe fn put_edges(
    graph: Ref<Graph>,
    from: NodesOut,
    to: NodesOut,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
    let state = lock(&graph.state);
    let by_id: BTreeMap<u64, NodeRef> = state.nodes.iter().map(|n| (n.id, *n)).collect();
    let ends = |pick: fn(&(u64, u64)) -> u64| -> Vec<NodeRef> {
        state.edges.iter().filter_map(|e| by_id.get(&pick(e)).copied()).collect()
    };
    invalid_if(count.is_null() || from.is_null() != to.is_null())?;
    let mut number = *count;
    put_nodes(&ends(|e| e.0), from, null_mut(), &raw mut number)?;
    put_nodes(&ends(|e| e.1), to, data, count)
}

entry!(cuGraphGetEdges, |graph: Graph, from, to, count| put_edges(graph, from, to, null_mut(), count));
entry!(cuGraphGetEdges_v2, |graph: Graph, from, to, data, count| put_edges(graph, from, to, data, count));

unsafe fn neighbours(node: NodeRef, forward: bool) -> Res<Vec<NodeRef>> {
    let graph = Object::<Graph>::get(node.graph.load(Acquire) as *mut c_void)?;
    let state = lock(&graph.state);
    let other = |&(from, to): &(u64, u64)| match forward {
        true => (from == node.id).then_some(to),
        false => (to == node.id).then_some(from),
    };
    let ids: Vec<u64> = state.edges.iter().filter_map(other).collect();
    Ok(state.nodes.iter().copied().filter(|n| ids.contains(&n.id)).collect())
}

entry!(cuGraphNodeGetDependencies, |node: GraphNode, list, count| {
    put_nodes(&neighbours(node, false)?, list, null_mut(), count)
});

entry!(cuGraphNodeGetDependencies_v2, |node: GraphNode, list, data, count| {
    put_nodes(&neighbours(node, false)?, list, data, count)
});

entry!(cuGraphNodeGetDependentNodes, |node: GraphNode, list, count| {
    put_nodes(&neighbours(node, true)?, list, null_mut(), count)
});

entry!(cuGraphNodeGetDependentNodes_v2, |node: GraphNode, list, data, count| {
    put_nodes(&neighbours(node, true)?, list, data, count)
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

entry!(cuGraphNodeGetType, |node: GraphNode, type_| put(type_, kind_of(&lock(&node.node))));

entry!(cuGraphNodeGetContainingGraph, |node: GraphNode, graph| {
    put(graph, node.graph.load(Acquire) as sys::CUgraph)
});

entry!(cuGraphGetId, |graph: Graph, graphId| put(graphId, graph.id as u32));

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

object!(Exec, b"gshareEX", INVALID_VALUE);

impl Exec {
    fn step<R>(&self, node: NodeRef, f: impl FnOnce(&mut Step) -> Res<R>) -> Res<R> {
        let mut steps = lock(&self.steps);
        f(steps.iter_mut().find(|s| s.of == node.id).ok_or(INVALID_VALUE)?)
    }
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
entry!(cuGraphInstantiateWithParams, |_, phGraphExec, hGraph, params: Given| {
    let answer = instantiate(phGraphExec, hGraph, params.cast::<u64>().read_unaligned());
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
    exec.step(node, |step| {
        // Kernels, copies and sets only.
        invalid_if(kind_of(&step.node) > 2)?;
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
    refuse_if(new.iter().zip(steps.iter()).any(|(a, b)| kind_of(&a.node) != kind_of(&b.node)), 3_u32)?;
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
    updated.map_err(|_| CUresult(910))
});

entry!(cuGraphExecUpdate, |exec: Exec, graph: Graph, error_node, reason| {
    let updated = update(exec, graph);
    put_opt(error_node, null_mut());
    put_opt(reason, updated.err().unwrap_or(0));
    updated.map_err(|_| CUresult(910))
});

// --- User objects ----------------------------------------------------------------------------------

/// A counted object of the program, destroyed by its own function.
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
    // CU_GRAPH_USER_OBJECT_MOVE takes the caller's references; they are kept for good.
    if flags & 1 == 0 {
        Object::<UserObject>::get(object)?.retain(count);
    }
});

entry!(cuGraphReleaseUserObject, |_graph: Graph, object: UserObject, count| {
    UserObject::release(object, count)
});
