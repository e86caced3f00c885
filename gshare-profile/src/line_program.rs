//! A program of the user's as the function: its batches by a line protocol, its share by its environment.
//!
//! # Protocol
//! The program is started once per setting. It reads its batch size from `GSHARE_BATCH` and its shares are enforced from
//! outside (the hook, MPS). One of two ways to work:
//!
//! - [`Protocol::Requests`], for inference: it loads, writes a line, and from then on answers each line of its input
//!   with one line, in order. The end of its input is the end of its work. In Python:
//!   ```python
//!   model = load(); print("ready", flush=True)
//!   for line in sys.stdin: infer(batch); print("done", flush=True)
//!   ```
//! - [`Protocol::Steps`], for training: it works by itself and writes a line per step. With its first line it is ready.
//!
//! The text of the lines is not looked at. Other output belongs on standard error.
//!
//! If a program does not end within [`GRACE`] after its input was closed, it is killed. Should this process be killed first,
//! the program sees the end of its input, and a broken pipe at its next line.

use crate::executor::{ExecError, Executor, Ready};
use gshare_core::profile::Setting;
use gshare_core::{Duration, Timestamp};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Time in which a program must end by itself.
pub const GRACE: Duration = Duration::from_millis(500);

/// How a program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// A line in is a batch to compute, a line out its answer.
    Requests,
    /// The function computes by itself; a line out is a step.
    Steps,
}

/// Makes the command of a setting.
type Make = Box<dyn FnMut(Setting) -> Result<Command, String> + Send>;

/// Runs a program. See the [module](self).
pub struct Process {
    make: Make,
    protocol: Protocol,
    begin: Instant,
    running: Option<Running>,
    #[cfg(feature = "nvml")]
    meter: Option<crate::meter::NvmlMeter>,
}

struct Running {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Instant>,
}

impl Process {
    /// A program. For each setting, `make` makes its command and environment, and `GSHARE_BATCH` is added here.
    pub fn new(
        protocol: Protocol,
        make: impl FnMut(Setting) -> Result<Command, String> + Send + 'static,
    ) -> Self {
        Self {
            make: Box::new(make),
            protocol,
            begin: Instant::now(),
            running: None,
            #[cfg(feature = "nvml")]
            meter: None,
        }
    }

    /// Asks this meter how busy the GPU is while something is measured.
    #[cfg(feature = "nvml")]
    #[must_use]
    pub fn with_meter(mut self, meter: crate::meter::NvmlMeter) -> Self {
        self.meter = Some(meter);
        self
    }

    fn time(&self, at: Instant) -> Timestamp {
        let since = at.saturating_duration_since(self.begin);
        Timestamp::ZERO.saturating_add(since.into())
    }

    fn ended(&mut self) -> ExecError {
        let how = match &mut self.running {
            None => "it was not started".to_owned(),
            Some(running) => end(&mut running.child),
        };
        ExecError::Ended(how)
    }
}

/// Waits for a child to end; `None` where it has not by then.
fn wait_within(child: &mut Child, most: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + core::time::Duration::from(most);
    loop {
        // In this order: the child is looked at once more when time is up, however late this thread is.
        let late = Instant::now() >= deadline;
        match child.try_wait()? {
            None if !late => std::thread::sleep(core::time::Duration::from_millis(2)),
            ended => return Ok(ended),
        }
    }
}

/// Waits for the end of a program, and kills it if it does not end in time. Tells how it ended.
fn end(child: &mut Child) -> String {
    match wait_within(child, GRACE) {
        Ok(Some(status)) => return status.to_string(),
        Err(error) => return error.to_string(),
        Ok(None) => {}
    }
    let _ = child.kill();
    let _ = child.wait();
    "it closed its output and went on: killed".to_owned()
}

/// Passes on when each line came. The channel is small, so a program waits if it writes more lines than requested.
fn read_lines(output: impl io::Read, lines: &SyncSender<Instant>) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        // A line without end must not fill the memory.
        match io::Read::take(&mut reader, 1 << 20).read_until(b'\n', &mut line) {
            Ok(read) if read > 0 && lines.send(Instant::now()).is_ok() => {}
            _ => return,
        }
    }
}

impl Executor for Process {
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError> {
        self.stop();
        let mut command = (self.make)(setting).map_err(ExecError::Unavailable)?;
        let program = command.get_program().to_string_lossy().into_owned();
        command.env("GSHARE_BATCH", setting.batch.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let began = Instant::now();
        let mut child =
            command.spawn().map_err(|error| ExecError::Unavailable(format!("{program}: {error}")))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        // If a program never reads, we must not wait for room in the pipe.
        if let Some(Err(error)) = input.as_ref().map(|input| rustix::io::ioctl_fionbio(input, true)) {
            let _ = child.kill().and_then(|()| child.wait().map(drop));
            return Err(ExecError::Unavailable(format!("its input cannot be made not to block: {error}")));
        }
        let (sender, lines) = sync_channel(64);
        if let Some(output) = output {
            let reader = std::thread::Builder::new().name("gshare-lines".into());
            let spawned = reader.spawn(move || read_lines(output, &sender));
            if let Err(error) = spawned {
                let _ = child.kill().and_then(|()| child.wait().map(drop));
                return Err(ExecError::Unavailable(format!("a thread for its output: {error}")));
            }
        }
        self.running = Some(Running { child, input, lines });
        let first = self.running.as_ref().map(|running| running.lines.recv_timeout(within.into()));
        match first {
            Some(Ok(at)) => {
                let load = Duration::from(at.saturating_duration_since(began));
                Ok(Ready { load: Some(load) })
            }
            Some(Err(RecvTimeoutError::Timeout)) => {
                self.stop();
                Err(ExecError::NotReady { within, why: None })
            }
            _ => {
                let ended = self.ended();
                self.running = None;
                Err(ended)
            }
        }
    }

    fn now(&self) -> Timestamp {
        self.time(Instant::now())
    }

    fn submit(&mut self) -> Result<(), ExecError> {
        if self.protocol == Protocol::Steps {
            return Ok(());
        }
        let written = match self.running.as_mut().and_then(|running| running.input.as_mut()) {
            Some(input) => input.write_all(b"batch\n").and_then(|()| input.flush()),
            None => return Err(self.ended()),
        };
        // Lines this short are written whole or not at all.
        written.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => ExecError::Deaf,
            _ => self.ended(),
        })
    }

    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError> {
        let Some(running) = &self.running else { return Err(self.ended()) };
        let wait = until.saturating_since(self.now());
        match running.lines.recv_timeout(wait.into()) {
            Ok(at) => Ok(Some(self.time(at))),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    #[cfg(feature = "nvml")]
    fn begin_metering(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.begin();
        }
    }

    #[cfg(feature = "nvml")]
    fn end_metering(&mut self) -> Option<crate::meter::Utilisation> {
        self.meter.as_mut().and_then(|meter| meter.end())
    }

    fn stop(&mut self) {
        let Some(mut running) = self.running.take() else { return };
        drop(running.input.take());
        // A program of steps learns of its end by the broken pipe.
        drop(running.lines);
        end(&mut running.child);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

gshare_core::debug_fields!(Process { protocol });
