//! `gshare lab build-dag`: a function runs once in `BUILD_DAG` mode, its components are measured on simulated slices, and the DAG is cut
//! into stages; the same program serves as each of them.

use crate::hooked;
use gshare_core::Bytes;
use gshare_core::dag::Dag;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

const GSHARE: &str = env!("CARGO_BIN_EXE_gshare");
const FIXTURE: &str = env!("CARGO_BIN_EXE_gshare-fixture");
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gshare-sched/runner/python/example.py");
/// The test ignores the effect of a loaded machine on the times.
const QUICK: [&str; 6] = ["--time", "700ms", "--steady", "100", "--warmup", "60s"];

fn gshare(args: &[&str]) -> Output {
    let library = hooked::libraries().join("libfake_cuda.so");
    Command::new(GSHARE).args(args).env("GSHARE_SIM_LIBRARY", library).output().unwrap()
}

fn error(args: &[&str]) -> String {
    let output = gshare(&[&["lab", "build-dag"], args].concat());
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// FluidFaaS, section 5.2.1: the DAG from `BUILD_DAG` mode with memory and speed of each component on each size of slice;
/// section 5.2.2: the pipeline cut from it.
#[test]
fn a_function_is_measured_and_cut() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(file("example"), [7; 1_000]).unwrap();
    let (example, dag) = (file("example"), file("dag.json"));
    let asked =
        ["lab", "build-dag", "--sim", "--slices", "1g.10gb,2g.20gb", "--json", "--output", &dag, "--example"];
    let built = gshare(&[&asked[..], &[&example], &QUICK, &["--", FIXTURE, "function"]].concat());
    let said = String::from_utf8_lossy(&built.stderr).into_owned();
    assert!(built.status.success() && said.contains("simulated slices of A100-80"), "{said}");
    let built: serde_json::Value = serde_json::from_slice(&built.stdout).unwrap();
    assert_eq!(built["device"], "simulated");
    let read: Dag = serde_json::from_str(&std::fs::read_to_string(&dag).unwrap()).unwrap();
    let edges: Vec<(&str, &str, u64)> = read
        .edges()
        .iter()
        .map(|edge| {
            let name = |component: usize| read.components()[component].name.as_str();
            (name(edge.from), name(edge.to), edge.bytes.get())
        })
        .collect();
    // Each component adds a letter to the example.
    assert_eq!(
        edges,
        [
            ("resize", "detect", 1_001),
            ("resize", "depth", 1_001),
            ("detect", "merge", 1_002),
            ("depth", "merge", 1_002),
        ]
    );
    let on = |name: &str, slice: &str| {
        let component = read.index_of(name).map(|index| &read.components()[index]);
        component.unwrap().profile(slice, 1).cloned()
    };
    // 35,000 blocks, two on each of 14 SMs at a time: 1,250 waves of 4 us; on 28 SMs half of them.
    let (small, large) = (on("detect", "1g.10gb").unwrap(), on("detect", "2g.20gb").unwrap());
    assert!(small.time.as_nanos() >= 5_002_200, "{}", small.time);
    assert!(large.time.as_nanos() >= 2_502_200, "{}", large.time);
    assert_eq!((small.memory, large.memory), (Bytes::from_mib(512), Bytes::from_mib(512)));
    assert_eq!(on("depth", "2g.20gb").unwrap().memory, Bytes::from_gib(12));
    assert_eq!(on("depth", "1g.10gb"), None, "12 GiB in 9.6");
    let hole = &built["holes"][0]["point"];
    assert_eq!((built["holes"].as_array().unwrap().len(), hole["component"].as_str()), (1, Some("depth")));
    assert_eq!(read.components()[read.index_of("depth").unwrap()].runs.get(), 5_000);

    let cut = gshare(&["lab", "partition", &dag, "--free", "1g.10gb,2g.20gb", "--mode", "ideal", "--json"]);
    let cut: serde_json::Value = serde_json::from_slice(&cut.stdout).unwrap();
    assert!(cut["chosen"]["stages"].as_array().is_some_and(|stages| !stages.is_empty()), "{cut}");
}

/// Figure 7 in Python: its output is no answer, and its DAG has a profile for each batch size.
#[test]
fn a_function_in_python_is_measured() {
    let asked = ["lab", "build-dag", "--sim", "--slices", "2g.20gb", "--batch", "1,4"];
    // Each of ten is measured for as long.
    let asked = [&asked[..], &["--time", "600ms", "--steady", "100", "--warmup", "60s"]].concat();
    let built = gshare(&[&asked[..], &["--", "python3", "-B", EXAMPLE, "build"]].concat());
    let said = String::from_utf8_lossy(&built.stderr);
    let dag: Dag = serde_json::from_slice(&built.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!((dag.name(), dag.len(), dag.edges().len()), ("MyFFaaS", 5, 4));
    for component in dag.components() {
        for batch in [1, 4] {
            let on = component.profile("2g.20gb", batch);
            assert!(on.is_some_and(|on| !on.time.is_zero()), "{component:?}, batch {batch}: {said}");
        }
    }
    assert!(dag.edges().iter().all(|edge| edge.bytes.get() > 0), "{:?}", dag.edges());
}

/// A stage in Python, as `gshare up` starts it.
struct Stage(Child, u16);

impl Stage {
    fn start(stage: &str, components: &str) -> Self {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let mut command = Command::new("python3");
        command.args(["-B", EXAMPLE]).env("PORT", port.to_string());
        command.env("GSHARE_STAGE", stage).env("GSHARE_COMPONENTS", components);
        Self(command.spawn().unwrap(), port)
    }

    /// Status and body of the answer.
    fn post(&self, body: &str) -> (u16, String) {
        let begun = Instant::now();
        let mut stream = loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, self.1)) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let length = body.len();
        write!(
            stream,
            "POST / HTTP/1.1\r\nHost: stage\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Listing 1: the answer of one stage is the request to the next, and a request that fails leaves its stage running.
#[test]
fn a_function_in_python_serves_as_stages() {
    let first = Stage::start("0", "Model1,Model2");
    let second = Stage::start("1", "Model3");
    let third = Stage::start("2", "Model4,Model5");
    // (3 + 1 + 3 * 2) ^ 2 - 4, where the input 4 passes through two stages that do not read it.
    for _ in 0..2 {
        let (_, between) = first.post("[3, 4]");
        let (status, between) = second.post(&between);
        assert_eq!(status, 200, "{between}");
        assert_eq!(third.post(&between), (200, "96".to_owned()));
        let (status, why) = first.post("no JSON");
        assert!(status == 500 && why.contains("JSONDecodeError"), "{status}: {why}");
    }
}

/// A simulated function runs on a MIG device of the driver, not on a small GPU.
#[test]
fn a_simulated_slice_is_a_mig_device() {
    let script = "import ctypes as c, sys; cuda = c.CDLL('libcuda.so.1'); cuda.cuInit(0); name = c.create_string_buffer(99); \
                  cuda.cuDeviceGetName(name, 99, 0); bytes = c.c_size_t(); cuda.cuDeviceTotalMem_v2(c.byref(bytes), 0); \
                  print(name.value.decode(), bytes.value, file=sys.stderr)";
    let said = error(&["--sim", "--slices", "1g.10gb,2g.20gb", "--", "python3", "-c", script]);
    assert!(said.contains("MIG 2g.20gb (simulated) 20937965568\n"), "on the largest: {said}");
}

#[test]
fn what_cannot_be_measured_is_said_by_name() {
    let sim = |command: &[&str]| error(&[&["--sim", "--slices", "1g.10gb", "--"], command].concat());
    assert!(error(&["--sim", "--slices", "9g.1gb", "--", "true"]).contains("9g.1gb"));
    assert!(error(&["--slices", "1g.10gb", "--", "true"]).contains("need NAME=DEVICE, or --sim"));
    assert!(error(&["--sim", "--slices", "1g.10gb,1g.10gb", "--", "true"]).contains("1g.10gb twice"));
    assert!(error(&["--sim", "--slices", "1g.10gb", "--batch", "2,2", "--", "true"]).contains("2 twice"));
    assert!(sim(&["true"]).contains("told no shape"));
    assert!(sim(&["false"]).contains("in BUILD_DAG mode: exit status: 1"));
    let hangs = error(&["--sim", "--slices", "1g.10gb", "--patience", "1s", "--", "sleep", "100"]);
    assert!(hangs.contains("did not tell its shape within 1s"), "{hangs}");
    let tells = |shape: &str| sim(&["sh", "-c", &format!("echo '{shape}' > $GSHARE_FFS_BUILD/shape.json")]);
    assert!(tells(r#"{"components":[]}"#).contains("a DAG needs at least one component"));
    assert!(tells(r#"{"components":[{"name":"a","speed":1}]}"#).contains("unknown field `speed`"));
    let cycle = r#"{"components":[{"name":"a"}],"edges":[{"from":"a","to":"a","bytes":1}]}"#;
    assert!(tells(cycle).contains("cycle: a -> a"));
    // It tells a shape and cannot be its component.
    let nowhere = tells(r#"{"components":[{"name":"a"}]}"#);
    assert!(
        nowhere.contains("component `a` runs on none of the slices; on 1g.10gb: the function ended"),
        "{nowhere}"
    );
}
