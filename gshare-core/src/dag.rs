//! The FFS DAG: a partitioner's view of the components of a function and of the data between them.
//!
//! # Problem
//! A FluidFaaS function registers its models and the data flow between them (FluidFaaS, section 5.2.1). A
//! partitioner needs the time and the memory of every component on each profiled slice, and the bytes on every edge.
//! The description comes from outside, so [`DagBuilder::build`] checks it once, and every [`Dag`] is acyclic, within all bounds
//! and in topological order.
//!
//! # Terms
//! - **component**: one model with its processing, which runs as a whole on one slice;
//! - **profile**: time and memory of a component on one slice profile with one batch size. A component without a profile
//!   for a slice cannot run there (the component does not fit, or has no measurement);
//! - **edge**: the output of one component as input of another, in bytes per batch;
//! - **branch**: a component for some of the requests only ([`Component::runs`]). Its *expected* time is the branch's share of
//!   the full time, but the branch needs all of its memory, and a request on the branch waits for the full time.
//!
//! # Form
//! ```json
//! {"name": "classification",
//!  "components": [
//!    {"name": "deblur", "profiles": [
//!      {"slice": "1g.10gb", "batch": 1, "time_ns": 90000000, "memory_bytes": 3221225472},
//!      {"slice": "2g.20gb", "batch": 1, "time_ns": 48000000, "memory_bytes": 3221225472}]},
//!    {"name": "super_resolution", "runs_bp": 4000, "profiles": [
//!      {"slice": "2g.20gb", "batch": 1, "time_ns": 120000000, "memory_bytes": 8589934592}]}],
//!  "edges": [{"from": "deblur", "to": "super_resolution", "bytes": 6291456}]}
//! ```
//! `runs_bp` is the share of requests through the component, in basis points; without this field, every request runs the component.
//! TOML has the same form, and code builds a DAG by [`Dag::builder`].
//!
//! # Order
//! A [`Dag`] keeps its components in a topological order: of all components with every predecessor placed, the first declared
//! comes next. A component's index in [`Dag::components`] is its bit in a [`ComponentSet`].
//!
//! # Cost
//! Building takes O(n² + e log e) for n components and e edges, after a check of n and e against [`MAX_COMPONENTS`] and
//! [`MAX_EDGES`].

use crate::units::{BasisPoints, Bytes, Duration};
use core::fmt;
use std::collections::{BTreeMap, BTreeSet};

/// The most components of one DAG, one for each bit of a [`ComponentSet`]. Published functions have 3 to 20 components.
pub const MAX_COMPONENTS: usize = 128;
/// The most edges of one DAG: one between each two components.
pub const MAX_EDGES: usize = MAX_COMPONENTS * (MAX_COMPONENTS - 1) / 2;
/// The most profiles of one component, enough for every slice of every GPU with a few batch sizes each.
pub const MAX_PROFILES: usize = 1024;
/// The longest time of one component or of one hand-off: one hour. For at most [`MAX_COMPONENTS`] such times, the sum
/// of squares times the number of stages stays within 128 bits.
pub const MAX_TIME: Duration = Duration::from_secs(3_600);
/// The largest memory of one component, and the most bytes of one edge: 1 PiB.
pub const MAX_BYTES: Bytes = Bytes(1 << 50);

/// A set of components of one [`Dag`], by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ComponentSet(#[cfg_attr(feature = "schema", schemars(with = "Vec<u8>"))] pub u128);

impl ComponentSet {
    /// No component.
    pub const EMPTY: Self = Self(0);

    /// The first `count` components.
    pub const fn first(count: usize) -> Self {
        if count >= 128 { Self(u128::MAX) } else { Self((1 << count) - 1) }
    }

    /// One component, which must be below [`MAX_COMPONENTS`].
    pub const fn one(component: usize) -> Self {
        Self(1 << component)
    }

    /// The number of components.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether the set has no component.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set contains `component`.
    pub const fn contains(self, component: usize) -> bool {
        component < 128 && self.0 >> component & 1 == 1
    }

    /// Whether `other` contains all components of this set.
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// The components in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The components in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The components of this set outside `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The components in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> + use<> {
        let mut rest = self.0;
        core::iter::from_fn(move || {
            (rest != 0).then(|| {
                let component = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                component
            })
        })
    }
}

impl FromIterator<usize> for ComponentSet {
    fn from_iter<I: IntoIterator<Item = usize>>(components: I) -> Self {
        components.into_iter().fold(Self::EMPTY, |set, component| set.union(Self::one(component)))
    }
}

/// A list of component indices.
#[cfg(feature = "serde")]
impl serde::Serialize for ComponentSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// Memory and time of a component on one slice profile with one batch size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Profile {
    /// Name of the slice profile: `2g.20gb`.
    pub slice: String,
    /// Requests processed together; at least 1.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub batch: u32,
    /// Time for one batch, in ns; more than 0, at most [`MAX_TIME`].
    #[cfg_attr(feature = "serde", serde(rename = "time_ns"))]
    pub time: Duration,
    /// GPU memory without the memory of the run-time itself; at most [`MAX_BYTES`].
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
}

#[cfg(feature = "serde")]
const fn one() -> u32 {
    1
}

/// One model of a function.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Component {
    /// The name, unique in the DAG.
    pub name: String,
    /// Share of requests through the component; more than 0.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "runs_bp", default = "always", skip_serializing_if = "is_always")
    )]
    pub runs: BasisPoints,
    /// Memory and time per slice profile and batch size; at least one entry.
    pub profiles: Vec<Profile>,
}

#[cfg(feature = "serde")]
const fn always() -> BasisPoints {
    BasisPoints::WHOLE
}

#[cfg(feature = "serde")]
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_always(runs: &BasisPoints) -> bool {
    *runs == BasisPoints::WHOLE
}

impl Component {
    /// A component for every request, with no profile yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), runs: BasisPoints::WHOLE, profiles: Vec::new() }
    }

    /// The same component with one more profile.
    #[must_use]
    pub fn with_profile(
        mut self,
        slice: impl Into<String>,
        batch: u32,
        time: Duration,
        memory: Bytes,
    ) -> Self {
        self.profiles.push(Profile { slice: slice.into(), batch, time, memory });
        self
    }

    /// The same component, run by a share of the requests.
    #[must_use]
    pub fn with_runs(mut self, runs: BasisPoints) -> Self {
        self.runs = runs;
        self
    }

    /// The profile for a slice and a batch size.
    pub fn profile(&self, slice: &str, batch: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.batch == batch && profile.slice == slice)
    }

    /// `time` multiplied by the share of requests through the component, rounded up to a nanosecond.
    pub fn expected(&self, time: Duration) -> Duration {
        share_of(time, self.runs)
    }
}

/// `share` of `time`, rounded up to a nanosecond.
pub(crate) fn share_of(time: Duration, share: BasisPoints) -> Duration {
    Duration::from_wide_nanos((u128::from(time.as_nanos()) * u128::from(share.get())).div_ceil(10_000))
}

/// Data from one component to another. The ends are indices of [`Dag::components`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// The writing component.
    pub from: usize,
    /// The reading component; higher than `from`.
    pub to: usize,
    /// Bytes per batch.
    pub bytes: Bytes,
}

/// Why a DAG was refused. The message names the component and the bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum DagError {
    /// The DAG has no component.
    #[error("a DAG needs at least one component")]
    NoComponents,
    /// The DAG has more than [`MAX_COMPONENTS`] components.
    #[error("{count} components: at most {limit}")]
    TooManyComponents { count: usize, limit: usize },
    /// The DAG has more edges than pairs of components.
    #[error("{count} edges: at most {limit}")]
    TooManyEdges { count: usize, limit: usize },
    /// A component has more than [`MAX_PROFILES`] profiles.
    #[error("component `{component}` has {count} profiles: at most {limit}")]
    TooManyProfiles { component: String, count: usize, limit: usize },
    /// A component has no name.
    #[error("component number {index} has no name")]
    EmptyName { index: usize },
    /// Two components have one name.
    #[error("component `{component}` is declared twice")]
    DuplicateComponent { component: String },
    /// An edge leads to or from an undeclared component.
    #[error("edge `{from}` -> `{to}`: there is no component `{missing}`")]
    UnknownComponent { from: String, to: String, missing: String },
    /// An edge is declared twice.
    #[error("edge `{from}` -> `{to}` is declared twice")]
    DuplicateEdge { from: String, to: String },
    /// Components wait for each other in a cycle.
    #[error("cycle: {}", path.join(" -> "))]
    Cycle { path: Vec<String> },
    /// A component has no profile.
    #[error("component `{component}` has no profile")]
    NoProfiles { component: String },
    /// A component has two profiles for one slice and batch size.
    #[error("component `{component}` has two profiles for {slice}, batch {batch}")]
    DuplicateProfile { component: String, slice: String, batch: u32 },
    /// A profile has a batch size of 0.
    #[error("component `{component}` on {slice}: batch is 0, need at least 1")]
    ZeroBatch { component: String, slice: String },
    /// A profile has a time of 0, the sign of a missing measurement.
    #[error("component `{component}` on {slice}, batch {batch}: time_ns is 0, need more")]
    ZeroTime { component: String, slice: String, batch: u32 },
    /// A profile's time is too long for the arithmetic.
    #[error("component `{component}` on {slice}, batch {batch}: time_ns is {time}, at most {MAX_TIME}")]
    TimeTooLong { component: String, slice: String, batch: u32, time: Duration },
    /// A profile's memory is too large for the arithmetic.
    #[error(
        "component `{component}` on {slice}, batch {batch}: memory_bytes is {memory}, at most {MAX_BYTES}"
    )]
    MemoryTooLarge { component: String, slice: String, batch: u32, memory: Bytes },
    /// A component runs for no request.
    #[error("component `{component}`: runs_bp is 0, need 1 to 10000")]
    NeverRuns { component: String },
    /// An edge has too many bytes for the arithmetic.
    #[error("edge `{from}` -> `{to}`: {bytes}, at most {MAX_BYTES}")]
    EdgeTooLarge { from: String, to: String, bytes: Bytes },
}

/// A checked DAG of components. See the [module](self) for its form.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "DagBuilder", into = "DagBuilder"))]
pub struct Dag {
    name: String,
    components: Vec<Component>,
    edges: Vec<Edge>,
    ancestors: Vec<ComponentSet>,
}

impl Dag {
    /// Begins a DAG.
    ///
    /// ```
    /// use gshare_core::dag::{Component, Dag};
    /// use gshare_core::{Bytes, Duration};
    ///
    /// let component = |name: &str, ms| {
    ///     Component::new(name).with_profile("1g.10gb", 1, Duration::from_millis(ms), Bytes::from_gib(2))
    /// };
    /// let dag = Dag::builder("pair")
    ///     .component(component("segment", 30))
    ///     .component(component("classify", 20))
    ///     .edge("segment", "classify", Bytes::from_mib(6))
    ///     .build()?;
    /// assert_eq!(dag.len(), 2);
    /// # Ok::<(), gshare_core::dag::DagError>(())
    /// ```
    pub fn builder(name: impl Into<String>) -> DagBuilder {
        DagBuilder { name: name.into(), components: Vec::new(), edges: Vec::new() }
    }

    /// The name, which may be empty.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The components in topological order.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// The edges in the order of their ends.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Number of components.
    #[expect(clippy::len_without_is_empty, reason = "a DAG is never empty")]
    pub fn len(&self) -> usize {
        self.components.len()
    }

    /// All components.
    pub fn all(&self) -> ComponentSet {
        ComponentSet::first(self.len())
    }

    /// The components before `component`, directly or not.
    ///
    /// # Panics
    /// When `component` is not an index of [`Dag::components`].
    pub fn ancestors(&self, component: usize) -> ComponentSet {
        self.ancestors[component]
    }

    /// The index of the component named `name`.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.components.iter().position(|component| component.name == name)
    }

    /// The names of `set`'s components, in order.
    pub fn names(&self, set: ComponentSet) -> impl Iterator<Item = &str> {
        set.iter().filter_map(|component| self.components.get(component)).map(|component| &*component.name)
    }

    /// Share of requests with data on `edge`: the smaller share of its two ends.
    pub fn taken(&self, edge: &Edge) -> BasisPoints {
        self.components[edge.from].runs.min(self.components[edge.to].runs)
    }
}

/// An unchecked DAG, from its serialised form or from [`Dag::builder`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DagBuilder {
    #[cfg_attr(feature = "serde", serde(default))]
    name: String,
    components: Vec<Component>,
    #[cfg_attr(feature = "serde", serde(default))]
    edges: Vec<NamedEdge>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct NamedEdge {
    from: String,
    to: String,
    #[cfg_attr(feature = "serde", serde(default))]
    bytes: Bytes,
}

impl DagBuilder {
    /// Adds a component.
    #[must_use]
    pub fn component(mut self, component: Component) -> Self {
        self.components.push(component);
        self
    }

    /// Adds an edge between components by name; the components may be added later.
    #[must_use]
    pub fn edge(mut self, from: impl Into<String>, to: impl Into<String>, bytes: Bytes) -> Self {
        self.edges.push(NamedEdge { from: from.into(), to: to.into(), bytes });
        self
    }

    /// Checks everything and orders the components.
    ///
    /// # Errors
    /// The first [`DagError`], with the checks in the order: counts, components, edges, cycles.
    pub fn build(self) -> Result<Dag, DagError> {
        let Self { name, components, edges } = self;
        if components.is_empty() {
            return Err(DagError::NoComponents);
        }
        if components.len() > MAX_COMPONENTS {
            return Err(DagError::TooManyComponents { count: components.len(), limit: MAX_COMPONENTS });
        }
        if edges.len() > MAX_EDGES {
            return Err(DagError::TooManyEdges { count: edges.len(), limit: MAX_EDGES });
        }
        let mut index_of = BTreeMap::new();
        for (index, component) in components.iter().enumerate() {
            check_component(index, component)?;
            if index_of.insert(component.name.as_str(), index).is_some() {
                return Err(DagError::DuplicateComponent { component: component.name.clone() });
            }
        }
        let mut predecessors = vec![ComponentSet::EMPTY; components.len()];
        let mut declared = Vec::with_capacity(edges.len());
        for edge in &edges {
            let find = |missing: &str| {
                index_of.get(missing).copied().ok_or_else(|| DagError::UnknownComponent {
                    from: edge.from.clone(),
                    to: edge.to.clone(),
                    missing: missing.to_owned(),
                })
            };
            let (from, to) = (find(&edge.from)?, find(&edge.to)?);
            if predecessors[to].contains(from) {
                return Err(DagError::DuplicateEdge { from: edge.from.clone(), to: edge.to.clone() });
            }
            if edge.bytes > MAX_BYTES {
                return Err(DagError::EdgeTooLarge {
                    from: edge.from.clone(),
                    to: edge.to.clone(),
                    bytes: edge.bytes,
                });
            }
            predecessors[to] = predecessors[to].union(ComponentSet::one(from));
            declared.push(Edge { from, to, bytes: edge.bytes });
        }
        let order = topological_order(&predecessors).map_err(|cycle| DagError::Cycle {
            path: cycle.into_iter().map(|index| components[index].name.clone()).collect(),
        })?;
        Ok(assemble(name, components, declared, &order))
    }
}

/// Puts components and edges in `order`.
fn assemble(name: String, components: Vec<Component>, mut edges: Vec<Edge>, order: &[usize]) -> Dag {
    let mut place = vec![0; order.len()];
    for (new, &old) in order.iter().enumerate() {
        place[old] = new;
    }
    for edge in &mut edges {
        (edge.from, edge.to) = (place[edge.from], place[edge.to]);
    }
    edges.sort_unstable();
    let mut keyed: Vec<(usize, Component)> =
        components.into_iter().enumerate().map(|(old, component)| (place[old], component)).collect();
    keyed.sort_by_key(|(new, _)| *new);
    let components: Vec<Component> = keyed.into_iter().map(|(_, component)| component).collect();
    let mut ancestors = vec![ComponentSet::EMPTY; components.len()];
    let mut by_reader = edges.clone();
    by_reader.sort_by_key(|edge| edge.to);
    for edge in &by_reader {
        ancestors[edge.to] =
            ancestors[edge.to].union(ancestors[edge.from]).union(ComponentSet::one(edge.from));
    }
    Dag { name, components, edges, ancestors }
}

fn check_component(index: usize, component: &Component) -> Result<(), DagError> {
    if component.name.is_empty() {
        return Err(DagError::EmptyName { index });
    }
    let name = || component.name.clone();
    if component.profiles.is_empty() {
        return Err(DagError::NoProfiles { component: name() });
    }
    if component.profiles.len() > MAX_PROFILES {
        let (count, limit) = (component.profiles.len(), MAX_PROFILES);
        return Err(DagError::TooManyProfiles { component: name(), count, limit });
    }
    if component.runs.is_zero() {
        return Err(DagError::NeverRuns { component: name() });
    }
    let mut seen = BTreeSet::new();
    for profile in &component.profiles {
        let (slice, batch) = (|| profile.slice.clone(), profile.batch);
        if batch == 0 {
            return Err(DagError::ZeroBatch { component: name(), slice: slice() });
        }
        if profile.time.is_zero() {
            return Err(DagError::ZeroTime { component: name(), slice: slice(), batch });
        }
        if profile.time > MAX_TIME {
            let time = profile.time;
            return Err(DagError::TimeTooLong { component: name(), slice: slice(), batch, time });
        }
        if profile.memory > MAX_BYTES {
            let memory = profile.memory;
            return Err(DagError::MemoryTooLarge { component: name(), slice: slice(), batch, memory });
        }
        if !seen.insert((profile.slice.as_str(), batch)) {
            return Err(DagError::DuplicateProfile { component: name(), slice: slice(), batch });
        }
    }
    Ok(())
}

/// A topological order, or a cycle with its first member again at the end.
fn topological_order(predecessors: &[ComponentSet]) -> Result<Vec<usize>, Vec<usize>> {
    let mut placed = ComponentSet::EMPTY;
    let mut order = Vec::with_capacity(predecessors.len());
    while order.len() < predecessors.len() {
        let ready = |&index: &usize| !placed.contains(index) && predecessors[index].is_subset(placed);
        let Some(next) = (0..predecessors.len()).find(ready) else {
            return Err(cycle(predecessors, placed));
        };
        placed = placed.union(ComponentSet::one(next));
        order.push(next);
    }
    Ok(order)
}

/// Walks backwards among components without a place until a component comes again.
fn cycle(predecessors: &[ComponentSet], placed: ComponentSet) -> Vec<usize> {
    let waiting = ComponentSet::first(predecessors.len()).without(placed);
    let mut path: Vec<usize> = waiting.iter().take(1).collect();
    while let Some(before) = path.last().and_then(|&last| predecessors[last].without(placed).iter().next()) {
        if let Some(first) = path.iter().position(|&seen| seen == before) {
            path.drain(..first);
            path.push(before);
            break;
        }
        path.push(before);
    }
    path.reverse();
    path
}

impl TryFrom<DagBuilder> for Dag {
    type Error = DagError;
    fn try_from(builder: DagBuilder) -> Result<Self, DagError> {
        builder.build()
    }
}

impl From<Dag> for DagBuilder {
    fn from(dag: Dag) -> Self {
        let name = |index: usize| dag.components[index].name.clone();
        let edges = dag
            .edges
            .iter()
            .map(|edge| NamedEdge { from: name(edge.from), to: name(edge.to), bytes: edge.bytes })
            .collect();
        Self { name: dag.name, components: dag.components, edges }
    }
}

impl fmt::Display for Dag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} components, {} edges)", self.name, self.components.len(), self.edges.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(name: &str) -> Component {
        Component::new(name).with_profile("1g.10gb", 1, Duration::from_millis(10), Bytes::from_gib(1))
    }

    fn refused(builder: DagBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    fn dag(names: &str, edges: &[(&str, &str)]) -> DagBuilder {
        let builder = names.split(' ').fold(Dag::builder("test"), |dag, name| dag.component(component(name)));
        edges.iter().fold(builder, |dag, (from, to)| dag.edge(*from, *to, Bytes(1)))
    }

    #[test]
    fn components_come_in_topological_order_declared_first_first() {
        let dag = dag("e d c b a", &[("a", "b"), ("b", "d"), ("c", "d")]).build().unwrap();
        let order: Vec<&str> = dag.names(dag.all()).collect();
        assert_eq!(order, ["e", "c", "a", "b", "d"]);
        assert!(dag.edges().iter().all(|edge| edge.from < edge.to));
        assert_eq!(dag.names(dag.ancestors(4)).collect::<Vec<_>>(), ["c", "a", "b"]);
    }

    #[test]
    fn what_cannot_be_a_dag_is_refused_by_name() {
        assert_eq!(refused(Dag::builder("")), "a DAG needs at least one component");
        assert_eq!(
            refused(dag("a b c d", &[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")])),
            "cycle: b -> c -> b"
        );
        assert_eq!(refused(dag("a", &[("a", "a")])), "cycle: a -> a");
        assert_eq!(refused(dag("a b", &[("a", "x")])), "edge `a` -> `x`: there is no component `x`");
        assert_eq!(refused(dag("a b", &[("a", "b"), ("a", "b")])), "edge `a` -> `b` is declared twice");
        assert_eq!(refused(dag("a a", &[])), "component `a` is declared twice");
        assert_eq!(refused(Dag::builder("").component(Component::new("a"))), "component `a` has no profile");
        assert_eq!(refused(Dag::builder("").component(component(""))), "component number 0 has no name");
        let with = |time, memory, batch| {
            let component = Component::new("a").with_profile("1g.10gb", batch, time, memory);
            refused(Dag::builder("").component(component))
        };
        let (time, memory) = (Duration::from_millis(1), Bytes(1));
        assert_eq!(
            with(Duration::ZERO, memory, 1),
            "component `a` on 1g.10gb, batch 1: time_ns is 0, need more"
        );
        assert_eq!(with(time, memory, 0), "component `a` on 1g.10gb: batch is 0, need at least 1");
        assert!(with(Duration::MAX, memory, 1).ends_with("at most 3600s"));
        assert!(with(time, Bytes(u64::MAX), 1).ends_with("at most 1024 TiB"));
        assert!(refused(dag("a b", &[]).edge("a", "b", Bytes(u64::MAX))).starts_with("edge `a` -> `b`: "));
        let never = component("a").with_runs(BasisPoints::ZERO);
        assert!(refused(Dag::builder("").component(never)).contains("runs_bp is 0"));
        let twice = component("a").with_profile("1g.10gb", 1, time, memory);
        assert_eq!(
            refused(Dag::builder("").component(twice)),
            "component `a` has two profiles for 1g.10gb, batch 1"
        );
    }

    #[test]
    fn ten_thousand_nodes_are_refused_before_any_work() {
        let names: Vec<String> = (0..10_000).map(|n| format!("n{n}")).collect();
        let builder = names.iter().fold(Dag::builder(""), |dag, name| dag.component(component(name)));
        assert_eq!(refused(builder), "10000 components: at most 128");
        let many = (0..10_000).fold(dag("a b", &[]), |dag, _| dag.edge("a", "b", Bytes(1)));
        assert_eq!(refused(many), "10000 edges: at most 8128");
        let wide = (0..2_000).fold(Component::new("a"), |component, batch| {
            component.with_profile("1g.10gb", batch + 1, Duration::from_millis(1), Bytes(1))
        });
        assert!(refused(Dag::builder("").component(wide)).ends_with("2000 profiles: at most 1024"));
    }

    #[test]
    fn a_branch_counts_its_share_of_the_time() {
        let half = BasisPoints::from_percent(40).unwrap();
        let branch = component("s").with_runs(half);
        assert_eq!(branch.expected(Duration::from_nanos(10)), Duration::from_nanos(4));
        assert_eq!(
            branch.expected(Duration::from_nanos(1)),
            Duration::from_nanos(1),
            "rounded up, never nothing"
        );
        let dag = Dag::builder("").component(component("d")).component(branch).edge("d", "s", Bytes(1));
        let dag = dag.build().unwrap();
        assert_eq!(dag.taken(&dag.edges()[0]), half);
    }

    #[test]
    fn sets_hold_all_128_components() {
        let all = ComponentSet::first(MAX_COMPONENTS);
        assert_eq!((all.len(), all.iter().count()), (128, 128));
        assert!(all.contains(127) && !all.contains(128) && ComponentSet::one(127).is_subset(all));
        assert_eq!([5, 3].into_iter().collect::<ComponentSet>().iter().collect::<Vec<_>>(), [3, 5]);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn the_serialised_form_is_read_checked_and_written_back() {
        let text = r#"{"name": "app3", "components": [
            {"name": "deblur", "profiles": [{"slice": "1g.10gb", "time_ns": 5, "memory_bytes": 7}]},
            {"name": "super", "runs_bp": 4000,
             "profiles": [{"slice": "1g.10gb", "batch": 8, "time_ns": 5, "memory_bytes": 7}]}],
            "edges": [{"from": "deblur", "to": "super", "bytes": 6}]}"#;
        let dag: Dag = serde_json::from_str(text).unwrap();
        assert_eq!(dag.components()[0].profile("1g.10gb", 1).unwrap().memory, Bytes(7));
        assert_eq!(dag.components()[1].runs.get(), 4_000);
        let again: Dag = serde_json::from_str(&serde_json::to_string(&dag).unwrap()).unwrap();
        assert_eq!(again, dag);
        let cyclic = text.replace(r#""edges": ["#, r#""edges": [{"from": "super", "to": "deblur"}, "#);
        let error = serde_json::from_str::<Dag>(&cyclic).unwrap_err().to_string();
        assert!(error.starts_with("cycle: "), "{error}");
        let misspelt = text.replace("time_ns", "time_us");
        assert!(serde_json::from_str::<Dag>(&misspelt).unwrap_err().to_string().contains("time_us"));
    }
}
