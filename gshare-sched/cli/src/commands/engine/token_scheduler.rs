//! `gshare lab engine token`.

use super::filter;
use gshare_sched::token::{MultiToken, MultiTokenConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: MultiTokenConfig| Ok(MultiToken::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(input: &str) -> Vec<serde_json::Value> {
        let mut output = Vec::new();
        let new = |config| Ok(MultiToken::new(config)?);
        filter::filter(MultiTokenConfig::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    const JOIN: &str = r#"{"now_ns":5,"event":{"event":"client_joined","client":0,"gpu":0,"share":{"quota":{"request":3000,"limit":8000},"sm":2400}}}"#;

    #[test]
    fn an_event_in_is_a_line_out_with_actions_and_the_next_deadline() {
        let input = format!(
            "{JOIN}\n{{\"now_ns\":6,\"event\":{{\"event\":\"used\",\"client\":0,\"used_ns\":0,\"state\":\"wants\"}}}}\n"
        );
        let lines = answers(&input);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["actions"].as_array().unwrap().len(), 0);
        assert_eq!(lines[1]["actions"][0]["action"], "allow");
        assert!(lines[1]["next_deadline_ns"].as_u64().unwrap() > 6);
    }

    #[test]
    fn an_error_is_a_line_of_its_own_and_changes_nothing() {
        let input = format!(
            "nonsense\n{JOIN}\n{JOIN}\n{{\"event\":{{\"event\":\"deadline_reached\"}}}}\n\n{{\"now_ns\":4,\"event\":{{\"event\":\"deadline_reached\"}}}}\n{{\"now_ns\":6,\"event\":{{\"event\":\"used\",\"client\":0,\"used_ns\":0,\"state\":\"wants\"}}}}"
        );
        let lines = answers(&input);
        assert_eq!(lines.len(), 6);
        assert_eq!((lines[0]["line"].as_u64(), lines[2]["line"].as_u64()), (Some(1), Some(3)));
        assert!(lines[2]["error"].as_str().unwrap().contains("cannot join"));
        assert!(lines[3]["error"].as_str().unwrap().contains("now_ns"));
        assert!(lines[4]["error"].as_str().unwrap().contains("time went back"));
        assert_eq!(lines[5]["actions"][0]["action"], "allow");
    }

    #[test]
    fn headers_configure_the_engine_and_lines_without_an_event_are_passed_over() {
        let input = format!(
            "{{\"journal\":1,\"epoch\":3,\"segment\":0,\"engine\":{{\"max_clients\":0}}}}\n\
             {{\"journal\":1,\"epoch\":3,\"segment\":0,\"engine\":{{\"window_ns\":50000000}}}}\n{JOIN}\n\
             {{\"now_ns\":5,\"actions\":[]}}\n{{\"now_ns\":5,\"note\":{{\"client\":0,\"name\":\"a\",\"pid\":1}}}}\n\0\0\0"
        );
        let lines = answers(&input);
        assert_eq!(lines.len(), 2, "a bad header is an error, notes and actions are passed over: {lines:?}");
        assert!(lines[0]["error"].as_str().unwrap().contains("max_clients"));
    }
}
