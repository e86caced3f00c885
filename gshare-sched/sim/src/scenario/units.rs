//! Quantities in written form.

use core::fmt::Display;
use core::str::FromStr;
use gshare_core::{Duration, ParseUnitError};
use serde::{Deserialize, Deserializer};

/// A quantity in the form of a text: `9GiB`, `40%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a value and nothing else")]
pub struct Text<T>(pub T);

impl<'de, T> Deserialize<'de> for Text<T>
where
    T: FromStr,
    T::Err: Display,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

/// A length of time: `69ms`, `1.5s`, `10m`, `2h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a value and nothing else")]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let trimmed = text.trim();
        let (number, seconds) = match (trimmed.strip_suffix('m'), trimmed.strip_suffix('h')) {
            (Some(minutes), _) => (minutes, 60),
            (_, Some(hours)) => (hours, 3_600),
            _ => return trimmed.parse().map(Self),
        };
        let malformed = |_| ParseUnitError::Malformed {
            text: text.to_owned(),
            expected: "length of time with its unit such as `69ms`, `1.5s`, `10m` or `2h`",
        };
        let long: Duration = format!("{}s", number.trim_end()).parse().map_err(malformed)?;
        Ok(Self(long.saturating_mul(seconds)))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Text::<Self>::deserialize(deserializer).map(|text| text.0)
    }
}
