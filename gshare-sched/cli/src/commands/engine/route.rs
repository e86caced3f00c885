//! `gshare engine route`.

use super::filter;
use gshare_sched::pipeline::{RouterConfig, SlackRouter};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: RouterConfig| Ok(SlackRouter::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_goes_to_an_instance_that_is_up() {
        let input = concat!(
            r#"{"now_ns":1,"event":{"event":"instance_up","instance":7,"function":0,"service":{"kind":"exclusive","latency_ns":9,"interval_ns":9,"capacity":1}}}"#,
            "\n",
            r#"{"now_ns":2,"event":{"event":"arrived","request":1,"function":0,"deadline_ns":50}}"#,
            "\n",
            r#"{"now_ns":3,"event":{"event":"completed","request":1,"instance":8}}"#,
            "\n",
        );
        let mut output = Vec::new();
        let new = |config| Ok(SlackRouter::new(config)?);
        filter::filter(RouterConfig::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        let output = String::from_utf8(output).unwrap();
        let lines: Vec<&str> = output.lines().collect();
        assert!(lines[1].contains(r#"{"action":"dispatch","request":1,"instance":7}"#), "{output}");
        assert!(lines[2].contains("unknown instance8"), "{output}");
    }
}
