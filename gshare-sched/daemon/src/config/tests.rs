use super::*;
use gshare_sched::token::MultiToken;

fn error(text: &str) -> String {
    Config::parse(text).unwrap_err().to_string()
}

#[test]
fn everything_has_a_default_and_the_example_is_a_configuration() {
    let config = Config::parse("").unwrap();
    assert_eq!(config.socket, Path::new("/run/gshare/gshare.sock"));
    assert_eq!(config.admin_socket(), Path::new("/run/gshare/gshare-admin.sock"));
    let example = include_str!("../../dist/gshared.toml");
    assert!(Config::parse(example).is_ok());
    // The commented-out lines of the example must be valid too.
    let all: String = example
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
        .flat_map(|line| [line, "\n"])
        .collect();
    let config = Config::parse(&all).unwrap();
    assert!(config.metrics.is_some() && config.journal.is_some() && !config.clients.is_empty());
    config.node().check().unwrap();
    // A refusal of an unknown key lists the known keys of its table.
    for table in ["", "[journal]\n", "[[device]]\n", "[[client]]\n"] {
        let refusal = error(&format!("{table}no-such-key = 1"));
        let keys: Vec<&str> = refusal.split('`').skip(3).step_by(2).collect();
        assert!(keys.len() > 1, "{refusal}");
        for key in keys.iter().filter(|key| !["journal", "device", "client"].contains(key)) {
            let line = |line: &str| line.trim_start_matches('#').starts_with(&format!("{key} = "));
            assert!(example.lines().any(line), "gshared.toml has no `{key}` of {table:?}");
        }
    }
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    let text = error("socket = '/x'\nwindw = '5ms'\n");
    assert!(text.contains("line 2") && text.contains("windw"), "{text}");
    let text = error("[[client]]\nname = 'a'\nqouta = 1\n");
    assert!(text.contains("line 3") && text.contains("qouta") && text.contains("quota"), "{text}");
}

#[test]
fn a_bad_share_names_the_client_the_key_and_the_bound() {
    let client = |rest: &str| error(&format!("[[client]]\nname = 'a'\n{rest}"));
    assert_eq!(
        client("quota = '0.8:0.3'"),
        "line 3: client `a`: quota: quota request 80% is larger than quota limit 30%: need request <= limit"
    );
    assert_eq!(
        client("sm = 0"),
        "line 3: client `a`: sm: SM partition is 0: need more than 0 and at most 100 per cent"
    );
    assert_eq!(
        client("sm = 101"),
        "line 3: client `a`: sm: `101` is out of range: a share of the SMs is at most 100 per cent"
    );
    assert!(client("memory = 0").contains("memory: GPU memory is 0 bytes"));
    assert!(client("memory = '1XB'").starts_with("line 3: client `a`: memory: `1XB` is not a"));
    assert!(client("quota = 1.5").contains("at most 1.0"));
    assert!(client("quota = 0").contains("quota limit is 0"));
    assert!(error("[[client]]\nname = ''").ends_with("need 1 to 120 bytes that can be printed"));
}

#[test]
fn a_class_is_read_as_it_is_printed_and_a_bad_one_names_the_client_and_the_bound() {
    let config = |rest: &str| Config::parse(&format!("[[client]]\nname = 'a'\n{rest}"));
    let class = |rest: &str| config(rest).unwrap().clients["a"].class;
    assert_eq!(class("class = 'best-effort'"), Some(ServiceClass::BestEffort));
    let tolerant = class("quota = '0.3:0.8'\nclass = 'slo-sensitive:30'");
    assert_eq!(tolerant, ServiceClass::slo_sensitive(30));
    assert_eq!(class("quota = 0.3\nclass = 'slo-sensitive'"), Some(ServiceClass::SLO_SENSITIVE));
    // The example states the built-in default.
    let percent = ServiceClass::SLO_SENSITIVE.to_string();
    let says = format!("{} if left\n", percent.strip_prefix("slo-sensitive:").unwrap());
    assert!(include_str!("../../dist/gshared.toml").contains(&says), "{says}");
    assert_eq!(class("quota = 0.3"), None, "as the process asks");
    let error = |rest: &str| config(rest).unwrap_err().to_string();
    assert_eq!(
        error("class = 'slow'"),
        "line 3: client `a`: class: `slow` is neither best-effort nor slo-sensitive[:PERCENT] with a tolerance of 1 to 100"
    );
    assert!(error("quota = 0.3\nclass = 'slo-sensitive:0'").starts_with("line 4: client `a`: class: `slo-"));
    assert!(error("class = 7").contains("client `a`: class: `7` is neither"));
    for idle in ["class = 'slo-sensitive'", "class = 'slo-sensitive'\nquota = '0:0.5'"] {
        assert!(error(idle).contains("need a quota with a request above 0"), "{}", error(idle));
    }
}

#[test]
fn memory_beyond_the_largest_device_is_refused() {
    let device = |n: u8, memory: &str| {
        format!("[[device]]\nuuid = 'GPU-{n:08}-0000-0000-0000-000000000000'\nmemory = '{memory}'\n")
    };
    let both = device(1, "16GiB") + &device(2, "80GiB");
    assert!(Config::parse(&format!("{both}[[client]]\nname='a'\nmemory='80GiB'")).is_ok());
    let text = error(&format!("{both}[[client]]\nname='a'\nmemory='81GiB'"));
    assert!(text.ends_with("client `a`: memory is 81 GiB: need at most the device's 80 GiB"), "{text}");
    let twice = device(1, "16GiB") + &device(1, "16GiB");
    assert!(error(&twice).contains("is listed twice"));
}

#[test]
fn the_scheduler_has_a_number_for_each_device_that_clients_may_bring() {
    let engine = |max_clients| Config { max_clients, ..Config::default() }.engine();
    assert_eq!([1, 1024, 65_536].map(|clients| engine(clients).max_gpus), [64, 1024, 4096]);
    assert!(MultiToken::new(engine(65_536)).is_ok());
}

#[test]
fn two_clients_of_one_name_are_refused() {
    let text = error("[[client]]\nname = 'a'\n[[client]]\nname = 'a'\n");
    assert!(text.ends_with("`a`: two clients of one name: need a name each"), "{text}");
}

#[test]
fn times_and_numbers_are_kept_within_bounds() {
    assert_eq!(error("window = '1us'"), "line 1: window: 1us is out of range: need 1ms to 10s");
    assert_eq!(error("\ntoken = '200ms'"), "line 2: token: 200ms is out of range: need 100us to 100ms");
    assert!(error("max_clients = 0").contains("max_clients: 0 is out of range: need 1 to 65536"));
    let metrics = |text: &str| Config::parse(text).unwrap().metrics.unwrap().to_string();
    assert_eq!(metrics("metrics = 9478"), "127.0.0.1:9478", "other hosts only if they are named");
    assert_eq!(metrics("metrics = '0.0.0.0:80'"), "0.0.0.0:80");
    assert!(error("metrics = 'nowhere'").contains("need `127.0.0.1:9478`, `9478` for loopback"));
    let name = "client: name is a\\u{1b}[2J: need 1 to 120 bytes that can be printed";
    assert_eq!(error("[[client]]\nname = \"a\\u001b[2J\""), name);
    assert!(error("[journal]\ndir = '/x'\nkeep_files = 0").contains("journal.keep_files"));
    assert!(error("window = 5").contains("with its unit"));
}
