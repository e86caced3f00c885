//! Graphs and stream capture.
//!
//! A launch of a graph runs its nodes one after the other, in an order that respects the edges, on the stream it is
//! launched on: branches do not overlap (hardware would overlap them).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use super::core::*;
use super::memory::Fill;
use super::module::Launch;
use super::stream::{Event, MemOp};
use super::xfer::Transfer;
use super::*;

/// One thing a stream can be asked to do.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    Kernel(Launch),
    Copy(Transfer),
    Set(Fill),
    Host { function: sys::CUhostFn, data: usize },
    Callback { function: sys::CUstreamCallback, stream: usize, data: usize },
    Child(&'static Object<Graph>),
    Empty,
    Record(&'static Object<Event>),
    Wait(&'static Object<Event>),
    MemOps(Vec<MemOp>),
    Alloc { gpu: u32, ordinal: i32, bytes: u64, address: u64 },
    Free { address: u64 },
}

/// A node in a graph.
#[derive(Debug)]
pub(crate) struct GraphNode {
    pub(crate) id: u64,
    pub(crate) graph: AtomicU64,
    pub(crate) node: Mutex<Node>,
}

impl Kind for GraphNode {
    const MAGIC: u64 = 0x6773_6861_7265_4e4f;
    const BAD: CUresult = INVALID_VALUE;
}

type NodeRef = &'static Object<GraphNode>;

#[derive(Debug, Default)]
pub(crate) struct GraphState {
    pub(crate) nodes: Vec<NodeRef>,
    /// From, to: ids.
    pub(crate) edges: Vec<(u64, u64)>,
    /// Node of the original -> node here, in a clone.
    pub(crate) origin: BTreeMap<u64, NodeRef>,
}

/// A graph.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) id: u64,
    pub(crate) state: Mutex<GraphState>,
    /// Instantiations that hold memory of this graph's allocation nodes.
    pub(crate) users: AtomicUsize,
}

impl Kind for Graph {
    const MAGIC: u64 = 0x6773_6861_7265_4752;
    const BAD: CUresult = INVALID_VALUE;
}

impl Graph {
    pub(crate) fn create() -> &'static Object<Self> {
        Object::create(Self { id: next_id(), state: Mutex::default(), users: AtomicUsize::new(0) })
    }

    pub(crate) fn add(&'static self, graph: u64, node: Node, after: &[NodeRef]) -> Result<NodeRef, CUresult> {
        let mut state = lock(&self.state);
        if after.iter().any(|d| !state.nodes.iter().any(|n| n.id == d.id)) {
            return Err(INVALID_VALUE);
        }
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
pub(crate) fn run_node(stream: &'static Object<Stream>, node: &Node) -> Answer {
    match node {
        Node::Kernel(launch) => launch.run(stream),
        Node::Copy(transfer) => transfer.run(stream),
        Node::Set(fill) => fill.run(stream),
        Node::Host { function, data } => {
            let (function, data) = (*function, *data);
            push_host(
                stream,
                Box::new(move || {
                    if let Some(function) = function {
                        // SAFETY: the caller of cuLaunchHostFunc gave the function and its argument for this call.
                        unsafe { function(data as *mut c_void) };
                    }
                    true
                }),
            )?;
            Ok(())
        }
        Node::Callback { function, stream: handle, data } => {
            let (function, handle, data) = (*function, *handle, *data);
            push_host(
                stream,
                Box::new(move || {
                    if let Some(function) = function {
                        // SAFETY: as above, for cuStreamAddCallback; 0 is CUDA_SUCCESS.
                        unsafe {
                            function(
                                handle as sys::CUstream,
                                sys::CUresult::CUDA_SUCCESS,
                                data as *mut c_void,
                            );
                        };
                    }
                    true
                }),
            )?;
            Ok(())
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
        Node::Alloc { gpu, bytes, address, .. } => memory::graph_alloc(stream, *gpu, *bytes, *address),
        Node::Free { address } => memory::graph_free(stream, *address),
    }
}

// --- Capture ---------------------------------------------------------------------------------------

/// One capture, shared by the streams that take part.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) graph: &'static Object<Graph>,
    pub(crate) mode: u32,
    pub(crate) invalid: AtomicBool,
    /// Whether the graph was there before (capture to graph).
    pub(crate) given: bool,
    origin: u64,
    thread: std::thread::ThreadId,
    streams: Mutex<Vec<&'static Object<Stream>>>,
}

/// A stream's part in a capture.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    pub(crate) session: Arc<Session>,
    pub(crate) after: Vec<NodeRef>,
    /// What cuStreamGetCaptureInfo last gave out: the caller reads it until the next call on the stream.
    pub(crate) shown: Vec<usize>,
}

static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static SESSIONS: Mutex<Vec<Arc<Session>>> = Mutex::new(Vec::new());

/// Refuses a call that must not happen while the calling thread, or under its mode another one, captures.
pub(crate) fn not_while_capturing() -> Answer {
    if ACTIVE.load(Acquire) == 0 {
        return Ok(());
    }
    let mode = CAPTURE_MODE.try_with(std::cell::Cell::get).unwrap_or(0);
    if mode == 2 {
        return Ok(());
    }
    let me = std::thread::current().id();
    let mut hit = false;
    for session in lock(&SESSIONS).iter() {
        // 0 global: any thread; 1 thread-local: the capturing thread; 2 relaxed: nobody.
        let bars = match session.mode {
            0 => session.thread == me || mode == 0,
            1 => session.thread == me,
            _ => false,
        };
        if bars {
            session.invalid.store(true, Release);
            hit = true;
        }
    }
    if hit { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Refuses a synchronising call on a stream that takes part in a capture, and spoils the capture.
pub(crate) fn not_capturing(stream: &Stream) -> Answer {
    if ACTIVE.load(Acquire) == 0 {
        return Ok(());
    }
    if stream.capturing.load(Acquire) {
        if let Some(capture) = lock(&stream.capture).as_ref() {
            capture.session.invalid.store(true, Release);
        }
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    legacy_not_implied(stream)
}

/// The legacy stream would depend on a blocking stream that captures.
pub(crate) fn legacy_not_implied(stream: &Stream) -> Answer {
    if ACTIVE.load(Acquire) > 0 && stream.kind == StreamKind::Legacy {
        for other in lock(&stream.context.streams).iter() {
            if other.blocking() && other.capturing.load(Acquire) {
                if let Some(capture) = lock(&other.capture).as_ref() {
                    capture.session.invalid.store(true, Release);
                }
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        }
    }
    Ok(())
}

/// Refuses when any stream of the context captures.
pub(crate) fn context_not_capturing(context: &Context) -> Answer {
    if ACTIVE.load(Acquire) > 0 {
        for stream in context.all_streams() {
            if stream.capturing.load(Acquire) {
                if let Some(capture) = lock(&stream.capture).as_ref() {
                    capture.session.invalid.store(true, Release);
                }
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
        }
    }
    Ok(())
}

/// Adds a node to the graph a stream captures.
pub(crate) fn capture_node(stream: &'static Object<Stream>, node: Node) -> Answer {
    let mut capture = lock(&stream.capture);
    let Some(capture) = capture.as_mut() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    if capture.session.invalid.load(Acquire) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    match node {
        Node::Record(event) => {
            // The event stands for this point of the capture; nothing runs.
            *lock(&event.captured) = Some((capture.session.clone(), capture.after.clone()));
            return Ok(());
        }
        Node::Wait(event) => {
            let point = lock(&event.captured).clone();
            let Some((session, after)) = point else {
                capture.session.invalid.store(true, Release);
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
            };
            if !Arc::ptr_eq(&session, &capture.session) {
                capture.session.invalid.store(true, Release);
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            for node in after {
                if !capture.after.iter().any(|n| n.id == node.id) {
                    capture.after.push(node);
                }
            }
            return Ok(());
        }
        _ => {}
    }
    let graph = capture.session.graph;
    let node = graph.add(graph.handle::<c_void>() as u64, node, &capture.after)?;
    capture.after = vec![node];
    Ok(())
}

/// A stream that waits for a captured event takes part in its capture.
pub(crate) fn join_capture(stream: &'static Object<Stream>, event: &Event) -> Result<bool, CUresult> {
    if ACTIVE.load(Acquire) == 0 || stream.capturing.load(Acquire) {
        return Ok(false);
    }
    let Some((session, after)) = lock(&event.captured).clone() else { return Ok(false) };
    if !lock(&SESSIONS).iter().any(|s| Arc::ptr_eq(s, &session)) {
        return Ok(false);
    }
    if stream.kind == StreamKind::Legacy {
        session.invalid.store(true, Release);
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    lock(&session.streams).push(stream);
    *lock(&stream.capture) = Some(Capture { session, after, shown: Vec::new() });
    stream.capturing.store(true, Release);
    Ok(true)
}

fn begin(
    stream: &'static Object<Stream>,
    mode: u32,
    graph: Option<&'static Object<Graph>>,
    after: Vec<NodeRef>,
) -> Answer {
    if mode > 2 {
        return Err(INVALID_VALUE);
    }
    if stream.kind == StreamKind::Legacy {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut capture = lock(&stream.capture);
    if capture.is_some() {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    }
    let session = Arc::new(Session {
        id: next_id(),
        graph: graph.unwrap_or_else(Graph::create),
        mode,
        invalid: AtomicBool::new(false),
        given: graph.is_some(),
        origin: stream.id,
        thread: std::thread::current().id(),
        streams: Mutex::new(vec![stream]),
    });
    lock(&SESSIONS).push(session.clone());
    ACTIVE.fetch_add(1, AcqRel);
    *capture = Some(Capture { session, after, shown: Vec::new() });
    stream.capturing.store(true, Release);
    Ok(())
}

pub(super) unsafe fn cuStreamBeginCapture(flavor: Flavor, hStream: sys::CUstream) -> Answer {
    begin(stream(flavor, hStream)?, 0, None, Vec::new())
}

pub(super) unsafe fn cuStreamBeginCapture_v2(flavor: Flavor, hStream: sys::CUstream, mode: c_uint) -> Answer {
    begin(stream(flavor, hStream)?, mode, None, Vec::new())
}

pub(super) unsafe fn cuStreamBeginCaptureToGraph(
    flavor: Flavor,
    hStream: sys::CUstream,
    hGraph: sys::CUgraph,
    dependencies: *const sys::CUgraphNode,
    _dependencyData: *const sys::CUgraphEdgeData,
    numDependencies: usize,
    mode: c_uint,
) -> Answer {
    let graph = Object::<Graph>::get(hGraph)?;
    let after = nodes(dependencies, numDependencies)?;
    begin(stream(flavor, hStream)?, mode, Some(graph), after)
}

pub(super) unsafe fn cuStreamEndCapture(
    flavor: Flavor,
    hStream: sys::CUstream,
    phGraph: *mut sys::CUgraph,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    let Some(capture) = lock(&stream.capture).clone() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    let session = &capture.session;
    if session.origin != stream.id {
        session.invalid.store(true, Release);
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if session.mode != 2 && session.thread != std::thread::current().id() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    // Whatever no node follows must have come back to the origin.
    let mut joined = true;
    for other in lock(&session.streams).drain(..) {
        let part = lock(&other.capture).take();
        other.capturing.store(false, Release);
        if let Some(part) = part {
            let state = lock(&session.graph.state);
            joined &= part.after.iter().all(|n| {
                state.edges.iter().any(|(from, _)| *from == n.id)
                    || capture.after.iter().any(|m| m.id == n.id)
            });
        }
    }
    lock(&SESSIONS).retain(|s| !Arc::ptr_eq(s, session));
    ACTIVE.fetch_sub(1, AcqRel);
    put_opt(phGraph, std::ptr::null_mut());
    if session.invalid.load(Acquire) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    if !joined {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    }
    put_opt(phGraph, session.graph.handle());
    Ok(())
}

pub(super) unsafe fn cuStreamIsCapturing(
    flavor: Flavor,
    hStream: sys::CUstream,
    captureStatus: *mut c_uint,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    legacy_not_implied(stream)?;
    put(captureStatus, capture_status(stream))
}

fn capture_status(stream: &Stream) -> u32 {
    match lock(&stream.capture).as_ref() {
        None => 0,
        Some(capture) if capture.session.invalid.load(Acquire) => 2,
        Some(_) => 1,
    }
}

pub(super) unsafe fn cuStreamGetCaptureInfo(
    flavor: Flavor,
    hStream: sys::CUstream,
    captureStatus_out: *mut c_uint,
    id_out: *mut u64,
) -> Answer {
    let none = std::ptr::null_mut();
    cuStreamGetCaptureInfo_v2(flavor, hStream, captureStatus_out, id_out, none, none.cast(), none.cast())
}

pub(super) unsafe fn cuStreamGetCaptureInfo_v2(
    flavor: Flavor,
    hStream: sys::CUstream,
    captureStatus_out: *mut c_uint,
    id_out: *mut u64,
    graph_out: *mut sys::CUgraph,
    dependencies_out: *mut *const sys::CUgraphNode,
    numDependencies_out: *mut usize,
) -> Answer {
    let none = std::ptr::null_mut();
    cuStreamGetCaptureInfo_v3(
        flavor,
        hStream,
        captureStatus_out,
        id_out,
        graph_out,
        dependencies_out,
        none,
        numDependencies_out,
    )
}

pub(super) unsafe fn cuStreamGetCaptureInfo_v3(
    flavor: Flavor,
    hStream: sys::CUstream,
    captureStatus_out: *mut c_uint,
    id_out: *mut u64,
    graph_out: *mut sys::CUgraph,
    dependencies_out: *mut *const sys::CUgraphNode,
    edgeData_out: *mut *const sys::CUgraphEdgeData,
    numDependencies_out: *mut usize,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    legacy_not_implied(stream)?;
    put(captureStatus_out, capture_status(stream))?;
    let mut capture = lock(&stream.capture);
    if let Some(capture) = capture.as_mut() {
        put_opt(id_out, capture.session.id);
        put_opt(graph_out, capture.session.graph.handle());
        capture.shown = capture.after.iter().map(|n| n.handle::<c_void>() as usize).collect();
        put_opt(dependencies_out, capture.shown.as_ptr().cast());
        put_opt(edgeData_out, std::ptr::null());
        put_opt(numDependencies_out, capture.shown.len());
    }
    Ok(())
}

pub(super) unsafe fn cuStreamUpdateCaptureDependencies(
    flavor: Flavor,
    hStream: sys::CUstream,
    dependencies: *mut sys::CUgraphNode,
    numDependencies: usize,
    flags: c_uint,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    let new = nodes(dependencies, numDependencies)?;
    let mut capture = lock(&stream.capture);
    let Some(capture) = capture.as_mut() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    if flags == 1 {
        capture.after = new;
    } else {
        for node in new {
            if !capture.after.iter().any(|n| n.id == node.id) {
                capture.after.push(node);
            }
        }
    }
    Ok(())
}

pub(super) unsafe fn cuStreamUpdateCaptureDependencies_v2(
    flavor: Flavor,
    hStream: sys::CUstream,
    dependencies: *mut sys::CUgraphNode,
    _dependencyData: *const sys::CUgraphEdgeData,
    numDependencies: usize,
    flags: c_uint,
) -> Answer {
    cuStreamUpdateCaptureDependencies(flavor, hStream, dependencies, numDependencies, flags)
}

pub(super) unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> Answer {
    if mode.is_null() || *mode > 2 {
        return Err(INVALID_VALUE);
    }
    let old = CAPTURE_MODE.try_with(|cell| cell.replace(*mode)).unwrap_or(0);
    *mode = old;
    Ok(())
}

unsafe fn nodes(list: *const sys::CUgraphNode, count: usize) -> Result<Vec<NodeRef>, CUresult> {
    if count > 0 && list.is_null() {
        return Err(INVALID_VALUE);
    }
    (0..count).map(|i| Object::<GraphNode>::get(*list.add(i))).collect()
}

/// Adds a node to the graph a stream captures, also a record or a wait.
pub(crate) fn add_captured(stream: &'static Object<Stream>, node: Node) -> Answer {
    let mut capture = lock(&stream.capture);
    let Some(capture) = capture.as_mut() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    if capture.session.invalid.load(Acquire) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let graph = capture.session.graph;
    let node = graph.add(graph.handle::<c_void>() as u64, node, &capture.after)?;
    capture.after = vec![node];
    Ok(())
}
