//! `gshare engine store`.

use super::filter;
use gshare_modelstore::engine::{Store, StoreConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: StoreConfig| Ok(Store::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_a_model_on_disk_is_an_order_to_load_it() {
        let input = concat!(
            r#"{"now_ns":0,"event":{"event":"client_joined","client":0,"tenant":1,"group":1,"admin":false}}"#,
            "\n",
            r#"{"now_ns":1,"event":{"event":"model_added","model":7,"owner":0,"group":0,"access":"public","bytes":4096,"reload_ns":1000}}"#,
            "\n",
            r#"{"now_ns":2,"event":{"event":"asked","client":0,"ticket":1,"model":7,"tier":"host","deadline_ns":9000}}"#,
            "\n",
            r#"{"now_ns":3,"event":{"event":"asked","client":5,"ticket":2,"model":7,"tier":"host","deadline_ns":9000}}"#,
            "\n",
        );
        let mut output = Vec::new();
        let new = |config| Ok(Store::new(config)?);
        filter::filter(StoreConfig::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        let lines: Vec<serde_json::Value> = String::from_utf8(output)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[2]["actions"][0]["action"], "load");
        assert_eq!(lines[2]["next_deadline_ns"], 9_000);
        assert!(lines[3]["error"].as_str().unwrap().contains("unknown client5.0"));
    }
}
