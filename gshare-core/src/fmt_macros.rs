//! `Debug` and `Display` by a list of fields or texts.

/// `Debug` for a type whose other fields have none, or must not be shown, such as keys: shows the named fields.
#[macro_export]
macro_rules! debug_fields {
    ($of:ident $(<$generic:ident>)? { $($field:ident),* }) => {
        impl$(<$generic>)? core::fmt::Debug for $of$(<$generic>)? {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($of))$(.field(stringify!($field), &self.$field))*.finish_non_exhaustive()
            }
        }
    };
}

/// `Display` for an enum with one text per value.
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
