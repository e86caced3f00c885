//! `gshare engine coscale`.

use super::filter;
use gshare_sched::scale::{DiluVertical, DiluVerticalConfig};

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::run(options, |config: DiluVerticalConfig| Ok(DiluVertical::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(input: &str) -> Vec<serde_json::Value> {
        let mut output = Vec::new();
        let new = |config| Ok(DiluVertical::new(config)?);
        filter::filter(DiluVerticalConfig::default(), new, &mut input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn an_owner_and_a_trainer_are_issued_tokens_at_the_end_of_the_period() {
        let lines = answers(concat!(
            r#"{"now_ns":0,"event":{"event":"client_joined","client":0,"gpu":0,"quota":{"request":3000,"limit":6000},"class":{"slo_sensitive":{"tolerance_basis_points":6000}}}}"#,
            "\n",
            r#"{"now_ns":0,"event":{"event":"client_joined","client":1,"gpu":0,"quota":{"request":2000,"limit":10000},"class":"best_effort"}}"#,
            "\n",
            r#"{"now_ns":5000000,"event":{"event":"deadline_reached"}}"#,
            "\n",
            r#"{"now_ns":4000000,"event":{"event":"deadline_reached"}}"#,
            "\n",
        ));
        assert_eq!(lines[0]["next_deadline_ns"], 5_000_000);
        let issued = lines[2]["actions"].as_array().unwrap();
        assert_eq!((&issued[0]["action"], &issued[0]["tokens"]), (&"issue".into(), &1_500.into()));
        assert!(lines[3]["error"].as_str().unwrap().contains("time went back"));
    }
}
