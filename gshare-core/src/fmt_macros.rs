//! `Debug` and `Display` of types that need a list and nothing else.

/// `Debug` for a type whose policies have none: shows the fields that are named.
#[macro_export]
macro_rules! debug_fields {
    ($of:ident { $($field:ident),+ }) => {
        impl core::fmt::Debug for $of {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($of))$(.field(stringify!($field), &self.$field))+.finish_non_exhaustive()
            }
        }
    };
}

/// `Display` for values that stand for one text each.
///
/// ```
/// enum Light {
///     Red,
///     Green,
/// }
/// gshare_core::display_as!(Light { Red => "stop", Green => "go" });
///
/// assert_eq!(format!("{}, {}", Light::Red, Light::Green), "stop, go");
/// ```
#[macro_export]
macro_rules! display_as {
    ($of:ident { $($value:ident => $text:literal),+ $(,)? }) => {
        impl core::fmt::Display for $of {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(match self {
                    $(Self::$value => $text,)+
                })
            }
        }
    };
}
