//! The error of every configuration, and macros to declare a configuration and check its fields.

use core::fmt;
use std::borrow::Cow;

/// A configuration has a value outside its bounds.
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
    /// The name of the field; for an entry of a list with the name of the entry.
    pub field: Cow<'static, str>,
    /// The value of the field, as text.
    pub value: String,
    /// The allowed values, in words.
    pub bound: Cow<'static, str>,
}

impl ConfigError {
    /// The error for a field with this value.
    pub fn new(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        bound: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { field: field.into(), value: value.to_string(), bound: bound.into() }
    }

    /// Checks a value: `within` states whether the value is within its bounds.
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

/// Declares builder methods: each takes the configuration and returns it with another value of one field. Other crates need these
/// methods, since configurations are `#[non_exhaustive]`. For an `Option` the method may take the inner value.
///
/// ```
/// #[derive(Default)]
/// pub struct Window {
///     pub length_ns: u64,
///     pub most: Option<u32>,
/// }
/// gshare_core::with_fields!(Window { with_length_ns(length_ns: u64), with_most(most: u32 => Some) });
///
/// let window = Window::default().with_length_ns(5).with_most(2);
/// assert_eq!((window.length_ns, window.most), (5, Some(2)));
/// ```
#[macro_export]
macro_rules! with_fields {
    ($config:ty { $($method:ident($field:ident: $of:ty $(=> $wrap:path)?)),* $(,)? }) => {
        impl $config {
            $(
                #[doc = concat!("With another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $method(mut self, $field: $of) -> Self {
                    self.$field = $($wrap)?($field);
                    self
                }
            )*
        }
    };
}

/// States the claims of a contract once: a constant for each, which a suite names when the claim is broken, and a macro with their
/// list for the docs of the trait.
///
/// ```
/// gshare_core::claims! {
///     /// Claims of [`Counter`].
///     counter_claims {
///         GROWS = "the count never shrinks";
///         SAME = "the same events give the same counts";
///     }
/// }
///
/// /// Counts.
/// ///
/// /// # Contract
/// #[doc = counter_claims!()]
/// trait Counter {}
/// assert_eq!(counter_claims::ALL, ["the count never shrinks", "the same events give the same counts"]);
/// ```
#[macro_export]
macro_rules! claims {
    ($(#[$about:meta])* $claims:ident { $($claim:ident = $text:literal;)+ }) => {
        $(#[$about])*
        pub mod $claims {
            $(#[doc = $text] pub const $claim: &str = $text;)+
            /// All of them, in this order.
            pub const ALL: &[&str] = &[$($claim),+];
        }
        macro_rules! $claims {
            () => { concat!($("- ", $text, ".\n"),+) };
        }
    };
}

/// Declares a configuration: each field with its default and, optionally, its builder method. The struct is `#[non_exhaustive]`,
/// see [`with_fields!`](crate::with_fields).
///
/// ```
/// gshare_core::config! {
///     /// A window of time.
///     #[derive(Debug, Clone)]
///     pub struct Window {
///         /// Its length. 5 ns.
///         pub length_ns: u64 = 5, with_length_ns;
///         /// How many there are. 2.
///         pub count: u32 = 2;
///     }
/// }
///
/// let window = Window::default().with_length_ns(7);
/// assert_eq!((window.length_ns, window.count), (7, 2));
/// ```
#[macro_export]
macro_rules! config {
    (
        $(#[$about:meta])*
        pub struct $config:ident {
            $($(#[$field_about:meta])* pub $field:ident: $of:ty = $default:expr $(, $method:ident)?;)*
        }
    ) => {
        $(#[$about])*
        #[non_exhaustive]
        pub struct $config {
            $($(#[$field_about])* pub $field: $of,)*
        }

        impl Default for $config {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        $crate::with_fields!($config { $($($method($field: $of),)?)* });
    };
}

/// Checks fields of a configuration against their ranges. The [`ConfigError`](crate::ConfigError) names the first field outside
/// its range, its value and the bound. A prefix may stand before the names.
///
/// ```
/// use gshare_core::{ConfigError, check_fields};
///
/// struct Window {
///     length_ns: u64,
///     warm: u8,
///     cold: u8,
/// }
/// fn check(window: &Window) -> Result<(), ConfigError> {
///     check_fields!(window {
///         length_ns in 1..=60, "need 1 to 60";
///         warm, cold in 1.., "need more than 0";
///     })
/// }
///
/// assert!(check(&Window { length_ns: 60, warm: 1, cold: 9 }).is_ok());
/// let error = check(&Window { length_ns: 60, warm: 1, cold: 0 }).unwrap_err();
/// assert_eq!(error.to_string(), "cold is 0: need more than 0");
/// ```
#[macro_export]
macro_rules! check_fields {
    ($config:ident { $($rules:tt)+ }) => {
        $crate::check_fields!("", $config { $($rules)+ })
    };
    ($prefix:literal, $config:ident { $($($field:ident),+ in $range:expr, $bound:expr;)+ }) => {{
        $($(
            let name = concat!($prefix, stringify!($field));
            $crate::ConfigError::unless(($range).contains(&$config.$field), name, &$config.$field, $bound)?;
        )+)+
        Ok::<(), $crate::ConfigError>(())
    }};
}
