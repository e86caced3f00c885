//! `gshare engine instances`.

use super::filter;
use anyhow::Context as _;
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    Keeper, KeeperConfig, LeastFragmentation, Node, NodeGpu, PartitionConfig, Partitioner,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings: of the keeper, of the partitioner, and the node.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Config {
    keeper: KeeperConfig,
    partition: PartitionConfig,
    /// Model of the node's GPUs.
    gpu: String,
    /// Its GPUs with their slices.
    gpus: Option<Vec<NodeGpu>>,
    /// Or free slices by name, on as few GPUs as possible. By default the slices of one A100-80 cut as in the paper.
    free: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            keeper: KeeperConfig::default(),
            partition: PartitionConfig::default(),
            gpu: "A100-80".to_owned(),
            gpus: None,
            free: ["4g.40gb", "2g.20gb", "1g.10gb"].map(str::to_owned).to_vec(),
        }
    }
}

fn keeper(config: Config) -> anyhow::Result<Keeper> {
    let model = GpuModel::find(&config.gpu).context("gpu")?;
    let names: Vec<&str> = config.free.iter().map(String::as_str).collect();
    let node = match config.gpus {
        Some(gpus) => Node::new(model, gpus).context("gpus")?,
        None => Node::with_free(model, &names).context("free")?,
    };
    let partitioner = Box::new(Partitioner::new(config.partition)?);
    Ok(Keeper::new(config.keeper, &node, partitioner, Box::new(LeastFragmentation))?)
}

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, keeper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_request_starts_an_instance_and_bad_dags_are_refused_by_name() {
        let add = |memory: u64| {
            format!(
                r#"{{"now_ns":1,"event":{{"event":"function_added","function":0,"goal":{{}},"dag":{{"name":"f","components":[{{"name":"a","profiles":[{{"slice":"1g.10gb","time_ns":1000000,"memory_bytes":{memory}}}]}}],"edges":[]}}}}}}"#
            )
        };
        let requested = r#"{"now_ns":2,"event":{"event":"requested","function":0}}"#;
        let input = format!("{}\n{}\n{requested}\n", add(1 << 40), add(1 << 30));
        let mut output = Vec::new();
        filter::filter(Config::default(), keeper, &mut input.as_bytes(), &mut output).unwrap();
        let output = String::from_utf8(output).unwrap();
        let lines: Vec<&str> = output.lines().collect();
        assert!(lines[0].contains("fn0 does not fit this node"), "{output}");
        assert!(
            lines[2].contains(r#""action":"start""#) && lines[2].contains(r#""kind":"shared""#),
            "{output}"
        );
    }
}
