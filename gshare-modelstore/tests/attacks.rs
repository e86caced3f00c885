//! Clients of one uid that take all they can get, and what that leaves to others: each attack is refused with the bound that it
//! meets, another uid is served meanwhile, and all are served once the attacker is gone.
//!
//! The store, the attacker and the neighbour are processes of three uids, where the test may choose uids; else the attacker's
//! refusal and the time after it are all that can be shown.

mod common;

use common::{data_of, model_file};
use gshare_core::Bytes;
use gshare_modelstore::bounds::Work;
use gshare_modelstore::client::{Client, ClientError, GetOptions};
use gshare_modelstore::frame::{Answer, Code, MAX_FRAME, Request, Wanted};
use gshare_modelstore::safetensors::Dtype;
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketType, connect, recv, sendmsg, shutdown, socket,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const HOST: MemoryTier = MemoryTier::Host;
const ROLE: &str = "STORE_ATTACK_ROLE";
const SOCKET: &str = "STORE_ATTACK_SOCKET";
/// Uids that no user of the machine has.
const STORE: u32 = 65_531;
const ATTACKER: u32 = 65_532;
const NEIGHBOUR: u32 = 65_533;
/// Few enough that an attacker of the usual limit, 1,024, can take them all.
const DESCRIPTORS: u64 = 512;
/// Host memory of the store.
const MEMORY: Bytes = Bytes::from_mib(256);

/// A process in a role, which is killed with this.
struct Role {
    child: Child,
    /// Its output until it was ready.
    told: String,
}

impl Role {
    /// Starts a role, and waits until its attack is done.
    fn start(dir: &Path, role: &str, uid: u32) -> Self {
        let mut command = Command::new(dir.join("program"));
        command.args(["--exact", "roles", "--nocapture", "--test-threads=1"]).current_dir("/");
        command.env(ROLE, role).env(SOCKET, dir.join("store.sock"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if is_root() {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        let (mut told, mut byte) = (Vec::new(), [0]);
        while !told.ends_with(b"READY") {
            let read = out.read(&mut byte).unwrap();
            assert_eq!(read, 1, "{role} ended: {}", String::from_utf8_lossy(&told));
            told.push(byte[0]);
        }
        child.stdout = Some(out);
        Self { child, told: String::from_utf8(told).unwrap() }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A store in a process of its own, with a model `shared` of the operator's.
struct Rig {
    store: Role,
    dir: tempfile::TempDir,
    /// A program that was just written cannot be started while another test's child still has the descriptor that wrote it.
    _alone: MutexGuard<'static, ()>,
}

impl Rig {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock();
        let dir = tempfile::tempdir().unwrap();
        // Others start the program and connect; the store makes its socket here.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        std::fs::copy(std::env::current_exe().unwrap(), dir.path().join("program")).unwrap();
        let rig = Self { store: Role::start(dir.path(), "store", STORE), dir, _alone };
        let file = model_file(&[("w", 1_000)]);
        rig.client().put_file("shared", Access::Public, HOST, &file, |_, _| {}).unwrap();
        rig.client().put_file("private", Access::Private, HOST, &file, |_, _| {}).unwrap();
        rig
    }

    fn client(&self) -> Client {
        Client::connect(self.dir.path().join("store.sock")).unwrap()
    }

    /// The attack meets a bound, the attacker learns of it, and others lose nothing.
    fn withstands(&self, attack: &str, code: Code, bound: &str) {
        let attacker = Role::start(self.dir.path(), attack, ATTACKER);
        let expected = format!("REFUSED {code:?} ");
        assert!(attacker.told.contains(&expected) && attacker.told.contains(bound), "{}", attacker.told);
        if is_root() {
            drop(Role::start(self.dir.path(), "neighbour", NEIGHBOUR));
            be_served(&self.client(), "operator");
        }
        drop(attacker);
        // Models stay; the operator can take them away.
        let client = self.client();
        for model in client.status().unwrap().models {
            if ["tiny", "large"].iter().any(|begin| model.name.starts_with(begin)) {
                client.evict(&format!("{}:{}", model.owner_uid, model.name), true).unwrap();
            }
        }
        be_served(&client, "afterwards");
    }

    /// The most memory that the store ever had.
    fn most_memory(&self) -> Bytes {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.store.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        Bytes(line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10)
    }
}

/// Only root can become another user.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("not all is shown: this needs root");
    }
    root
}

/// Uses the store as every client may, in particular beside an attacker.
fn be_served(client: &Client, name: &str) {
    let options = GetOptions::default();
    assert_eq!(client.get("shared", &options).unwrap().bytes_of("w").unwrap(), data_of("w", 1_000));
    client.store(name, Dtype::U8, &[4], &[1, 2, 3, 4]).unwrap();
    assert_eq!(client.get_tensor(name).unwrap().bytes_of("tensor").unwrap(), [1, 2, 3, 4]);
    let file = format!("{name}-file");
    client.put_file(&file, Access::Private, HOST, &model_file(&[(name, 1_000)]), |_, _| {}).unwrap();
    client.verify(&file).unwrap();
    assert!(client.stat().unwrap()["clients"].as_u64().unwrap() > 0);
    client.list().unwrap();
}

/// The work of the other processes. Without a role, nothing.
#[test]
fn roles() {
    let (Ok(role), Ok(path)) = (std::env::var(ROLE), std::env::var(SOCKET)) else { return };
    let path = Path::new(&path);
    let connect = || Client::connect(path).unwrap();
    match role.as_str() {
        "store" => {
            let limit = Some(DESCRIPTORS);
            setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
            let mut config = ServerConfig::at(path);
            config.store.host = MEMORY;
            // So little that the speed of the machine does not matter.
            let config = config.with_header_work(Work { burst: Bytes::from_mib(4), rate: Bytes(1) });
            let _running = Server::new(config).unwrap().spawn().unwrap();
            ready();
        }
        "neighbour" => {
            be_served(&connect(), "neighbour");
            ready();
        }
        "written models" => {
            let client = connect();
            say((0..777u32)
                .map(|n| client.store(&format!("tiny{n}"), Dtype::U8, &[4], &n.to_le_bytes()).map(drop)));
        }
        "models of files" => {
            let client = connect();
            say((0..777).map(|n| {
                let (name, file) = (format!("tiny{n}"), model_file(&[(&format!("w{n}"), 10)]));
                client.put_file(&name, Access::Private, HOST, &file, |_, _| {}).map(drop)
            }));
        }
        "arenas" => {
            let client = connect();
            say((0..8).map(|n| {
                client.store(&format!("large{n}"), Dtype::U8, &[32 << 20], &vec![n; 32 << 20]).map(drop)
            }));
        }
        "names" => {
            let client = connect();
            for name in ["shared", "private", "neighbour", "neighbour-file", "operator", "afterwards"] {
                put_public(&client, name, b"mine");
            }
            let options = GetOptions::default();
            say([
                client.evict("0:shared", true),
                client.get("0:private", &options).map(drop),
                client.pin("0:private", true),
            ]
            .into_iter());
        }
        "unread gets" => {
            let clients: Vec<OwnedFd> = (0..13).map(|_| raw(path)).collect();
            clients.iter().for_each(|client| (0..60).for_each(|_| get(client)));
            // Another reads all its answers, until it is refused for those that the others leave.
            let last = raw(path);
            let asked = (0..10_000).map(|_| {
                get(&last);
                answer(&last)
            });
            say(asked);
        }
        "unread answers of connections that ended" => {
            let clients: Vec<OwnedFd> = (0..200)
                .map(|_| {
                    let client = raw(path);
                    (0..4).for_each(|_| get(&client));
                    let _ = shutdown(&client, Shutdown::Write);
                    client
                })
                .collect();
            say(clients.iter().map(answer));
        }
        "connections" => {
            let clients: Vec<Client> = (0..700).map(|_| connect()).collect();
            say(clients.iter().map(|client| client.stat().map(drop)));
        }
        "large headers" => put_headers(path, 12, 90_000_000),
        "many headers" => {
            let client = connect();
            let header = dense_header(900_000);
            say((0..20).map(|_| {
                let file = tempfile();
                file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
                file.write_all_at(&header, 8).unwrap();
                // Too short for its data, which only a parse can tell.
                client.put_file("x", Access::Private, HOST, &file, |_, _| {}).map(drop)
            }));
        }
        other => panic!("{other}"),
    }
}

/// Keeps the role's memory and connections until a kill.
fn ready() -> ! {
    print!("READY");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

/// Goes on until it is refused by a bound, and says which.
fn say(results: impl Iterator<Item = Result<(), ClientError>>) -> ! {
    for (at, result) in results.enumerate() {
        match result {
            Ok(()) | Err(ClientError::Refused { code: Code::BadHeader, .. }) => {}
            Err(ClientError::Refused { code, text }) => {
                println!("REFUSED {code:?} at {at}: {text}");
                break;
            }
            Err(other) => {
                println!("at {at}: {other}");
                break;
            }
        }
    }
    ready()
}

fn tempfile() -> File {
    File::from(memfd_create("attack", MemfdFlags::CLOEXEC).unwrap())
}

fn raw(path: &Path) -> OwnedFd {
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn encoded(request: &Request) -> Vec<u8> {
    let mut frame = Vec::new();
    request.encode(1, &mut frame);
    frame
}

/// Asks for a model; the answer may be read later, or never. A store that hung up is for the reader to see.
fn get(client: &OwnedFd) {
    let wanted = Wanted::Name("shared".into());
    let frame = encoded(&Request::Get { tier: HOST, timeout_ms: 60_000, wanted });
    let _ = rustix::net::send(client, &frame, SendFlags::NOSIGNAL);
}

/// Every user may read the model: its name should pass for another user's.
fn put_public(client: &Client, name: &str, bytes: &[u8]) {
    let mut put = client.put(name, Access::Public, HOST, &[("w", Dtype::U8, &[bytes.len() as u64])]).unwrap();
    put.write("w", 0, bytes).unwrap();
    put.commit().unwrap();
}

/// The next answer of a raw connection; its descriptors are closed by the kernel.
fn answer(client: &OwnedFd) -> Result<(), ClientError> {
    let mut bytes = [0; MAX_FRAME];
    let mut next = || recv(client, &mut bytes, RecvFlags::empty()).map(|(length, _)| length);
    // A reset is reported once, before the last data.
    let length = next().or_else(|_| next()).map_err(std::io::Error::from)?;
    match Answer::decode(bytes.get(..length).filter(|bytes| !bytes.is_empty()).ok_or(ClientError::Gone)?)?.1 {
        Answer::Refused { code, text } => Err(ClientError::Refused { code, text }),
        _ => Ok(()),
    }
}

/// A header of tensors with short names and no bytes, and one with a byte.
fn dense_header(bytes: usize) -> Vec<u8> {
    let mut json = String::from(r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#);
    let mut at = 0;
    while json.len() + 60 < bytes {
        json.push_str(&format!(r#","{at:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#));
        at += 1;
    }
    json.push('}');
    json.into_bytes()
}

/// A number of clients at once begin to write a model with a header of `bytes`, mostly spaces.
fn put_headers(path: &Path, clients: usize, bytes: u64) -> ! {
    let file = tempfile();
    let block = vec![b' '; 1 << 20];
    (0..bytes.div_ceil(1 << 20)).for_each(|at| file.write_all_at(&block, at << 20).unwrap());
    file.write_all_at(&dense_header(100), 0).unwrap();
    let clients: Vec<OwnedFd> = (0..clients).map(|_| raw(path)).collect();
    for (at, client) in clients.iter().enumerate() {
        let name = format!("large{at}");
        let put = Request::PutBegin { tier: HOST, access: Access::Private, header_bytes: bytes, name };
        send_file(client, &encoded(&put), file.as_fd());
    }
    say(clients.iter().map(answer))
}

fn send_file(client: &OwnedFd, frame: &[u8], file: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(client, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn small_models_leave_descriptors_to_others() {
    Rig::new().withstands("written models", Code::UidDescriptors, "descriptors");
    Rig::new().withstands("models of files", Code::UidDescriptors, "descriptors");
}

#[test]
fn models_that_cannot_go_leave_memory_to_others() {
    // The operator may have all memory.
    if is_root() {
        Rig::new().withstands("arenas", Code::TenantBytes, "limit of bytes");
    }
}

#[test]
fn names_belong_to_the_uid_that_gave_them() {
    if !is_root() {
        return;
    }
    let rig = Rig::new();
    // The neighbour has models of the names that the attacker took, and all get the operator's `shared`.
    rig.withstands("names", Code::NotAllowed, "not allowed");
    let (client, options) = (rig.client(), GetOptions::default());
    let theirs = format!("{ATTACKER}:shared");
    assert_eq!(client.get(&theirs, &options).unwrap().bytes_of("w").unwrap(), b"mine");
    client.evict(&theirs, true).unwrap();
    assert_eq!(common::refused(client.get(&theirs, &options)), Code::UnknownModel);
    be_served(&client, "once more");
}

/// Sizes of the store's memory files: of arenas, and of manifests.
fn files_of(store: &Role) -> (u64, u64) {
    let (mut seen, mut arenas, mut manifests) = (BTreeSet::new(), 0, 0);
    for entry in std::fs::read_dir(format!("/proc/{}/fd", store.child.id())).unwrap() {
        let path = entry.unwrap().path();
        // A descriptor that is closed meanwhile is none of an arena that stays.
        let (Ok(target), Ok(about)) = (std::fs::read_link(&path), std::fs::metadata(&path)) else { continue };
        let target = target.to_string_lossy().into_owned();
        if seen.insert(about.ino()) && target.contains("gshare-arena") {
            arenas += about.len();
        } else if target.contains("gshare-manifest") {
            manifests += about.len();
        }
    }
    (arenas, manifests)
}

#[test]
fn the_status_says_to_the_byte_what_the_store_holds() {
    let rig = Rig::new();
    let client = rig.client();
    be_served(&client, "a");
    for (name, bytes) in [("b", 5_000_000u64), ("c", 2 << 20), ("twin of b", 5_000_000)] {
        let file = model_file(&[(&name[name.len() - 1..], bytes), ("x", 3)]);
        client.put_file(name, Access::Private, HOST, &file, |_, _| {}).unwrap();
    }
    let _held = client.get("b", &GetOptions::default()).unwrap();
    client.evict("a-file", false).unwrap();
    // The twin's first arena goes in a thread of its own.
    let status = loop {
        let status = client.status().unwrap();
        if status.tiers.iter().all(|tier| tier.leaving_bytes == 0) {
            break status;
        }
    };
    assert_eq!((status.clients, status.models.len(), status.models_left_out), (1, 7, 0));
    let arenas = |name: &str| {
        let model = status.models.iter().find(|model| model.name == name).unwrap();
        model.arenas.iter().map(|arena| (arena.bytes, arena.references)).collect::<Vec<_>>()
    };
    assert_eq!(arenas("b"), [(6 << 20, 1)]);
    assert_eq!(arenas("a-file"), [], "on disk only");
    let each: BTreeMap<_, u64> = status
        .models
        .iter()
        .flat_map(|model| &model.arenas)
        .map(|arena| (arena.arena, arena.bytes))
        .collect();
    let host = status.tiers.iter().find(|tier| tier.tier == HOST).unwrap();
    assert_eq!(host.arenas, each.len() as u64, "`b` and its twin are one, as are `shared` and `private`");
    assert_eq!(host.arena_bytes, each.values().sum::<u64>());
    assert_eq!(host.capacity_bytes, MEMORY.0);
    let (arenas, manifests) = files_of(&rig.store);
    assert_eq!(host.arena_bytes + host.manifest_bytes, arenas + manifests);
    let uid = rustix::process::geteuid().as_raw();
    let connections =
        status.uses.iter().find(|used| used.uid == uid && used.resource == "connections").unwrap();
    assert!(connections.held == 1 && connections.per_uid < connections.total);
}

#[test]
fn answers_that_are_not_read_cut_off_only_their_reader() {
    Rig::new().withstands("unread gets", Code::UidUnread, "unread_descriptors");
    let ended = "unread answers of connections that ended";
    Rig::new().withstands(ended, Code::UidConnections, "connections");
}

#[test]
fn connections_of_one_uid_leave_some_to_others() {
    Rig::new().withstands("connections", Code::UidConnections, "connections");
}

#[test]
fn headers_take_no_more_memory_than_their_bound() {
    let rig = Rig::new();
    let before = rig.most_memory();
    rig.withstands("large headers", Code::UidMemory, "memory_bytes");
    let grown = rig.most_memory().saturating_sub(before);
    assert!(grown < Bytes::from_mib(64), "{grown} more for headers that were refused");
}

#[test]
fn headers_are_parsed_for_one_uid_as_fast_as_its_bound_allows() {
    let rig = Rig::new();
    let before = rig.most_memory();
    rig.withstands("many headers", Code::HeaderWork, "header_work");
    // The bound of one uid holds for headers that are as dense as can be.
    let grown = rig.most_memory().saturating_sub(before);
    assert!(grown < Bytes::from_mib(16), "{grown} more for headers that were parsed");
}
