//! Tasks for a stream, and graphs of tasks: nodes, and edges between them.

use std::any::Any;
use std::collections::BTreeSet;

use super::*;

/// One task for a stream. The file of each kind of task implements it by `task!`.
pub(crate) trait Task: Any + Send + Sync {
    /// The `CUgraphNodeType` of the task's node.
    fn kind(&self) -> u32;

    /// Queues the task's work on a stream.
    fn run(&self, stream: Ref<Stream>) -> Answer;
}

/// A task shared by graphs: its parameters are replaced, never changed.
pub(crate) type Node = Arc<dyn Task>;

/// The task as its concrete type.
pub(crate) fn task_as<T: Task>(node: &Node) -> Option<&T> {
    let node: &dyn Any = &**node;
    node.downcast_ref()
}

/// A node in a graph.
pub(crate) struct GraphNode {
    pub(crate) id: u64,
    pub(crate) graph: Ref<Graph>,
    node: Mutex<Node>,
}

object!(GraphNode, b"gshareNO", INVALID_VALUE);

pub(crate) type NodeRef = Ref<GraphNode>;

impl GraphNode {
    pub(crate) fn node(&self) -> Node {
        lock(&self.node).clone()
    }

    /// Replaces the node's task by another of its kind.
    pub(crate) fn set(&self, node: Node) -> Answer {
        replace(&mut lock(&self.node), node)
    }
}

/// Replaces a task by another of its kind.
pub(crate) fn replace(old: &mut Node, new: Node) -> Answer {
    invalid_if(old.kind() != new.kind())?;
    *old = new;
    Ok(())
}

#[derive(Default)]
pub(crate) struct GraphState {
    pub(crate) nodes: Vec<NodeRef>,
    /// From, to: ids.
    pub(crate) edges: Vec<(u64, u64)>,
    /// Clone only: node of the original -> node here.
    pub(crate) origin: BTreeMap<u64, NodeRef>,
}

pub(crate) struct Graph {
    pub(crate) id: u64,
    pub(crate) state: Mutex<GraphState>,
}

object!(Graph, b"gshareGR", INVALID_VALUE);

impl Graph {
    pub(crate) fn create() -> Ref<Self> {
        Object::create(Self { id: next_id(), state: Mutex::default() })
    }

    /// Adds a node behind others of the graph.
    pub(crate) fn add(this: Ref<Self>, node: Node, after: &[NodeRef]) -> Res<NodeRef> {
        let mut state = lock(&this.state);
        invalid_if(after.iter().any(|d| !state.nodes.iter().any(|n| n.id == d.id)))?;
        let node = state.add(this, node);
        for d in after {
            if !state.edges.contains(&(d.id, node.id)) {
                state.edges.push((d.id, node.id));
            }
        }
        Ok(node)
    }

    /// A copy, including the graphs inside it.
    pub(crate) fn copy(&self) -> Ref<Self> {
        let copy = Self::create();
        let (from, mut to) = (lock(&self.state), lock(&copy.state));
        for node in &from.nodes {
            let inner = node.node();
            let inner = match task_as::<Child>(&inner) {
                Some(Child(child)) => Arc::new(Child(child.copy())),
                None => inner,
            };
            let new = to.add(copy, inner);
            to.origin.insert(node.id, new);
        }
        let edge = |(a, b): &(u64, u64)| Some((to.origin.get(a)?.id, to.origin.get(b)?.id));
        to.edges = from.edges.iter().filter_map(edge).collect();
        copy
    }

    /// Nodes in an order which respects the edges.
    pub(crate) fn ordered(&self) -> Res<Vec<NodeRef>> {
        lock(&self.state).ordered().ok_or(INVALID_VALUE)
    }
}

impl GraphState {
    fn add(&mut self, graph: Ref<Graph>, node: Node) -> NodeRef {
        let node = Object::create(GraphNode { id: next_id(), graph, node: Mutex::new(node) });
        self.nodes.push(node);
        node
    }

    /// Nodes in an order which respects the edges, oldest first among the free ones; `None` for a cycle.
    pub(crate) fn ordered(&self) -> Option<Vec<NodeRef>> {
        // Each node, and its number of incoming edges still to follow.
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

/// A node with a graph as its task.
pub(crate) struct Child(pub(crate) Ref<Graph>);

task!(Child, 4, |Child(graph), stream| {
    graph.ordered()?.into_iter().try_for_each(|node| node.node().run(stream))
});

/// A node for its edges alone.
pub(crate) struct Empty;

task!(Empty, 5, |_, _| Ok(()));
