//! A store and its clients in one process: put, get, share, refuse, evict.

mod common;

use common::{TestStore, data_of, model_file, refused};
use gshare_core::{BasisPoints, Bytes};
use gshare_modelstore::bounds::{Bound, Resource};
use gshare_modelstore::client::{Client, ClientError, GetOptions};
use gshare_modelstore::frame::{Answer, Code, Handle, MAX_FRAME, Request};
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, ContentHash, MemoryTier};
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, accept,
    bind, listen, sendmsg, socket,
};
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

const HOST: MemoryTier = MemoryTier::Host;

#[test]
fn a_model_is_the_same_bytes_for_all_who_get_it() {
    let store = TestStore::new(|_| {});
    let file = model_file(&[("w", 3_000_000), ("b", 17)]);
    let mut told = Vec::new();
    let stored = store
        .client()
        .put_file("m", Access::Public, HOST, &file, |done, total| told.push((done, total)))
        .unwrap();
    let clients: Vec<Client> = (0..8).map(|_| store.client()).collect();
    let models: Vec<_> =
        clients.iter().map(|client| client.get("m", &GetOptions::default()).unwrap()).collect();
    for model in &models {
        assert_eq!(model.content(), stored.content);
        assert_eq!(model.bytes_of("w").unwrap(), data_of("w", 3_000_000));
        assert_eq!(model.bytes_of("b").unwrap(), data_of("b", 17));
        assert_eq!(
            model.manifest().unwrap().tensor("b").unwrap().hash,
            *blake3::hash(&data_of("b", 17)).as_bytes()
        );
    }
    assert_eq!(store.stat("host", "references"), 8);
    assert_eq!(store.running().stat()["loads"], 1);
    let by_content = clients[0].get_content(stored.content, &GetOptions::default()).unwrap();
    assert_eq!(by_content.bytes_of("b").unwrap(), data_of("b", 17));
    assert_eq!(refused(clients[0].evict("m", false)), Code::InUse);
    drop((models, by_content));
    clients[0].verify("m").unwrap();
    store.until("references", 0);
    clients[0].evict("m", false).unwrap();
    assert_eq!(store.stat("host", "committed_bytes"), 0);
    // The model has a source, so it comes back.
    assert_eq!(clients[3].get("m", &GetOptions::default()).unwrap().content(), stored.content);
    drop(clients);
    store.until("references", 0);
}

#[test]
fn the_same_content_under_two_names_is_stored_once() {
    let store = TestStore::new(|_| {});
    let client = store.client();
    let first =
        client.put_file("a", Access::Public, HOST, &model_file(&[("w", 5_000_000)]), |_, _| {}).unwrap();
    let second =
        client.put_file("b", Access::Public, HOST, &model_file(&[("w", 5_000_000)]), |_, _| {}).unwrap();
    assert_eq!(first, second);
    assert_eq!(store.stat("host", "committed_bytes"), first.bytes);
    let mut put = client.put("c", Access::Public, HOST, &[("w", Dtype::U8, &[5_000_000])]).unwrap();
    put.write("w", 0, &data_of("w", 5_000_000)).unwrap();
    assert_eq!(put.commit().unwrap(), first);
    assert_eq!(store.stat("host", "committed_bytes"), first.bytes);
}

#[test]
fn a_tensor_is_stored_and_got_by_its_id() {
    let store = TestStore::new(|_| {});
    let client = store.client();
    client.store("layer1.weight", Dtype::F32, &[2, 3], &[7; 24]).unwrap();
    let tensor = client.get_tensor("layer1.weight").unwrap();
    assert_eq!(tensor.bytes_of("tensor").unwrap(), [7; 24]);
    assert_eq!(refused(client.store("layer1.weight", Dtype::F32, &[2, 3], &[7; 24])), Code::NameTaken);
}

/// Maps that this process has of a file.
fn maps_of(file: BorrowedFd<'_>) -> usize {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_ascii_whitespace().nth(4) == Some(&inode[..])).count()
}

#[test]
fn a_model_is_mapped_at_the_first_look_and_also_when_the_store_is_gone() {
    let store = TestStore::new(|_| {});
    let client = store.client();
    client.put_file("m", Access::Public, HOST, &model_file(&[("w", 1_000)]), |_, _| {}).unwrap();
    let model = client.get("m", &GetOptions::default()).unwrap();
    assert_eq!(store.stat("host", "references"), 1);
    let file = model.handle().1.unwrap();
    assert_eq!(maps_of(file), 0, "a get is the descriptor and the reference");
    drop(store);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(model.bytes_of("w").unwrap(), data_of("w", 1_000)));
        }
    });
    assert_eq!(maps_of(file), 1, "by all of them once");
    assert!(matches!(model.bytes_of("v"), Err(ClientError::NoTensor { name }) if name == "v"));
}

/// A store that hands this out for every request, as an arena of 2 MiB and a manifest of 64 bytes behind it.
fn hands_out(dir: &Path, file: &OwnedFd) -> Client {
    let path = dir.join("lying.sock");
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&socket, 1).unwrap();
    let file = file.try_clone().unwrap();
    std::thread::spawn(move || {
        let client = accept(&socket).unwrap();
        let mut bytes = [0; MAX_FRAME];
        let (length, _) = rustix::net::recv(&client, &mut bytes, rustix::net::RecvFlags::empty()).unwrap();
        let (number, _) = Request::decode(&bytes[..length]).unwrap();
        let (content, handle) = (ContentHash([0; 32]), Handle::HostFile);
        let answer = Answer::Served { arena: 0, bytes: 2 << 20, manifest_bytes: 64, content, handle };
        let mut frame = Vec::new();
        answer.encode(number, &mut frame);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&client, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).unwrap();
        // Until the client gives it back.
        let _ = rustix::net::recv(&client, &mut bytes, rustix::net::RecvFlags::empty());
    });
    Client::connect(&path).unwrap()
}

#[test]
fn what_can_still_be_written_or_cut_or_is_no_model_is_never_mapped() {
    let whole = (2 << 20) + 64;
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    for (bytes, seals, what) in [
        (whole, SealFlags::empty(), "not sealed"),
        (whole, SealFlags::SHRINK | SealFlags::GROW, "not sealed"),
        (whole, SealFlags::WRITE, "not sealed"),
        (whole - 1, all, "shorter"),
        (0, all, "shorter"),
        (whole, all, "not a manifest"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let file = memfd_create("lying", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        let model = hands_out(dir.path(), &file).get("m", &GetOptions::default()).unwrap();
        for refused in [
            model.manifest().map(drop).unwrap_err(),
            model.memory().map(drop).unwrap_err(),
            model.bytes_of("w").map(drop).unwrap_err(),
        ] {
            assert!(refused.to_string().contains(what), "{refused} for {bytes} bytes with {seals:?}");
        }
        assert_eq!(maps_of(file.as_fd()), 0, "{what}");
    }
}

#[test]
fn a_put_is_all_or_nothing() {
    let store = TestStore::new(|_| {});
    let client = store.client();
    let begin = || client.put("m", Access::Public, HOST, &[("w", Dtype::U8, &[9])]).unwrap();
    let mut put = begin();
    assert!(matches!(put.write("w", 5, b"12345"), Err(ClientError::Io(_))), "beyond its end");
    assert!(matches!(put.write("v", 0, b"1"), Err(ClientError::Io(_))), "no such tensor");
    let waiting = std::thread::spawn({
        let other = store.client();
        move || {
            other
                .get("m", &GetOptions { timeout: Duration::from_millis(200), ..GetOptions::default() })
                .map(drop)
        }
    });
    assert_eq!(refused(waiting.join().unwrap()), Code::TimedOut, "not before it is committed");
    drop(put);
    assert_eq!(refused(client.get("m", &GetOptions::default())), Code::UnknownModel, "given up");
    // A client that writes through a map must unmap it first.
    let put = begin();
    let mapped = common::map_for_writing(put.file().unwrap());
    assert_eq!(refused(put.commit()), Code::StillMapped);
    drop(mapped);
    let mut put = begin();
    put.write("w", 0, b"123456789").unwrap();
    put.commit().unwrap();
    assert_eq!(client.get("m", &GetOptions::default()).unwrap().bytes_of("w").unwrap(), b"123456789");
    store.until("promised_bytes", 2 << 20);
}

#[test]
fn a_store_that_is_full_refuses_and_evicts_what_nobody_holds() {
    let store = TestStore::new(|config| {
        config.store.host = Bytes::from_mib(8);
        (config.store.high, config.store.low) = (BasisPoints::WHOLE, BasisPoints::WHOLE);
    });
    let client = store.client();
    let file = |name| model_file(&[(name, 3 << 20)]);
    let put = |name: &'static str| client.put_file(name, Access::Public, HOST, &file(name), |_, _| {});
    put("a").unwrap();
    put("b").unwrap();
    let (a, b) =
        (client.get("a", &GetOptions::default()).unwrap(), client.get("b", &GetOptions::default()).unwrap());
    assert_eq!(refused(put("c")), Code::StoreFull);
    assert_eq!(
        refused(client.get("c", &GetOptions::default())),
        Code::UnknownModel,
        "a refused put leaves no name"
    );
    assert_eq!(a.bytes_of("a").unwrap(), data_of("a", 3 << 20), "others are not affected");
    drop(b);
    put("c").unwrap();
    assert_eq!(store.stat("host", "committed_bytes"), 8 << 20, "b went for c");
    assert_eq!(
        refused(client.put_file("d", Access::Public, HOST, &model_file(&[("d", 9 << 20)]), |_, _| {})),
        Code::ModelTooLarge
    );
    assert_eq!(
        refused(client.put("e", Access::Public, HOST, &[("e", Dtype::U8, &[1 << 40])])),
        Code::ModelTooLarge
    );
    let gpu = GetOptions { tier: MemoryTier::Gpu, ..GetOptions::default() };
    assert_eq!(refused(client.get("a", &gpu)), Code::ModelTooLarge, "there is no such tier");
}

#[test]
fn a_server_keeps_the_bounds_that_it_is_given_and_refuses_those_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let at = |bound| ServerConfig::at(dir.path().join("store.sock")).with_bound(Resource::Models, bound);
    let refused_at_start = Server::new(at(Bound { total: 3, per_uid: 2 })).unwrap_err().to_string();
    assert_eq!(refused_at_start, "models is 2 of 3: need from 1 to a third of the total for each uid");
    let running = Server::new(at(Bound { total: 3, per_uid: 1 })).unwrap().spawn().unwrap();
    let client = Client::connect(dir.path().join("store.sock")).unwrap();
    let put = |name: &str| client.store(name, Dtype::U8, &[1], &name.as_bytes()[..1]);
    // The client's user is the store's: all but the part of one other.
    put("a").unwrap();
    put("b").unwrap();
    assert_eq!(refused(put("c")), Code::UidModels);
    assert_eq!(refused(client.get("c", &GetOptions::default())), Code::UnknownModel, "and has no name");
    client.evict("a", true).unwrap();
    put("c").unwrap();
    running.stop();
}

#[test]
fn a_header_that_lies_is_refused_and_nothing_is_lost() {
    let store = TestStore::new(|_| {});
    let client = store.client();
    let lying = |json: &str, data: usize| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
        file.write_all(json.as_bytes()).unwrap();
        file.write_all(&vec![0; data]).unwrap();
        file
    };
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for (json, data) in [
        (tensor("[2]", "[0,8]"), 7),
        (tensor("[2]", "[0,8]"), 9),
        (tensor("[1000000000000]", "[0,4000000000000]"), 8),
        (tensor("[4294967296,4294967296,4]", "[0,8]"), 8),
        (tensor("[NaN]", "[0,8]"), 8),
        (tensor("[-2]", "[0,8]"), 8),
        (tensor("[2]", "[8,0]"), 8),
        (String::from("{}"), 0),
        (String::from("[[[[[[[["), 0),
    ] {
        let answer = client.put_file("m", Access::Public, HOST, &lying(&json, data), |_, _| {});
        assert_eq!(refused(answer), Code::BadHeader, "{json}");
    }
    let mut length = tempfile::tempfile().unwrap();
    length.write_all(&[0xff; 64]).unwrap();
    assert_eq!(refused(client.put_file("m", Access::Public, HOST, &length, |_, _| {})), Code::BadHeader);
    let (pipe, _writer) = std::io::pipe().unwrap();
    let pipe = std::fs::File::from(OwnedFd::from(pipe));
    assert_eq!(
        refused(client.put_file("m", Access::Public, HOST, &pipe, |_, _| {})),
        Code::BadHeader,
        "would block for ever"
    );
    assert_eq!(store.stat("host", "promised_bytes"), 0);
    client.put_file("m", Access::Public, HOST, &model_file(&[("w", 5)]), |_, _| {}).unwrap();
}

#[test]
fn a_forged_frame_costs_its_sender_the_connection_and_others_nothing() {
    let store = TestStore::new(|_| {});
    let other = store.client();
    other.put_file("m", Access::Public, HOST, &model_file(&[("w", 5)]), |_, _| {}).unwrap();
    let held = other.get("m", &GetOptions::default()).unwrap();
    let mut good = Vec::new();
    Request::Release { arena: 0 }.encode(1, &mut good);
    let mut forged: Vec<Vec<u8>> = vec![vec![0], vec![0xff; 900], vec![1; MAX_FRAME + 1], good[..9].to_vec()];
    let mut put = Vec::new();
    Request::PutFile { tier: HOST, access: Access::Public, name: "x".into() }.encode(1, &mut put);
    forged.push(put); // without its descriptor
    for bytes in forged {
        let socket = store.raw();
        rustix::net::send(&socket, &bytes, SendFlags::NOSIGNAL).unwrap();
        let mut answer = [0; 16];
        let (read, _) =
            rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap_or((0, 0));
        assert_eq!(read, 0, "{bytes:?} was answered");
    }
    // A stranger cannot release the references of others, nor commit their writes.
    let stranger = store.raw();
    for arena in 0..4u64 {
        let mut bytes = Vec::new();
        Request::Release { arena }.encode(1, &mut bytes);
        rustix::net::send(&stranger, &bytes, SendFlags::NOSIGNAL).unwrap();
    }
    assert_eq!(store.stat("host", "references"), 1);
    assert_eq!(held.bytes_of("w").unwrap(), data_of("w", 5));
    other.get("m", &GetOptions::default()).unwrap();
}

#[test]
fn files_of_the_directory_are_models_from_the_start_and_after_a_restart() {
    let models = tempfile::tempdir().unwrap();
    let path = models.path().join("resnet.safetensors");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&Header::encode(&[("w", Dtype::U8, &[100])])).unwrap();
    file.write_all(&data_of("w", 100)).unwrap();
    let directory = models.path().to_owned();
    let mut store = TestStore::new(move |config| config.models = Some(directory.clone()));
    let got = store.client().get("resnet", &GetOptions::default()).unwrap();
    store.client().put_file("other", Access::Public, HOST, &model_file(&[("w", 5)]), |_, _| {}).unwrap();
    store.restart();
    assert_eq!(got.bytes_of("w").unwrap(), data_of("w", 100), "a reader lives on without its store");
    let client = store.client();
    assert_eq!(client.get("resnet", &GetOptions::default()).unwrap().content(), got.content());
    assert_eq!(
        refused(client.get("other", &GetOptions::default())),
        Code::UnknownModel,
        "dropped, and said so"
    );
    let listed = client.list().unwrap();
    assert_eq!(listed["models"][0]["name"], "resnet");
    assert_eq!(listed["models"].as_array().unwrap().len(), 1);
}
