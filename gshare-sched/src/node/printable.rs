//! Texts from clients, shown to people.
//!
//! A name reaches terminals, logs and metrics. Control characters, such as the escape sequences of a terminal, and
//! characters without a picture, such as marks for the direction of a line, could forge the output there.

use std::borrow::Cow;

/// Whether every character has a picture of its own. Quotes and backslashes have.
pub fn is_printable(text: &str) -> bool {
    let plain: String = text.chars().filter(|c| !matches!(c, '\'' | '"' | '\\')).collect();
    plain.escape_debug().eq(plain.chars())
}

/// The text itself if it is printable, else with escapes as in Rust: `\u{1b}[2J`.
pub fn printable(text: &str) -> Cow<'_, str> {
    if is_printable(text) { Cow::Borrowed(text) } else { Cow::Owned(text.escape_debug().to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_those_without_a_picture_are_escaped() {
        for good in ["", "alice", "bob's \"run\" \\ 7", "日本語", "हिन्दी", "job:3/α"] {
            assert!(is_printable(good), "{good}");
            assert_eq!(printable(good), good);
        }
        for (bad, shown) in [
            ("a\u{1b}[2J", "a\\u{1b}[2J"),
            ("a\nb", "a\\nb"),
            ("a\u{9b}31m", "a\\u{9b}31m"),
            ("a\u{202e}b", "a\\u{202e}b"),
            ("a\u{200b}", "a\\u{200b}"),
            ("a\u{2028}b", "a\\u{2028}b"),
            ("\u{7f}", "\\u{7f}"),
        ] {
            assert!(!is_printable(bad), "{shown}");
            assert_eq!(printable(bad), shown);
        }
    }
}
