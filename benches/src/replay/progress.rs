//! How far a replay or a simulation is, on stderr: nothing in its first two seconds, then a line now and then with the time that is left.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Work of `all` like parts. Threads share it.
#[derive(Debug)]
pub struct Progress {
    all: usize,
    begun: Instant,
    /// Parts that are done, and when a line was last printed.
    now: Mutex<(usize, Instant)>,
    /// On a terminal a line replaces the previous line.
    terminal: bool,
}

impl Progress {
    /// Begins now.
    pub fn new(all: usize) -> Self {
        let begun = Instant::now();
        Self { all, begun, now: Mutex::new((0, begun)), terminal: std::io::stderr().is_terminal() }
    }

    /// One more part is done.
    pub fn done(&self) {
        let Ok(mut now) = self.now.lock() else { return };
        now.0 += 1;
        let every = if self.terminal { Duration::from_secs(2) } else { Duration::from_secs(20) };
        let over = self.terminal && now.0 == self.all && now.1 > self.begun;
        if now.1.elapsed() < every && !over {
            return;
        }
        now.1 = Instant::now();
        let line = line(now.0, self.all, self.begun.elapsed());
        let (before, end) =
            if self.terminal { ("\r\x1b[K", if over { "\n" } else { "" }) } else { ("", "\n") };
        // A closed stderr is no reason to stop.
        let _ = write!(std::io::stderr(), "{before}{line}{end}");
    }
}

fn line(done: usize, all: usize, took: Duration) -> String {
    let left = took.as_secs_f64() / done.max(1) as f64 * all.saturating_sub(done) as f64;
    format!("{done} of {all} runs, about {left:.0} s left")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_time_left_follows_from_the_time_taken() {
        assert_eq!(super::line(2, 10, std::time::Duration::from_secs(5)), "2 of 10 runs, about 20 s left");
    }
}
