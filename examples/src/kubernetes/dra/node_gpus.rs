//! The GPUs of this node, from `nvidia-smi` or simulated.

use super::Gpu;
use anyhow::{Context as _, bail, ensure};
use gshare_core::Bytes;
use std::process::Command;

/// Query for `nvidia-smi`; it reports memory in MiB.
const QUERY: [&str; 2] = ["--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"];

/// The GPUs that `nvidia-smi` lists.
///
/// # Errors
/// When it is not there, or fails, or answers something else.
pub fn of_this_node() -> anyhow::Result<Vec<Gpu>> {
    let output = Command::new("nvidia-smi")
        .args(QUERY)
        .output()
        .context("nvidia-smi cannot be started. Without a GPU: --sim")?;
    ensure!(
        output.status.success(),
        "nvidia-smi: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    parse(&String::from_utf8(output.stdout).context("nvidia-smi")?)
}

/// Reads its answer: a line per GPU, `index, uuid, MiB, name`.
///
/// # Errors
/// Names the line.
pub fn parse(text: &str) -> anyhow::Result<Vec<Gpu>> {
    let mut gpus: Vec<Gpu> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut fields = line.splitn(4, ',').map(str::trim);
        let (index, uuid, mib, model) = (fields.next(), fields.next(), fields.next(), fields.next());
        let (Some(index), Some(uuid), Some(mib), Some(model)) = (index, uuid, mib, model) else {
            bail!("nvidia-smi: `{line}`: need index, uuid, memory in MiB and name");
        };
        let index = index.parse().with_context(|| format!("nvidia-smi: index `{index}`"))?;
        let mib: u32 = mib.parse().with_context(|| format!("nvidia-smi: memory `{mib}`"))?;
        ensure!(mib > 0, "nvidia-smi: GPU {index}: 0 MiB of memory");
        ensure!(gpus.iter().all(|gpu| gpu.index != index), "nvidia-smi: GPU {index} twice");
        gpus.push(Gpu {
            index,
            uuid: uuid.to_owned(),
            model: model.to_owned(),
            memory: Bytes::from_mib(mib.into()),
        });
    }
    Ok(gpus)
}

/// Makes `count` simulated GPUs.
pub fn simulated(count: u32, memory: Bytes) -> Vec<Gpu> {
    let one = |index| Gpu {
        index,
        uuid: format!("GPU-00000000-0000-0000-0000-{index:012}"),
        model: "simulated".into(),
        memory,
    };
    (0..count).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nvidia_smi_prints_is_read_and_what_is_wrong_is_named() {
        let text = "0, GPU-1b9c, 143771, NVIDIA H200\n1, GPU-77aa, 143771, NVIDIA H200, rev 2\n";
        let gpus = parse(text).unwrap();
        assert_eq!((gpus.len(), gpus[0].memory), (2, Bytes::from_mib(143_771)));
        assert_eq!((gpus[1].name().as_str(), gpus[1].model.as_str()), ("gpu-1", "NVIDIA H200, rev 2"));
        for (text, what) in [
            ("No devices were found", "need index"),
            ("x, GPU-1, 1, a", "index `x`"),
            ("0, GPU-1, [N/A], a", "memory `[N/A]`"),
            ("0, GPU-1, 0, a", "0 MiB"),
            ("0, GPU-1, 1, a\n0, GPU-2, 1, a", "twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(what), "{text}: {error}");
        }
    }
}
