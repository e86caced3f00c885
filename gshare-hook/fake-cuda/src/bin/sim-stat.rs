//! Prints the ground truth of a simulated device as one JSON object: `sim-stat [DEVICE-FILE]`. `--lose N` before the file first makes GPU N
//! fall off the bus; `--restore N` brings it back.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: sim-stat [--lose GPU | --restore GPU] [DEVICE-FILE]";

/// The GPU to lose (true) or to bring back, if any, and the device file.
fn parse(mut words: std::collections::VecDeque<OsString>) -> Option<(Option<(u32, bool)>, PathBuf)> {
    let lose = match words.front().and_then(|word| word.to_str()) {
        Some("--lose") => Some(true),
        Some("--restore") => Some(false),
        _ => None,
    };
    let mut change = None;
    if let Some(lose) = lose {
        words.pop_front();
        change = Some((words.pop_front()?.to_str()?.parse().ok()?, lose));
    }
    let path = words.pop_front().map_or_else(fake_cuda::sim::default_path, PathBuf::from);
    words.is_empty().then_some((change, path))
}

fn show(change: Option<(u32, bool)>, path: &std::path::Path) -> Result<String, String> {
    let device =
        fake_cuda::sim::SimDevice::open(path, &fake_cuda::Spec::default()).map_err(|e| e.to_string())?;
    if let Some((gpu, lost)) = change
        && !device.set_lost(gpu, lost)
    {
        return Err(format!("GPU {gpu}: need a number below {}", device.profile().gpus));
    }
    serde_json::to_string_pretty(&device.truth()).map_err(|e| e.to_string())
}

fn main() -> ExitCode {
    let Some((change, path)) = parse(std::env::args_os().skip(1).collect()) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    if !path.exists() {
        eprintln!("sim-stat: no device file at {}", path.display());
        return ExitCode::FAILURE;
    }
    match show(change, &path) {
        Ok(text) => {
            // A reader may close the pipe early; this is no error.
            let _ = writeln!(std::io::stdout(), "{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sim-stat: {error}");
            ExitCode::FAILURE
        }
    }
}
