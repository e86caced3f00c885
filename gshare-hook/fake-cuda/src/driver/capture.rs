//! Stream capture: what streams are asked to do becomes nodes of a graph.

use super::graph::{Graph, Node, NodeRef, nodes};
use super::stream::Event;
use super::*;

/// One capture, shared by the streams that take part.
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) graph: Ref<Graph>,
    pub(crate) mode: u32,
    pub(crate) invalid: AtomicBool,
    origin: u64,
    thread: std::thread::ThreadId,
    streams: Mutex<Vec<Ref<Stream>>>,
}

impl Session {
    /// Spoils the capture, and refuses the call that does.
    fn spoil<R>(&self, error: CUresult) -> Res<R> {
        self.invalid.store(true, Release);
        Err(error)
    }
}

/// A stream's part in a capture.
#[derive(Clone)]
pub(crate) struct Capture {
    pub(crate) session: Arc<Session>,
    pub(crate) after: Vec<NodeRef>,
    /// The nodes that cuStreamGetCaptureInfo last gave out: the caller reads them until the next call on the stream.
    pub(crate) shown: Vec<usize>,
}

static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static SESSIONS: Mutex<Vec<Arc<Session>>> = Mutex::new(Vec::new());

/// Tells if any stream of the process captures.
#[inline]
pub(crate) fn any_capture() -> bool {
    ACTIVE.load(Acquire) > 0
}

/// Refuses a call that must not happen while the calling thread, or under its mode another one, captures.
pub(crate) fn not_while_capturing() -> Answer {
    if ACTIVE.load(Acquire) == 0 {
        return Ok(());
    }
    let mode = CAPTURE_MODE.get();
    if mode == 2 {
        return Ok(());
    }
    let me = std::thread::current().id();
    let mut hit = false;
    for session in lock(&SESSIONS).iter() {
        // 0 global: any thread; 1 thread-local: the capturing thread; 2 relaxed: no thread.
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
    refuse_if(hit, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Spoils the capture that a stream takes part in, and refuses.
fn spoil(stream: &Stream, error: CUresult) -> Answer {
    lock(&stream.capture).as_ref().map_or(Err(error), |capture| capture.session.spoil(error))
}

/// Refuses a synchronising call on a stream that takes part in a capture, and spoils the capture.
pub(crate) fn not_capturing(stream: &Stream) -> Answer {
    if ACTIVE.load(Acquire) == 0 {
        return Ok(());
    }
    if stream.capturing.load(Acquire) {
        return spoil(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    legacy_not_implied(stream)
}

/// The legacy stream would depend on a blocking stream that captures.
pub(crate) fn legacy_not_implied(stream: &Stream) -> Answer {
    if ACTIVE.load(Acquire) > 0 && stream.kind == StreamKind::Legacy {
        for other in lock(&stream.context.streams).iter() {
            if other.blocking() && other.capturing.load(Acquire) {
                return spoil(other, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
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
                return spoil(stream, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
        }
    }
    Ok(())
}

impl Capture {
    fn wait_for(&mut self, nodes: Vec<NodeRef>) {
        for node in nodes {
            if !self.after.iter().any(|n| n.id == node.id) {
                self.after.push(node);
            }
        }
    }
}

/// Changes the capture that a stream takes part in.
fn with_capture(stream: Ref<Stream>, f: impl FnOnce(&mut Capture) -> Answer) -> Answer {
    f(lock(&stream.capture).as_mut().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?)
}

/// What a stream is asked to do becomes a node of the graph that it captures. A record of an event, and a wait for one, are only
/// dependencies.
pub(crate) fn capture_node(stream: Ref<Stream>, node: Node) -> Answer {
    let (Node::Record(event) | Node::Wait(event)) = node else { return add_captured(stream, node) };
    with_capture(stream, |capture| {
        let session = &capture.session;
        refuse_if(session.invalid.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
        if let Node::Record(_) = node {
            // The event stands for this point of the capture; nothing runs.
            *lock(&event.captured) = Some((session.clone(), capture.after.clone()));
            return Ok(());
        }
        match lock(&event.captured).clone() {
            None => session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
            Some((other, _)) if !Arc::ptr_eq(&other, session) => {
                session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE)
            }
            Some((_, after)) => {
                capture.wait_for(after);
                Ok(())
            }
        }
    })
}

/// Adds a node to the graph a stream captures, also a record or a wait.
pub(crate) fn add_captured(stream: Ref<Stream>, node: Node) -> Answer {
    with_capture(stream, |capture| {
        let session = &capture.session;
        refuse_if(session.invalid.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
        let graph = session.graph;
        capture.after = vec![graph.add(graph.handle::<c_void>() as u64, node, &capture.after)?];
        Ok(())
    })
}

/// A stream that waits for a captured event takes part in its capture.
pub(crate) fn join_capture(stream: Ref<Stream>, event: &Event) -> Res<bool> {
    if ACTIVE.load(Acquire) == 0 || stream.capturing.load(Acquire) {
        return Ok(false);
    }
    let Some((session, after)) = lock(&event.captured).clone() else { return Ok(false) };
    if !lock(&SESSIONS).iter().any(|s| Arc::ptr_eq(s, &session)) {
        return Ok(false);
    }
    if stream.kind == StreamKind::Legacy {
        return session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    lock(&session.streams).push(stream);
    *lock(&stream.capture) = Some(Capture { session, after, shown: Vec::new() });
    stream.capturing.store(true, Release);
    Ok(true)
}

fn begin(stream: Ref<Stream>, mode: u32, graph: Option<Ref<Graph>>, after: Vec<NodeRef>) -> Answer {
    invalid_if(mode > 2)?;
    refuse_if(stream.kind == StreamKind::Legacy, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
    let mut capture = lock(&stream.capture);
    refuse_if(capture.is_some(), CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    let session = Arc::new(Session {
        id: next_id(),
        graph: graph.unwrap_or_else(Graph::create),
        mode,
        invalid: AtomicBool::new(false),
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

entry!(cuStreamBeginCapture, |stream: Stream| begin(stream, 0, None, Vec::new()));
entry!(cuStreamBeginCapture_v2, |stream: Stream, mode| begin(stream, mode, None, Vec::new()));

entry!(cuStreamBeginCaptureToGraph, |stream, graph: Graph, dependencies, _, numDependencies, mode| {
    let after = nodes(dependencies, numDependencies)?;
    begin(stream.find()?, mode, Some(graph), after)
});

entry!(cuStreamEndCapture, |stream: Stream, phGraph| {
    let Some(capture) = lock(&stream.capture).clone() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) };
    let session = &capture.session;
    if session.origin != stream.id {
        return session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    refuse_if(
        session.mode != 2 && session.thread != std::thread::current().id(),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    )?;
    // Each node without a follower must have come back to the origin.
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
    put_opt(phGraph, null_mut());
    refuse_if(session.invalid.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
    refuse_if(!joined, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)?;
    put_opt(phGraph, session.graph.handle());
});

entry!(cuStreamIsCapturing, |stream: Stream, captureStatus| {
    legacy_not_implied(stream)?;
    put(captureStatus, capture_status(stream))
});

fn capture_status(stream: &Stream) -> u32 {
    match lock(&stream.capture).as_ref() {
        None => 0,
        Some(capture) if capture.session.invalid.load(Acquire) => 2,
        Some(_) => 1,
    }
}

unsafe fn capture_info(
    stream: Ref<Stream>,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut sys::CUgraph,
    dependencies: *mut *const sys::CUgraphNode,
    edges: *mut *const sys::CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
    legacy_not_implied(stream)?;
    put(status, capture_status(stream))?;
    let mut capture = lock(&stream.capture);
    if let Some(capture) = capture.as_mut() {
        put_opt(id, capture.session.id);
        put_opt(graph, capture.session.graph.handle());
        capture.shown = capture.after.iter().map(|n| n.handle::<c_void>() as usize).collect();
        put_opt(dependencies, capture.shown.as_ptr().cast());
        put_opt(edges, std::ptr::null());
        put_opt(count, capture.shown.len());
    }
    Ok(())
}

entry!(cuStreamGetCaptureInfo, |stream: Stream, status, id| {
    capture_info(stream, status, id, null_mut(), null_mut(), null_mut(), null_mut())
});

entry!(cuStreamGetCaptureInfo_v2, |hStream: Stream, status, id, graph, dependencies, count| {
    capture_info(hStream, status, id, graph, dependencies, null_mut(), count)
});

entry!(cuStreamGetCaptureInfo_v3, |hStream: Stream, status, id, graph, dependencies, edges, count| {
    capture_info(hStream, status, id, graph, dependencies, edges, count)
});

entry!(
    cuStreamUpdateCaptureDependencies,
    cuStreamUpdateCaptureDependencies_v2(stream, new, _, count, flags),
    |stream: Stream, new, count, flags| {
        let new = nodes(new, count)?;
        with_capture(stream, |capture| {
            match flags {
                1 => capture.after = new,
                _ => capture.wait_for(new),
            }
            Ok(())
        })
    }
);

entry!(cuThreadExchangeStreamCaptureMode, |mode| {
    invalid_if(mode.is_null() || *mode > 2)?;
    *mode = CAPTURE_MODE.replace(*mode);
});
