//! Settings in their text form, such as `"4GiB"`, in files that serde reads.

use core::fmt;
use core::marker::PhantomData;
use core::str::FromStr;
use serde::Deserializer;
use serde::de::Visitor;

/// Parses a value from a string, or from a number by way of its text.
///
/// # Errors
/// The value's own, or another kind of value.
pub fn text<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Text<T>(PhantomData<T>);
    impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Text<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a number")
        }
        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
        fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
    }
    deserializer.deserialize_any(Text(PhantomData))
}

/// The same for a setting without a default.
///
/// # Errors
/// As [`text`].
pub fn some_text<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    text(deserializer).map(Some)
}
