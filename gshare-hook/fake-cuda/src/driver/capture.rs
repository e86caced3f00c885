//! Stream capture: requests to streams become nodes of a graph.

use std::cell::Cell;

use super::tasks::{Graph, GraphNode, Node, NodeRef, Task};
use super::*;

const ILLEGAL_STATE: CUresult = CUresult::CUDA_ERROR_ILLEGAL_STATE;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

/// One capture, shared by its streams.
pub(crate) struct Session {
    id: u64,
    graph: Ref<Graph>,
    mode: u32,
    invalid: AtomicBool,
    origin: u64,
    thread: std::thread::ThreadId,
}

impl Session {
    /// Spoils the capture, and refuses the call at fault.
    pub(crate) fn spoil<R>(&self, error: CUresult) -> Res<R> {
        self.invalid.store(true, Release);
        Err(error)
    }

    fn valid(&self) -> Answer {
        refuse_if(self.invalid.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    }
}

/// A capture, and the nodes on which the next node depends.
pub(crate) type Point = (Arc<Session>, Vec<NodeRef>);

/// A stream's part in a capture.
struct Part {
    stream: Ref<Stream>,
    session: Arc<Session>,
    after: Vec<NodeRef>,
    /// The nodes last returned by cuStreamGetCaptureInfo: the caller reads them until the next call on the stream.
    shown: Vec<usize>,
}

impl Part {
    fn wait_for(&mut self, nodes: Vec<NodeRef>) {
        for node in nodes {
            if !self.after.iter().any(|n| n.id == node.id) {
                self.after.push(node);
            }
        }
    }
}

/// The capturing streams, by number.
type Parts = BTreeMap<u64, Part>;

static PARTS: Mutex<Parts> = Mutex::new(BTreeMap::new());
/// Number of capturing streams.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(0) };
}

/// Whether any stream of the process captures.
#[inline]
pub(crate) fn any_capture() -> bool {
    ACTIVE.load(Acquire) > 0
}

/// Refuses a call forbidden by a capture of the calling thread, or by a global capture of another, and spoils the capture.
pub(crate) fn not_while_capturing() -> Answer {
    let mode = MODE.get();
    if !any_capture() || mode == 2 {
        return Ok(());
    }
    let me = std::thread::current().id();
    let mut answer = Ok(());
    for Part { session, .. } in lock(&PARTS).values() {
        // 0 global: any thread; 1 thread-local: the capturing thread; 2 relaxed: no thread.
        let bars = match session.mode {
            0 => session.thread == me || mode == 0,
            1 => session.thread == me,
            _ => false,
        };
        if bars {
            answer = session.spoil(UNSUPPORTED);
        }
    }
    answer
}

/// Refuses if one of the streams captures, and spoils this capture.
fn none_captures(streams: impl IntoIterator<Item = Ref<Stream>>, error: CUresult) -> Answer {
    match streams.into_iter().find(|stream| stream.capturing.load(Acquire)) {
        Some(stream) => lock(&PARTS).get(&stream.id).map_or(Err(error), |part| part.session.spoil(error)),
        None => Ok(()),
    }
}

/// Refuses a synchronising call on a capturing stream, and spoils the capture.
pub(crate) fn not_capturing(stream: Ref<Stream>) -> Answer {
    none_captures([stream], UNSUPPORTED)?;
    legacy_not_implied(stream)
}

/// Refuses if the legacy stream would depend on a capturing blocking stream.
pub(crate) fn legacy_not_implied(stream: &Stream) -> Answer {
    if !any_capture() || !stream.legacy {
        return Ok(());
    }
    none_captures(stream.context.blocking(), CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
}

/// Refuses when any stream of the context captures.
pub(crate) fn context_not_capturing(context: &Context) -> Answer {
    if any_capture() { none_captures(context.all_streams(), UNSUPPORTED) } else { Ok(()) }
}

/// Changes a stream's part in a capture.
fn with_part<R>(stream: Ref<Stream>, f: impl FnOnce(&mut Part) -> Res<R>) -> Res<R> {
    f(lock(&PARTS).get_mut(&stream.id).ok_or(ILLEGAL_STATE)?)
}

/// Queues a call's task on its stream, or adds it to the graph if the stream captures.
pub(crate) fn submit(stream: Ref<Stream>, task: impl Task) -> Answer {
    if !stream.capturing.load(Acquire) {
        return task.run(stream);
    }
    with_part(stream, |part| {
        part.session.valid()?;
        part.after = vec![Graph::add(part.session.graph, Arc::new(task) as Node, &part.after)?];
        Ok(())
    })
}

/// The current point of a stream's capture.
pub(crate) fn point(stream: Ref<Stream>) -> Res<Point> {
    with_part(stream, |part| {
        part.session.valid()?;
        Ok((part.session.clone(), part.after.clone()))
    })
}

/// Makes a stream wait for a point of a capture; the stream then takes part in it. `false`: the stream captures nothing, and the point's
/// capture, if any, has ended.
pub(crate) fn wait_for(stream: Ref<Stream>, point: Option<Point>) -> Res<bool> {
    if !any_capture() {
        return Ok(false);
    }
    let mut parts = lock(&PARTS);
    if let Some(part) = parts.get_mut(&stream.id) {
        part.session.valid()?;
        match point {
            None => part.session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)?,
            Some((other, _)) if !Arc::ptr_eq(&other, &part.session) => {
                part.session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE)?;
            }
            Some((_, after)) => part.wait_for(after),
        }
        return Ok(true);
    }
    let Some((session, after)) = point else { return Ok(false) };
    if !parts.values().any(|part| Arc::ptr_eq(&part.session, &session)) {
        return Ok(false);
    }
    if stream.legacy {
        return session.spoil(UNSUPPORTED);
    }
    take_part(&mut parts, stream, session, after);
    Ok(true)
}

fn take_part(parts: &mut Parts, stream: Ref<Stream>, session: Arc<Session>, after: Vec<NodeRef>) {
    parts.insert(stream.id, Part { stream, session, after, shown: Vec::new() });
    ACTIVE.store(parts.len(), Release);
    stream.capturing.store(true, Release);
}

/// The nodes of a program's list.
pub(crate) unsafe fn nodes(list: *const sys::CUgraphNode, count: usize) -> Res<Vec<NodeRef>> {
    invalid_if(count > 0 && list.is_null())?;
    (0..count).map(|i| Object::<GraphNode>::get(*list.add(i))).collect()
}

fn begin(stream: Ref<Stream>, mode: u32, graph: Ref<Graph>, after: Vec<NodeRef>) -> Answer {
    invalid_if(mode > 2)?;
    refuse_if(stream.legacy, UNSUPPORTED)?;
    let mut parts = lock(&PARTS);
    refuse_if(parts.contains_key(&stream.id), ILLEGAL_STATE)?;
    let (invalid, thread) = (AtomicBool::new(false), std::thread::current().id());
    let session = Session { id: next_id(), graph, mode, invalid, origin: stream.id, thread };
    take_part(&mut parts, stream, Arc::new(session), after);
    Ok(())
}

entry!(cuStreamBeginCapture_v2, |stream: Stream, mode| begin(stream, mode, Graph::create(), Vec::new()));
alias!(cuStreamBeginCapture(stream) = cuStreamBeginCapture_v2(stream, 0));

entry!(cuStreamBeginCaptureToGraph, |stream, graph: Graph, dependencies, _, numDependencies, mode| {
    let after = nodes(dependencies, numDependencies)?;
    begin(stream.find()?, mode, graph, after)
});

entry!(cuStreamEndCapture, |stream: Stream, phGraph| {
    let (session, after) = with_part(stream, |part| Ok((part.session.clone(), part.after.clone())))?;
    if session.origin != stream.id {
        return session.spoil(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    let elsewhere = session.thread != std::thread::current().id();
    refuse_if(session.mode != 2 && elsewhere, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)?;
    // Each node without a follower must have come back to the origin.
    let mut joined = true;
    let mut parts = lock(&PARTS);
    for (_, part) in parts.extract_if(.., |_, part| Arc::ptr_eq(&part.session, &session)) {
        part.stream.capturing.store(false, Release);
        let edges = &lock(&session.graph.state).edges;
        let followed = |n: &NodeRef| edges.iter().any(|(from, _)| *from == n.id);
        joined &= part.after.iter().all(|n| followed(n) || after.iter().any(|m| m.id == n.id));
    }
    ACTIVE.store(parts.len(), Release);
    put_opt(phGraph, null_mut());
    session.valid()?;
    refuse_if(!joined, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)?;
    put_opt(phGraph, session.graph.handle());
});

fn status_of(part: Option<&Part>) -> u32 {
    part.map_or(0, |part| if part.session.valid().is_ok() { 1 } else { 2 })
}

entry!(cuStreamIsCapturing, |stream: Stream, captureStatus| {
    legacy_not_implied(stream)?;
    put(captureStatus, status_of(lock(&PARTS).get(&stream.id)))
});

entry!(cuStreamGetCaptureInfo_v3, |stream: Stream, status, id, graph, nodes, edges, count| {
    legacy_not_implied(stream)?;
    let mut parts = lock(&PARTS);
    let part = parts.get_mut(&stream.id);
    put(status, status_of(part.as_deref()))?;
    if let Some(part) = part {
        put_opt(id, part.session.id);
        put_opt::<sys::CUgraph>(graph, part.session.graph.handle());
        part.shown = part.after.iter().map(|n| n.handle::<c_void>() as usize).collect();
        put_opt::<*const sys::CUgraphNode>(nodes, part.shown.as_ptr().cast());
        put_opt::<*const sys::CUgraphEdgeData>(edges, std::ptr::null());
        put_opt(count, part.shown.len());
    }
});
alias!(
    cuStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count) =
        cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, null_mut(), count)
);
alias!(
    cuStreamGetCaptureInfo(stream, status, id) =
        cuStreamGetCaptureInfo_v2(stream, status, id, null_mut(), null_mut(), null_mut())
);

entry!(cuStreamUpdateCaptureDependencies, |stream: Stream, new, count, flags| {
    let new = nodes(new, count)?;
    with_part(stream, |part| {
        match flags {
            1 => part.after = new,
            _ => part.wait_for(new),
        }
        Ok(())
    })
});
alias!(
    cuStreamUpdateCaptureDependencies_v2(stream, new, _, count, flags) =
        cuStreamUpdateCaptureDependencies(stream, new, count, flags)
);

entry!(cuThreadExchangeStreamCaptureMode, |mode| {
    invalid_if(mode.is_null() || *mode > 2)?;
    *mode = MODE.replace(*mode);
});
