//! The page of the settings that `--settings` reads.

use gshare_sched::platform::PlatformSettings;

#[test]
fn the_page_shows_every_setting_with_its_default_and_what_it_shows_is_taken() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/settings.md");
    let page = std::fs::read_to_string(page).unwrap();
    let all = serde_json::to_string_pretty(&PlatformSettings::default()).unwrap();
    assert!(page.contains(&format!("```json\n{all}\n```")), "docs/settings.md: the defaults are\n{all}");
    for shown in page.split("```json\n").skip(1) {
        let (shown, _) = shown.split_once("\n```").unwrap();
        serde_json::from_str::<PlatformSettings>(shown).unwrap().build().unwrap();
    }
}
