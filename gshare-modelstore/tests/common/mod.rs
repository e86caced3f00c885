//! A store in a directory of its own, and models to put into it.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use gshare_modelstore::client::{Client, ClientError};
use gshare_modelstore::frame::Code;
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Running, Server, ServerConfig};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub struct TestStore {
    running: Option<Running>,
    configure: Box<dyn Fn(&mut ServerConfig)>,
    dir: tempfile::TempDir,
}

impl TestStore {
    pub fn new(configure: impl Fn(&mut ServerConfig) + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Self { running: None, configure: Box::new(configure), dir };
        store.restart();
        store
    }

    pub fn restart(&mut self) {
        drop(self.running.take());
        let mut config = ServerConfig::at(self.path());
        (self.configure)(&mut config);
        self.running = Some(Server::new(config).unwrap().spawn().unwrap());
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("store.sock")
    }

    pub fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    pub fn client(&self) -> Client {
        Client::connect(self.path()).unwrap()
    }

    /// A connection without a client.
    pub fn raw(&self) -> OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(self.path()).unwrap()).unwrap();
        socket
    }

    pub fn stat(&self, tier: &str, field: &str) -> u64 {
        self.running().stat()[tier][field].as_u64().unwrap()
    }

    /// Waits until a figure of the host tier is `value`.
    pub fn until(&self, field: &str, value: u64) {
        let begun = Instant::now();
        while self.stat("host", field) != value {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{field} is {}, not {value}",
                self.stat("host", field)
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl TestStore {
    pub fn until_clients(&self, value: u64) {
        let begun = Instant::now();
        while self.running().stat()["clients"] != value {
            assert!(begun.elapsed() < Duration::from_secs(60), "clients: {}", self.running().stat());
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The bytes that a tensor of this name has in all tests.
pub fn data_of(name: &str, bytes: u64) -> Vec<u8> {
    let seed = name.bytes().fold(7u64, |seed, byte| seed * 31 + u64::from(byte));
    (0..bytes).map(|at| ((at >> 2) ^ (at >> 11) ^ seed).to_le_bytes()[0]).collect()
}

/// A safetensors file with byte tensors of these names and sizes.
pub fn model_file(tensors: &[(&str, u64)]) -> File {
    let shapes: Vec<[u64; 1]> = tensors.iter().map(|&(_, bytes)| [bytes]).collect();
    let listed: Vec<(&str, Dtype, &[u64])> =
        tensors.iter().zip(&shapes).map(|((name, _), shape)| (*name, Dtype::U8, &shape[..])).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&Header::encode(&listed)).unwrap();
    for &(name, bytes) in tensors {
        file.write_all(&data_of(name, bytes)).unwrap();
    }
    file
}

pub fn refused<T>(result: Result<T, ClientError>) -> Code {
    match result {
        Err(ClientError::Refused { code, .. }) => code,
        Err(other) => panic!("not refused, but: {other}"),
        Ok(_) => panic!("not refused"),
    }
}

/// A shared map that can be written.
#[allow(unsafe_code, reason = "a map that the test wants to be refused")]
pub fn map_for_writing(file: BorrowedFd<'_>) -> memmap2::MmapMut {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the bytes are not read while the map lives.
    unsafe { memmap2::MmapOptions::new().len(4_096).map_mut(file.as_raw_fd()).unwrap() }
}
