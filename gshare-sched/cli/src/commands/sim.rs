//! `--sim`: one option for every command with a simulated device, and the kind of device without it.
//!
//! A specification is checked when the command line is read, so a wrong one starts neither a daemon nor a program. Only [`kind`]
//! asks a driver whether it is a simulation: a driver found through `LD_LIBRARY_PATH` is no less simulated.

use super::cuda;
use gshare_fake_cuda_spec::{Spec, SpecError};
use gshare_runner::libraries::{SimulatorDir, prepend};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names and values of a program's environment.
pub(crate) type Variables = Vec<(OsString, OsString)>;

/// The kind of device for the program.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Simulate {
    /// Run on a simulated device. SPEC is PROFILE,driver=RELEASE,devices=N,mig=NAME+NAME, each part optional: a built-in
    /// profile (v100, a100, h100, h200, b200, gb200, t4, tiny) or a profile file; the CUDA release of the driver, 11.0 to 13.4; 1 to 16
    /// GPUs; or the MIG devices that one GPU is cut into. [default: a100,driver=13.2, or the values of
    /// `GSHARE_SIM_PROFILE`, `GSHARE_SIM_DRIVER_VERSION`, `GSHARE_SIM_GPUS` and `GSHARE_SIM_MIG`, or the device in use].
    /// Kernels take time but compute nothing, but for `--compute`. JAX uses a GPU only if /dev/nvidia0 or /dev/nvidiactl exists: see `gshare
    /// doctor --sim`.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = checked)]
    pub(crate) sim: Option<Spec>,
}

/// Reads a specification and checks it like the driver, together with the environment's settings.
pub(super) fn checked(text: &str) -> Result<Spec, SpecError> {
    let spec: Spec = text.parse()?;
    spec.clone().or(Spec::of_environment()?).resolve()?;
    Ok(spec)
}

impl Simulate {
    /// Prepares a command to find the simulated driver, if it is to run on it; the directory must outlive the program.
    pub(crate) fn prepare(&self, command: &mut Command) -> anyhow::Result<Option<SimulatorDir>> {
        let Some((variables, dir)) = self.environment()? else { return Ok(None) };
        command.envs(variables);
        Ok(Some(dir))
    }

    /// The variables for a program to find the simulated driver in the directory.
    pub(crate) fn environment(&self) -> anyhow::Result<Option<(Variables, SimulatorDir)>> {
        let Some(spec) = &self.sim else { return Ok(None) };
        let dir = SimulatorDir::new()?;
        let own = spec.variables().into_iter().map(|(key, value)| (key.into(), value.into()));
        let path = ("LD_LIBRARY_PATH".into(), prepend("LD_LIBRARY_PATH", dir.path()));
        Ok(Some((own.chain([path]).collect(), dir)))
    }

    /// This command once more, without `--sim`, in an environment with the simulated driver.
    pub(crate) fn again(&self) -> anyhow::Result<Option<(Command, SimulatorDir)>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1).filter(|word| !word.to_string_lossy().starts_with("--sim")));
        Ok(self.prepare(&mut command)?.map(|dir| (command, dir)))
    }

    /// The kind of the programs' device.
    ///
    /// # Errors
    /// Without `--sim`, when there is no driver.
    pub(crate) fn kind(&self) -> anyhow::Result<Kind> {
        match &self.sim {
            Some(_) => Ok(Kind::Simulated),
            None => Ok(kind(&cuda::Driver::load()?)),
        }
    }

    /// The kind of the programs' device, named on standard error if it is simulated.
    ///
    /// # Errors
    /// Without `--sim`, when there is no driver; the error proposes `command` with `--sim`.
    pub(crate) fn announce(&self, command: &str) -> anyhow::Result<Kind> {
        let kind = self.kind().map_err(|error| {
            let why = gshared::report::told(error.as_ref());
            anyhow::anyhow!(
                "no CUDA driver on this machine: {why}\nto run on a simulated device, add --sim: gshare {command} --sim …"
            )
        })?;
        if kind == Kind::Simulated {
            eprintln!("gshare: simulated device");
        }
        Ok(kind)
    }
}

/// The kind of a driver's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Simulated,
    Real,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Simulated => "simulated",
            Self::Real => "real",
        }
    }

    pub(crate) fn is_simulated(self) -> bool {
        self == Self::Simulated
    }
}

/// Asks a driver: only the simulated driver exports its ground truth.
pub(crate) fn kind(driver: &cuda::Driver) -> Kind {
    if driver.is_simulated() { Kind::Simulated } else { Kind::Real }
}

/// The device nodes JAX looks for before it loads a driver; one is enough.
const JAX_NODES: [&str; 2] = ["/dev/nvidia0", "/dev/nvidiactl"];

/// Advice for JAX, which would use the CPU and say nothing.
pub(crate) const JAX_ADVICE: &str = "JAX uses a GPU only where /dev/nvidia0 or /dev/nvidiactl exists, even if a driver is there, and takes \
     the CPU otherwise; to have it use the simulated device, make an empty file: sudo touch /dev/nvidiactl (in a container: \
     -v /dev/null:/dev/nvidiactl)";

/// Whether JAX would look for a driver on this machine.
pub(crate) fn jax_would_look() -> bool {
    JAX_NODES.iter().any(|node| Path::new(node).exists())
}

/// Whether a program is the interpreter of an environment with JAX's CUDA plugin.
pub(crate) fn has_jax(program: &Path) -> bool {
    let found = if program.components().count() > 1 {
        Some(program.to_owned())
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
    };
    // Links are not followed: an environment's interpreter is a link out of it.
    let root = found.as_deref().and_then(Path::parent).and_then(Path::parent).map(|root| root.join("lib"));
    let entries =
        |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let plugins = root.into_iter().flat_map(entries).map(|python| python.join("site-packages/jax_plugins"));
    plugins
        .flat_map(entries)
        .any(|plugin| plugin.file_name().is_some_and(|n| n.to_string_lossy().starts_with("xla_cuda")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jax_is_found_beside_its_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bin/python");
        assert!(!has_jax(&program));
        std::fs::create_dir_all(dir.path().join("lib/python3.13/site-packages/jax_plugins/xla_cuda13"))
            .unwrap();
        assert!(has_jax(&program));
        assert!(!has_jax(Path::new("no-such-program")) && !has_jax(Path::new("true")));
    }

    #[test]
    fn a_specification_is_checked_when_it_is_read() {
        assert_eq!(checked("").unwrap(), Spec::default());
        assert!(checked("h100,driver=12.8,devices=2").is_ok());
        assert!(checked("nothing-of-this-name").unwrap_err().to_string().contains("v100, a100, h100"));
        assert!(checked("v100,mig=1g.10gb").unwrap_err().to_string().contains("no MIG slice"));
    }
}
