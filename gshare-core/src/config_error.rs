//! The error of every configuration, and a macro for methods that set its fields.

use core::fmt;
use std::borrow::Cow;

/// A value of a configuration that is out of its bounds.
///
/// ```
/// use gshare_core::ConfigError;
///
/// let error = ConfigError::unless(0 > 0, "max_clients", 0, "need more than 0").unwrap_err();
/// assert_eq!(error.to_string(), "max_clients is 0: need more than 0");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {bound}")]
#[non_exhaustive]
pub struct ConfigError {
    /// The field; for an entry of a list with the name of the entry.
    pub field: Cow<'static, str>,
    /// The value that the field has, as text.
    pub value: String,
    /// The values that are allowed, in words.
    pub bound: Cow<'static, str>,
}

impl ConfigError {
    /// The error of a field that has this value.
    pub fn new(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        bound: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { field: field.into(), value: value.to_string(), bound: bound.into() }
    }

    /// The error, unless the value is within its bounds.
    ///
    /// # Errors
    /// When `within` is false.
    pub fn unless(
        within: bool,
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        bound: impl Into<Cow<'static, str>>,
    ) -> Result<(), Self> {
        if within { Ok(()) } else { Err(Self::new(field, value, bound)) }
    }
}

/// Methods of a configuration that take it and give it back with another value of a field. A configuration is `#[non_exhaustive]`, so
/// that it may grow; with these it is still made in one expression.
///
/// ```
/// #[derive(Default)]
/// pub struct Window {
///     pub length_ns: u64,
///     pub count: u32,
/// }
/// gshare_core::with_fields!(Window { with_length_ns(length_ns: u64), with_count(count: u32) });
///
/// let window = Window::default().with_length_ns(5).with_count(2);
/// assert_eq!((window.length_ns, window.count), (5, 2));
/// ```
#[macro_export]
macro_rules! with_fields {
    ($config:ty { $($method:ident($field:ident: $of:ty)),* $(,)? }) => {
        impl $config {
            $(
                #[doc = concat!("With another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $method(mut self, $field: $of) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
