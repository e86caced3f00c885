//! A host as a process of its own, and requests to it.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A long time-out, for a machine with other work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Provider {
    pub(crate) child: Child,
    pub(crate) address: SocketAddr,
    /// Lines printed by the host.
    pub(crate) line: String,
}

impl Provider {
    pub(crate) fn start(state: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
        command.args(["--listen", "127.0.0.1:0", "--state"]).arg(state).args(more);
        Self::of(&mut command)
    }

    /// The host started by a command.
    pub(crate) fn of(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        Self { address: address.unwrap_or_else(|| panic!("`{line}`")), child, line }
    }

    pub(crate) fn call(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        call(self.address, method, path, body).unwrap()
    }

    pub(crate) fn deploy(&self, name: &str, more: &str) {
        let program = env!("CARGO_BIN_EXE_gpu_function");
        let body = format!(r#"{{"service":"{name}","image":"{program}"{more}}}"#);
        let (status, said) = self.call("POST", "/system/functions", &body);
        assert_eq!(status, 202, "{said}");
    }

    /// A client asks for this number of instances.
    #[track_caller]
    pub(crate) fn scale(&self, name: &str, count: u64) {
        let body = format!(r#"{{"serviceName":"{name}","replicas":{count}}}"#);
        let (status, said) = self.call("POST", &format!("/system/scale-function/{name}"), &body);
        assert_eq!(status, 202, "{said}");
    }

    /// Ends it as SIGKILL does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn replicas(&self, name: &str, count: u64) {
        within(|| {
            let (_, body) = self.call("GET", &format!("/system/function/{name}"), "");
            let status: serde_json::Value = serde_json::from_str(&body).unwrap();
            status["availableReplicas"].as_u64() == Some(count)
        });
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
pub(crate) fn within(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One request on a connection of its own: status and body.
pub(crate) fn call(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let rest = text.split_once("\r\n\r\n").map_or("", |(_, rest)| rest).to_owned();
    Ok((status.ok_or(std::io::ErrorKind::UnexpectedEof)?, rest))
}

/// Loses a GPU of a simulated board, in the order of `--sim`, or brings it back. Of boards with MIG devices each GPU is one of its own.
pub(crate) fn set_lost(state: &Path, board: u32, gpu: u32, lost: bool) {
    let file = if board == 0 { "device".to_owned() } else { format!("device.{board}") };
    let board = fake_cuda::sim::SimDevice::open(&state.join(file), &fake_cuda::Spec::default()).unwrap();
    assert!(board.set_lost(gpu, lost));
}
