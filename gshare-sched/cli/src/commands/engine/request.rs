//! `gshare engine request`.

use super::filter;
use gshare_sched::request::{LocalityScheduler, SchedulerConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: SchedulerConfig| Ok(LocalityScheduler::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn answers(input: &str) -> Vec<Value> {
        let mut output = Vec::new();
        let new = |config| Ok(LocalityScheduler::new(config)?);
        filter::filter(SchedulerConfig::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The life of a request, as written by a host in another language.
    const LIFE: &str = r#"
        {"now_ns":0,"event":{"event":"gpu_joined","gpu":0,"kind":0,"node":0,"memory_bytes":8589934592}}
        {"now_ns":0,"event":{"event":"model_added","model":0,"memory_bytes":2147483648}}
        {"now_ns":0,"event":{"event":"model_profiled","model":0,"kind":0,"profile":{"load_disk_ns":3000000000,"load_host_ns":300000000,"infer_ns":1000000000}}}
        {"now_ns":5,"event":{"event":"arrived","request":7,"model":0,"tenant":0}}
        {"now_ns":9,"event":{"event":"loaded","gpu":0,"model":0,"took_ns":4}}
        {"now_ns":12,"event":{"event":"completed","gpu":0,"request":7,"took_ns":3}}
        {"now_ns":13,"event":{"event":"arrived","request":8,"model":0,"tenant":0,"deadline_ns":14}}"#;

    #[test]
    fn a_request_is_loaded_dispatched_and_completed_by_json_lines() {
        let lines = answers(LIFE);
        assert_eq!(lines.len(), 7, "{lines:?}");
        let action = |line: usize| &lines[line]["actions"][0];
        assert_eq!((&action(3)["action"], &action(3)["from"]), (&"load".into(), &"disk".into()));
        assert_eq!((&action(4)["action"], &action(4)["request"]), (&"dispatch".into(), &7.into()));
        assert_eq!(lines[5]["actions"], Value::Array(Vec::new()));
        assert_eq!(action(6)["reason"], "deadline_missed");
    }

    /// Bad input of hosts: each error names its cause, and changes nothing.
    #[test]
    fn bad_input_is_a_typed_error_and_changes_nothing() {
        let before = LIFE.lines().take(5).collect::<Vec<_>>().join("\n");
        let bad = [
            (
                r#"{"now_ns":6,"event":{"event":"arrived","request":7,"model":0,"tenant":0}}"#,
                "request7 is already here",
            ),
            (
                r#"{"now_ns":6,"event":{"event":"arrived","request":8,"model":1,"tenant":0}}"#,
                "unknown model1: its memory was never told",
            ),
            (
                r#"{"now_ns":6,"event":{"event":"completed","gpu":0,"request":9,"took_ns":1}}"#,
                "unknown request9",
            ),
            (
                r#"{"now_ns":6,"event":{"event":"completed","gpu":0,"request":7,"took_ns":1}}"#,
                "request7 does not run on gpu0",
            ),
            (
                r#"{"now_ns":4,"event":{"event":"deadline_reached"}}"#,
                "time went back: now 0.000000004s, last event at 0.000000005s",
            ),
        ];
        for (line, error) in bad {
            let lines = answers(&format!("{before}\n{line}\n{}", LIFE.lines().nth(5).unwrap()));
            assert_eq!(lines[4]["error"], error);
            assert_eq!(lines[5]["actions"][0]["action"], "dispatch", "after {error}");
        }
    }

    #[test]
    fn what_an_engine_answers_in_a_life_fits_its_schema() {
        let schema =
            serde_json::to_value(schemars::schema_for!(gshare_sched::request::RequestAction)).unwrap();
        let text = schema.to_string();
        for line in answers(LIFE) {
            for action in line["actions"].as_array().unwrap() {
                for key in action.as_object().unwrap().keys() {
                    assert!(text.contains(&format!("\"{key}\"")), "{key} is not in the schema");
                }
            }
        }
    }
}
