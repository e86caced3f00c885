//! `gshare lab engine platform`.

use super::filter;
use gshare_sched::platform::PlatformSettings;

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |settings: PlatformSettings| Ok(settings.build()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn answers(input: &str) -> Vec<Value> {
        let mut output = Vec::new();
        let new = |settings: PlatformSettings| Ok(settings.build()?);
        filter::filter(PlatformSettings::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A deployment and a request, as written by a host in another language.
    const LIFE: &str = r#"
        {"now_ns":0,"event":{"event":"device_found","gpu":0,"spec":{"node":0,"kind":0,"memory_bytes":17179869184}}}
        {"now_ns":0,"event":{"event":"function_deployed","function":0,"spec":{"work":{"inference":{"profile":{"points":[{"batch":1,"sm_basis_points":5000,"quota_basis_points":10000,"throughput_milli_rps":70000,"p50_ns":14000000,"p95_ns":17000000}]}}},"slo_ns":69000000,"memory_bytes":2147483648,"load_disk_ns":3000000000,"load_host_ns":500000000}}}
        {"now_ns":1,"event":{"event":"request_arrived","request":7,"function":0}}
        {"now_ns":9,"event":{"event":"instance","instance":0,"report":"ready"}}
        {"now_ns":14000009,"event":{"event":"request_done","request":7,"took_ns":14000000}}"#;

    #[test]
    fn a_function_is_deployed_started_and_called_by_json_lines() {
        let lines = answers(LIFE);
        assert_eq!(lines.len(), 5, "{lines:?}");
        let start = &lines[2]["actions"][0];
        assert_eq!((&start["action"], &start["from"]), (&"start".into(), &"disk".into()), "{}", lines[1]);
        assert_eq!(start["parts"][0]["share"]["sm_bp"], 5_000);
        let dispatch = &lines[3]["actions"][0];
        assert_eq!((&dispatch["action"], &dispatch["request"]), (&"dispatch".into(), &7.into()));
        assert_eq!(lines[4]["actions"], Value::Array(Vec::new()));
    }

    #[test]
    fn bad_lines_are_refused_by_name() {
        let slow = LIFE.replace("69000000", "20000000");
        assert!(answers(&slow)[1]["error"].as_str().unwrap().contains("p95"), "{:?}", answers(&slow)[1]);
        let unknown = LIFE.replace("\"slo_ns\"", "\"slo\"");
        assert!(answers(&unknown)[1]["error"].as_str().unwrap().contains("slo"));
    }
}
