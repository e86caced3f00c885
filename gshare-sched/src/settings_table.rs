//! The declaration of this crate's settings.

/// [`gshare_core::config!`] for a table of a configuration file: a table may leave out any field, and has no other.
macro_rules! settings {
    ($(#[$about:meta])* pub struct $($rest:tt)*) => {
        gshare_core::config! {
            $(#[$about])*
            #[derive(Debug, Clone, PartialEq, Eq)]
            #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
            #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
            pub struct $($rest)*
        }
    };
}

pub(crate) use settings;
