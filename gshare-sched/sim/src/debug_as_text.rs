//! Failures with a readable story.

/// `Debug` as `Display`, so that `unwrap` in a test prints the story as a story.
macro_rules! debug_as_text {
    ($failure:ty) => {
        impl core::fmt::Debug for $failure {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(self, f)
            }
        }
    };
}

pub(crate) use debug_as_text;
