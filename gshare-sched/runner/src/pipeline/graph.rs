//! A function as a graph of components: one program for both modes of FluidFaaS, Figure 7.
//!
//! # Problem
//! A function registers its components once. In `RUN` mode a process is one stage and runs those that the assignment
//! gives it; in `BUILD_DAG` mode it tells what components there are and what flows between them, and lets each be measured
//! by itself.
//!
//! # Algorithm
//! `gshare build-dag` starts the program with a folder in `GSHARE_FFS_BUILD`:
//! 1. **Shape**: all components run once, one after the other, each loaded alone, on the request in the folder's file
//!    `example` (none where there is no such file). What they made is kept in the folder; names, edges and bytes go into its file
//!    `shape.json`.
//! 2. **Component**: with a name in `GSHARE_FFS_COMPONENT` as well, that one is loaded, says a line, and then runs on what
//!    was kept once for each line it reads, and answers with a line (the protocol of `gshare profile`). The slice is in
//!    `CUDA_VISIBLE_DEVICES`, the batch in `GSHARE_BATCH`.
//!
//! In `RUN` mode values travel by number: those that a later stage needs go on with each message, in the form
//! `number: u32, length: u64, bytes`, little-endian.
//!
//! ## Example
//! `a -> b -> d`, `a -> c -> d`, cut as `a b | c d`: the first stage sends what `a` and `b` made, the second only the
//! answer.

use super::{ENV_BUILD, ENV_COMPONENT, FfsError, MAX_FILE, Stage};
use gshare_core::BasisPoints;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};

/// A component that is loaded: from its inputs to what it makes, or to why it could not.
pub type Run = Box<dyn FnMut(&[&[u8]]) -> Result<Vec<u8>, String>>;
type Load = Box<dyn FnOnce() -> Result<Run, String>>;

struct Node {
    name: String,
    /// Numbers of the values it reads: 0 is the request, `n` what component `n - 1` makes.
    needs: Vec<usize>,
    runs: BasisPoints,
    load: Option<Load>,
}

/// A function's components, registered in an order in which they can run. The last one makes the answer.
pub struct Graph {
    name: String,
    nodes: Vec<Node>,
    /// The first mistake in a registration.
    wrong: Option<String>,
}

impl core::fmt::Debug for Graph {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names: Vec<&str> = self.nodes.iter().map(|node| &*node.name).collect();
        f.debug_struct("Graph").field("name", &self.name).field("components", &names).finish_non_exhaustive()
    }
}

impl Graph {
    /// A function without components.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), nodes: Vec::new(), wrong: None }
    }

    /// Registers a component that reads what the components `needs` make; the request, where there are none. `load` brings
    /// it to the device.
    #[must_use]
    pub fn component(
        mut self,
        name: impl Into<String>,
        needs: &[&str],
        load: impl FnOnce() -> Result<Run, String> + 'static,
    ) -> Self {
        let name = name.into();
        if self.nodes.iter().any(|node| node.name == name) {
            self.wrong.get_or_insert(format!("component `{name}` is registered twice"));
        }
        let mut numbers = Vec::new();
        for need in needs {
            match self.nodes.iter().position(|node| node.name == *need) {
                Some(index) => numbers.push(index + 1),
                None => {
                    self.wrong
                        .get_or_insert(format!("component `{name}` needs `{need}`, which is not registered"));
                }
            }
        }
        if needs.is_empty() {
            numbers.push(0);
        }
        self.nodes.push(Node { name, needs: numbers, runs: BasisPoints::WHOLE, load: Some(Box::new(load)) });
        self
    }

    /// Says that a share of the requests only runs the component registered last: a branch.
    #[must_use]
    pub fn for_share(mut self, runs: BasisPoints) -> Self {
        if let Some(node) = self.nodes.last_mut() {
            node.runs = runs;
        }
        self
    }

    /// Does what this process was started for: is a stage, tells the shape, or is a component that is measured.
    ///
    /// # Errors
    /// [`FfsError::BadGraph`], [`FfsError::Component`]; those of [`Stage::from_env`] and [`Stage::run`].
    pub fn serve(self) -> Result<(), FfsError> {
        if let Some(what) = self.wrong.clone() {
            return Err(FfsError::BadGraph { what });
        }
        if self.nodes.is_empty() {
            return Err(FfsError::BadGraph { what: "no components".to_owned() });
        }
        match (std::env::var_os(ENV_BUILD), std::env::var(ENV_COMPONENT)) {
            (Some(folder), Ok(component)) => self.measured(&PathBuf::from(folder), &component),
            (Some(folder), Err(_)) => self.shape(&PathBuf::from(folder)),
            (None, _) => self.run(Stage::from_env()?),
        }
    }

    fn load(&mut self, index: usize) -> Result<Run, FfsError> {
        let node = &mut self.nodes[index];
        let failed = |reason: String| FfsError::Component { component: node.name.clone(), reason };
        node.load.take().map_or_else(|| Err("it was loaded before".to_owned()), |load| load()).map_err(failed)
    }

    fn shape(mut self, folder: &Path) -> Result<(), FfsError> {
        let mut values = vec![read(folder, "example")?.unwrap_or_default()];
        for index in 0..self.nodes.len() {
            let mut run = self.load(index)?;
            let node = &self.nodes[index];
            let inputs: Vec<&[u8]> = node.needs.iter().map(|&need| &*values[need]).collect();
            let made = run(&inputs);
            let made = made.map_err(|reason| FfsError::Component { component: node.name.clone(), reason })?;
            write(folder, &value(index + 1), &made)?;
            values.push(made);
        }
        let component = |node: &Node| serde_json::json!({"name": node.name, "runs_bp": node.runs.get()});
        let edges = self.nodes.iter().flat_map(|node| {
            let from = |&need: &usize| Some((need, self.nodes.get(need.checked_sub(1)?)?));
            node.needs.iter().filter_map(from).map(|(need, from)| {
                serde_json::json!({"from": from.name, "to": node.name, "bytes": values[need].len()})
            })
        });
        let shape = serde_json::json!({
            "name": self.name,
            "components": self.nodes.iter().map(component).collect::<Vec<_>>(),
            "edges": edges.collect::<Vec<_>>(),
        });
        write(folder, "shape.json", shape.to_string().as_bytes())
    }

    fn measured(mut self, folder: &Path, component: &str) -> Result<(), FfsError> {
        let index = self.nodes.iter().position(|node| node.name == component);
        let index =
            index.ok_or_else(|| FfsError::BadGraph { what: format!("no component `{component}`") })?;
        let mut inputs = Vec::new();
        for need in self.nodes[index].needs.clone() {
            let name = if need == 0 { "example".to_owned() } else { value(need) };
            inputs.push(read(folder, &name)?.unwrap_or_default());
        }
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let mut run = self.load(index)?;
        let failed = |reason: String| FfsError::Component { component: component.to_owned(), reason };
        let mut output = std::io::stdout().lock();
        let mut say = |text: &str| writeln!(output, "{text}").and_then(|()| output.flush());
        // A reader that has closed the pipe has seen enough.
        if say("ready").is_err() {
            return Ok(());
        }
        for line in std::io::stdin().lock().lines() {
            if line.is_err() {
                break;
            }
            run(&inputs).map_err(failed)?;
            if say("done").is_err() {
                break;
            }
        }
        Ok(())
    }

    fn run(mut self, stage: Stage) -> Result<(), FfsError> {
        let index = stage.index() as usize;
        let stages = &stage.assignment().stages;
        let find = |name: &String| {
            let found = self.nodes.iter().position(|node| node.name == *name);
            found.ok_or_else(|| FfsError::BadAssignment {
                what: format!("stages[{index}]: no component `{name}`"),
            })
        };
        let mut mine = stages[index].components.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        mine.sort_unstable();
        mine.dedup();
        let last = index + 1 == stages.len();
        let mut needed = vec![false; self.nodes.len() + 1];
        for name in stages[index + 1..].iter().flat_map(|stage| &stage.components) {
            let needs = self.nodes.iter().find(|node| node.name == *name).map(|node| &node.needs);
            needs.into_iter().flatten().for_each(|&need| needed[need] = true);
        }
        let answer = self.nodes.len();
        // An answer that an earlier stage makes goes on to the last one.
        needed[answer] = !last;
        let mut loaded = Vec::new();
        for index in mine {
            let run = self.load(index)?;
            loaded.push((index, run));
        }
        let nodes = self.nodes;
        stage.run(move |input, output| {
            let mut values: BTreeMap<usize, Cow<'_, [u8]>> = match index {
                0 => BTreeMap::from([(0, Cow::Borrowed(input))]),
                _ => decode(input)?,
            };
            for (index, run) in &mut loaded {
                let node = &nodes[*index];
                let read = |need: &usize| {
                    let name = need.checked_sub(1).map_or("the request", |of| &*nodes[of].name);
                    let missing = || format!("{} needs {name}, which no stage before it made", node.name);
                    values.get(need).map(|value| &**value).ok_or_else(missing)
                };
                let inputs = node.needs.iter().map(read).collect::<Result<Vec<_>, _>>()?;
                let made = run(&inputs).map_err(|reason| format!("{}: {reason}", node.name))?;
                values.insert(*index + 1, Cow::Owned(made));
            }
            if last {
                output.extend_from_slice(values.get(&answer).ok_or("no stage made the answer")?);
                return Ok(());
            }
            encode(values.iter().filter(|(number, _)| needed[**number]), output)
        })
    }
}

/// Each value with its number and its length, 4 and 8 bytes, before it.
fn encode<'a>(
    values: impl Iterator<Item = (&'a usize, &'a Cow<'a, [u8]>)>,
    output: &mut Vec<u8>,
) -> Result<(), String> {
    for (number, value) in values {
        let number = u32::try_from(*number).map_err(|error| error.to_string())?;
        output.extend_from_slice(&number.to_le_bytes());
        output.extend_from_slice(&(value.len() as u64).to_le_bytes());
        output.extend_from_slice(value);
    }
    Ok(())
}

fn decode(mut input: &[u8]) -> Result<BTreeMap<usize, Cow<'_, [u8]>>, String> {
    let mut values = BTreeMap::new();
    while !input.is_empty() {
        let short = || "the stage before sent half a value".to_owned();
        let (number, rest) = input.split_first_chunk::<4>().ok_or_else(short)?;
        let (length, rest) = rest.split_first_chunk::<8>().ok_or_else(short)?;
        let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| short())?;
        let (value, rest) = rest.split_at_checked(length).ok_or_else(short)?;
        values.insert(u32::from_le_bytes(*number) as usize, Cow::Borrowed(value));
        input = rest;
    }
    Ok(values)
}

fn value(number: usize) -> String {
    format!("value-{number}")
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), FfsError> {
    let path = folder.join(name);
    let bad = |error: std::io::Error| FfsError::BadGraph { what: format!("{}: {error}", path.display()) };
    std::fs::write(&path, bytes).map_err(bad)
}

/// None where there is no such file.
fn read(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, FfsError> {
    let path = folder.join(name);
    let bad = |what: String| FfsError::BadGraph { what: format!("{}: {what}", path.display()) };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(error.to_string())),
        Ok(found) if found.len() > 64 * MAX_FILE => {
            return Err(bad(format!("{} bytes, at most {}", found.len(), 64 * MAX_FILE)));
        }
        Ok(_) => {}
    }
    std::fs::read(&path).map(Some).map_err(|error| bad(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle() -> Result<Run, String> {
        Ok(Box::new(|inputs: &[&[u8]]| Ok(inputs.concat())))
    }

    /// Bytes before a value.
    const HEAD: usize = 12;

    #[test]
    fn values_come_through_as_they_were_and_half_of_one_is_an_error() {
        let values = BTreeMap::from([(0, Cow::Borrowed(&b"abc"[..])), (7, Cow::Borrowed(&b""[..]))]);
        let mut sent = Vec::new();
        encode(values.iter(), &mut sent).unwrap();
        assert_eq!((sent.len(), decode(&sent).unwrap()), (2 * HEAD + 3, values.clone()));
        for cut in 1..sent.len() {
            let cut_between = cut == HEAD + 3;
            assert_eq!(decode(&sent[..cut]).is_ok(), cut_between, "{cut}");
        }
        let huge = [&[1, 0, 0, 0][..], &u64::MAX.to_le_bytes()].concat();
        assert!(decode(&huge).is_err());
    }

    #[test]
    fn registrations_that_cannot_be_are_refused_by_name() {
        let error = |graph: Graph| graph.serve().unwrap_err().to_string();
        assert_eq!(error(Graph::new("f")), "function: no components");
        let twice = Graph::new("f").component("a", &[], idle).component("a", &[], idle);
        assert_eq!(error(twice), "function: component `a` is registered twice");
        let unknown = Graph::new("f").component("a", &["b"], idle).component("b", &[], idle);
        assert_eq!(error(unknown), "function: component `a` needs `b`, which is not registered");
    }
}
