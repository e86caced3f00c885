//! Logs of instances: each function's last lines, and new lines as they arrive.

use super::api::{LogLine, NAMESPACE, rfc3339};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::watch;

/// Lines kept for each function.
const KEPT: usize = 1000;
/// Longest line, in bytes; the rest of a longer line becomes a new line.
const LONGEST: u64 = 16 << 10;
/// Lines that a reader takes at once.
const BATCH: usize = 16;

/// A line and its time of arrival.
pub type Stamped = (SystemTime, Arc<LogLine>);

/// The last lines of a function. A reader holds only the number of its next line, so a slow reader misses dropped lines and
/// costs no memory.
#[derive(Debug)]
struct Tail {
    lines: VecDeque<Stamped>,
    /// Number of the next line; the last kept line is one below.
    next: watch::Sender<u64>,
}

/// The lines of all functions.
#[derive(Debug, Default)]
pub struct Logs(Mutex<BTreeMap<String, Tail>>);

impl Logs {
    /// Begins to keep lines of a function.
    pub fn open(&self, name: &str) {
        self.0.lock().entry(name.to_owned()).or_insert_with(Tail::new);
    }

    /// Adds a line. Drops it if the function is forgotten, since the function's last processes may print later.
    pub fn add(&self, name: &str, instance: &str, text: String) {
        let now = SystemTime::now();
        let (name, instance) = (name.to_owned(), instance.to_owned());
        let line =
            LogLine { name: name.clone(), namespace: NAMESPACE, instance, timestamp: rfc3339(now), text };
        let mut all = self.0.lock();
        let Some(tail) = all.get_mut(&name) else { return };
        tail.lines.push_back((now, Arc::new(line)));
        if tail.lines.len() > KEPT {
            tail.lines.pop_front();
        }
        tail.next.send_modify(|next| *next += 1);
    }

    /// The number to read from, and a channel with the number of the next line. The channel closes when the function is
    /// forgotten.
    ///
    /// Reading begins at the oldest kept line, or at the first of the last `most` lines that are `wanted`.
    pub fn begin(
        &self,
        name: &str,
        most: Option<usize>,
        wanted: impl Fn(&Stamped) -> bool,
    ) -> (u64, watch::Receiver<u64>) {
        let mut all = self.0.lock();
        let tail = all.entry(name.to_owned()).or_insert_with(Tail::new);
        let live = tail.next.subscribe();
        let numbered = tail.lines.iter().rev().zip(1..).filter(|(line, _)| wanted(line));
        let back: u64 = match most {
            Some(most) => numbered.take(most).last().map_or(0, |(_, back)| back),
            None => tail.lines.len() as u64,
        };
        let first = *live.borrow() - back;
        (first, live)
    }

    /// Up to a batch of lines from this number on, and the number after them.
    pub fn after(&self, name: &str, number: u64) -> (Vec<Stamped>, u64) {
        let all = self.0.lock();
        let Some(tail) = all.get(name) else { return (Vec::new(), number) };
        let first = *tail.next.borrow() - tail.lines.len() as u64;
        let from = number.max(first);
        let skipped = usize::try_from(from - first).unwrap_or(usize::MAX);
        let lines: Vec<Stamped> = tail.lines.iter().skip(skipped).take(BATCH).cloned().collect();
        let next = from + lines.len() as u64;
        (lines, next)
    }

    /// The last non-empty lines of an instance, oldest first.
    pub fn last(&self, name: &str, instance: &str, count: usize) -> Vec<String> {
        let all = self.0.lock();
        let lines = all.get(name).into_iter().flat_map(|tail| tail.lines.iter().rev());
        let mine = lines.filter(|(_, line)| line.instance == instance && !line.text.trim().is_empty());
        let mut last: Vec<String> = mine.take(count).map(|(_, line)| line.text.clone()).collect();
        last.reverse();
        last
    }

    /// Forgets the lines of a function; readers that follow them see the end.
    pub fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Reads a pipe to its end and adds its lines.
    pub async fn follow(&self, name: &str, instance: &str, pipe: impl AsyncRead + Unpin) {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut pipe).take(LONGEST).read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => self.add(name, instance, text(&line)),
            }
        }
    }
}

/// Hands the lines of a pipe on until the pipe ends, or until `add` returns false.
///
/// Invalid UTF-8 is replaced: to close the pipe early would kill the program at its next write.
pub fn each_line(pipe: impl io::Read, mut add: impl FnMut(String) -> bool) {
    use io::{BufRead as _, Read as _};
    let mut pipe = io::BufReader::new(pipe);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut pipe).take(LONGEST).read_until(b'\n', &mut line) {
        if !add(text(&line)) {
            return;
        }
        line.clear();
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim_end().to_owned()
}

impl Tail {
    fn new() -> Self {
        Self { lines: VecDeque::new(), next: watch::channel(0).0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_holds_no_lines_and_loses_those_that_are_not_kept_any_more() {
        let logs = Logs::default();
        logs.open("f");
        for number in 0..10 {
            logs.add("f", if number % 2 == 0 { "even" } else { "odd" }, number.to_string());
        }
        let even = |line: &Stamped| line.1.instance == "even";
        let text = |number| logs.after("f", number).0.first().map(|line| line.1.text.clone());
        assert_eq!(logs.begin("f", None, even).0, 0);
        assert_eq!(
            text(logs.begin("f", Some(2), even).0).as_deref(),
            Some("6"),
            "the last two that are wanted"
        );
        let (number, live) = logs.begin("f", None, even);
        for number in 10..2 * KEPT {
            logs.add("f", "even", number.to_string());
        }
        let (lines, next) = logs.after("f", number);
        assert_eq!((lines[0].1.text.as_str(), lines.len()), ("1000", BATCH), "the oldest that is kept");
        assert_eq!(next, 1000 + BATCH as u64);
        assert_eq!(Arc::strong_count(&lines[0].1), 2, "the same line and no copy");
        assert_eq!(logs.after("f", *live.borrow()).0.len(), 0);
        logs.forget("f");
        assert!(live.has_changed().is_err(), "who follows sees the end");
    }

    /// Regression: a line that was not UTF-8 closed the pipe, and the function's next write killed it during its trials.
    #[test]
    fn bytes_that_are_no_text_end_no_program_and_a_long_line_is_several() {
        let (mut printed, longest) = (b"\xff!\nnext\n".to_vec(), usize::try_from(LONGEST).unwrap());
        printed.extend(vec![b'x'; longest + 1]);
        let mut lines = Vec::new();
        each_line(&printed[..], |line| {
            lines.push(line);
            true
        });
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!((lines[0].as_str(), lines[1].as_str()), ("\u{fffd}!", "next"));
        assert_eq!(lengths[2..], [longest, 1]);
    }
}
