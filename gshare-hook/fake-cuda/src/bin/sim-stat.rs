//! Prints the ground truth of a simulated device as one JSON object: `sim-stat [DEVICE-FILE]`.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let path = std::env::args_os().nth(1).map_or_else(fake_cuda::sim::default_path, PathBuf::from);
    if !path.exists() {
        eprintln!("sim-stat: no device file at {}", path.display());
        return ExitCode::FAILURE;
    }
    let text = fake_cuda::sim::SimDevice::open(&path, &fake_cuda::Spec::default())
        .map_err(|e| e.to_string())
        .and_then(|device| serde_json::to_string_pretty(&device.truth()).map_err(|e| e.to_string()));
    match text {
        Ok(text) => {
            // A reader that has seen enough is no error.
            let _ = writeln!(std::io::stdout(), "{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sim-stat: {error}");
            ExitCode::FAILURE
        }
    }
}
