//! `gshare engine fast-scale`.

use super::filter;
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: HeuristicHorizontalConfig| Ok(HeuristicHorizontal::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::Engine;
    use gshare_sched::scale::{HorizontalAction, HorizontalEvent, LazyHorizontal, LazyHorizontalConfig};

    const ADD: &str = r#"{"now_ns":0,"event":{"event":"function_added","function":7,"spec":{"profile":{"points":[{"sm_basis_points":1200,"quota_basis_points":10000,"batch":1,"throughput_milli_rps":THROUGHPUT,"p50_ns":20000000,"p95_ns":25000000}]},"max_p95_ns":MAX,"min_instances":1,"max_instances":4}}}"#;

    fn answers<E, C>(config: C, new: impl Fn(C) -> anyhow::Result<E>, input: &str) -> Vec<serde_json::Value>
    where
        E: Engine<Event = HorizontalEvent, Action = HorizontalAction>,
        C: serde::de::DeserializeOwned,
    {
        let mut output = Vec::new();
        filter::filter(config, new, &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn both_horizontal_scalers_start_instances_and_refuse_profiles_that_cannot_be() {
        let add = |throughput: &str, max: &str| ADD.replace("THROUGHPUT", throughput).replace("MAX", max);
        let load =
            r#"{"now_ns":1000000000,"event":{"event":"load_reported","function":7,"rate_milli_rps":100000}}"#;
        let input = format!(
            "{}\n{}\n{}\n{load}\n",
            add("0", "30000000"),
            add("50000", "20000000"),
            add("50000", "30000000")
        );
        let fast = answers(
            HeuristicHorizontalConfig::default(),
            |config| Ok(HeuristicHorizontal::new(config)?),
            &input,
        );
        let lazy =
            answers(LazyHorizontalConfig::default(), |config| Ok(LazyHorizontal::new(config)?), &input);
        for lines in [&fast, &lazy] {
            assert!(lines[0]["error"].as_str().unwrap().contains("throughput is 0"), "{lines:?}");
            assert!(lines[1]["error"].as_str().unwrap().contains("no point of its profile"), "{lines:?}");
            assert_eq!(lines[2]["actions"][0]["action"], "start");
        }
        assert_eq!(
            fast[3]["actions"].as_array().unwrap().len(),
            3,
            "of 100 a second at 150, more than 1 % wait for 35 ms"
        );
        assert!(lazy[3]["actions"].as_array().unwrap().is_empty(), "a second is no reason");
    }
}
