//! The page of the settings that `--settings` and `--set` read.

use clap::CommandFactory as _;
use gshare_openfaas::HostSettings;
use gshare_sched::platform::PlatformSettings;

fn page() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/settings.md");
    std::fs::read_to_string(page).unwrap()
}

#[test]
fn the_page_shows_every_setting_with_its_default_and_what_it_shows_is_taken() {
    let page = page();
    let all = serde_json::to_string_pretty(&PlatformSettings::default()).unwrap();
    assert!(page.contains(&format!("```json\n{all}\n```")), "docs/settings.md: the defaults are\n{all}");
    for shown in page.split("```json\n").skip(1) {
        let (shown, _) = shown.split_once("\n```").unwrap();
        serde_json::from_str::<PlatformSettings>(shown).unwrap().build().unwrap();
    }
}

#[test]
fn the_page_has_a_row_for_each_key_of_the_host() {
    let error = serde_json::from_str::<HostSettings>(r#"{"no key": 1}"#).unwrap_err().to_string();
    let keys: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
    assert!(keys.len() >= 14, "{error}");
    for key in keys {
        assert!(page().contains(&format!("| `{key}` | ")), "docs/settings.md lacks `{key}`");
    }
}

/// The commands of `gshare` have the other options: see its test.
#[test]
fn the_host_has_few_options() {
    let command = gshare_openfaas::Options::command();
    let shown = command.get_arguments().filter(|option| !option.is_hide_set());
    let names: Vec<_> = shown.filter_map(|option| option.get_long()).collect();
    let (own, of_pods) = names.split_at(7);
    assert_eq!(own, ["listen", "state", "sim", "credentials", "settings", "set", "demo"]);
    let expected: &[&str] = if cfg!(feature = "kubernetes") { &["kubernetes", "crd"] } else { &[] };
    assert_eq!(of_pods, expected);
}
