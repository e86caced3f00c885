//! A FluidFaaS function in Python: its DAG is measured slice by slice and cut into stages, and the same program serves as each of them.

use gshare_core::dag::Dag;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gshare-sched/runner/python/example.py");

fn python(args: &[&str]) -> Vec<u8> {
    let output = Command::new("python3").arg("-B").args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// FluidFaaS, section 5.2.1: the DAG from `BUILD_DAG` mode with the speed of each component on each size of slice;
/// section 5.2.2: the pipeline cut from it.
#[test]
fn a_function_in_python_is_measured_and_cut() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (small, both) = (file("small.json"), file("both.json"));
    std::fs::write(&small, python(&[EXAMPLE, "1g.10gb"])).unwrap();
    std::fs::write(&both, python(&[EXAMPLE, "2g.20gb", &small])).unwrap();
    let dag: Dag = serde_json::from_slice(&std::fs::read(&both).unwrap()).unwrap();
    assert_eq!((dag.name(), dag.len(), dag.edges().len()), ("MyFFaaS", 5, 4));
    for component in dag.components() {
        for slice in ["1g.10gb", "2g.20gb"] {
            assert!(component.profile(slice, 1).is_some_and(|on| !on.time.is_zero()), "{component:?}");
        }
    }
    assert!(dag.edges().iter().all(|edge| edge.bytes.get() > 0), "{:?}", dag.edges());
    let mut gshare = Command::new(env!("CARGO_BIN_EXE_gshare"));
    gshare.args(["lab", "partition", &both, "--free", "1g.10gb,2g.20gb", "--json"]);
    let cut: serde_json::Value = serde_json::from_slice(&gshare.output().unwrap().stdout).unwrap();
    assert!(cut["chosen"]["stages"].as_array().is_some_and(|stages| !stages.is_empty()), "{cut}");
}

/// A component without enough memory on the small slice has a profile on the large one alone.
#[test]
fn a_component_that_fails_on_a_slice_has_no_profile_there() {
    let package = EXAMPLE.strip_suffix("/example.py").unwrap();
    let script = r#"
import sys, json
sys.path.insert(0, sys.argv[1])
import gshare_ffs as FFS
class Small(FFS.Module):
    def forward(self, x): return x
class Large(FFS.Module):
    def forward(self, x):
        if slice == "1g.10gb": raise MemoryError("12 GiB in 9.6")
        return x
class Both(FFS.FFaaS):
    def defDAG(self, x): return Large.reg(self, Small.reg(self, x))
onto = None
for slice in ["2g.20gb", "1g.10gb"]:
    onto = Both(None, None, FFS.BUILD_DAG).profile("x" * 100, slice=slice, onto=onto)
print(json.dumps(onto))
"#;
    let dag: Dag = serde_json::from_slice(&python(&["-c", script, package])).unwrap();
    let on =
        |name: &str, slice: &str| dag.components()[dag.index_of(name).unwrap()].profile(slice, 1).is_some();
    assert_eq!(
        [on("Small", "1g.10gb"), on("Small", "2g.20gb"), on("Large", "1g.10gb"), on("Large", "2g.20gb")],
        [true, true, false, true]
    );
    assert!(dag.edges()[0].bytes.get() >= 100, "{:?}", dag.edges());
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
