//! A broken claim, and the run that shows it.

use core::fmt;

/// A claim broken by an engine or a policy, with the run that shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Story {
    /// The broken claim of the contract.
    pub claim: &'static str,
    /// The seed of the run, which shows the same story again; none for a run without randomness.
    pub seed: Option<u64>,
    /// The virtual time of the fault, or the number of its call.
    pub at: String,
    /// The fault, as a sentence.
    pub wrong: String,
    /// The last events before it with the answers to them, oldest first.
    pub events: Vec<String>,
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claim, seed, at, wrong, events } = self;
        let seed = seed.map_or_else(String::new, |seed| format!("seed {seed}, "));
        write!(f, "`{claim}` does not hold ({seed}at {at}): {wrong}")?;
        events.iter().try_for_each(|event| write!(f, "\n    {event}"))
    }
}

/// As `Display`, so that `unwrap` in a test prints the story as a story.
impl fmt::Debug for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for Story {}
