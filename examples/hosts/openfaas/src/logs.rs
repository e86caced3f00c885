//! Logs of replicas: the last lines of each function, and those to come.

use super::api::{LogLine, NAMESPACE, rfc3339};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::SystemTime;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::broadcast;

/// Lines that are kept of each function.
const KEPT: usize = 1000;
/// The longest line; the rest begins another one.
const LONGEST: u64 = 16 << 10;
/// How far a reader may fall behind before lines are lost to it.
const BEHIND: usize = 1024;

/// A line and when it came.
pub type Stamped = (SystemTime, LogLine);

#[derive(Debug)]
struct Tail {
    lines: VecDeque<Stamped>,
    live: broadcast::Sender<Stamped>,
}

/// The lines of all functions.
#[derive(Debug, Default)]
pub struct Logs(Mutex<BTreeMap<String, Tail>>);

impl Logs {
    /// Keeps the lines of a function from now on.
    pub fn open(&self, name: &str) {
        self.0.lock().entry(name.to_owned()).or_insert_with(Tail::new);
    }

    /// Adds a line, unless the function was forgotten: its last processes end after that.
    pub fn add(&self, name: &str, instance: &str, text: String) {
        let now = SystemTime::now();
        let (name, instance) = (name.to_owned(), instance.to_owned());
        let line =
            LogLine { name: name.clone(), namespace: NAMESPACE, instance, timestamp: rfc3339(now), text };
        let mut all = self.0.lock();
        let Some(tail) = all.get_mut(&name) else { return };
        tail.lines.push_back((now, line.clone()));
        if tail.lines.len() > KEPT {
            tail.lines.pop_front();
        }
        // There may be no reader.
        let _ = tail.live.send((now, line));
    }

    /// The lines so far, the oldest first, and those to come.
    pub fn read(&self, name: &str) -> (Vec<Stamped>, broadcast::Receiver<Stamped>) {
        let mut all = self.0.lock();
        let tail = all.entry(name.to_owned()).or_insert_with(Tail::new);
        (tail.lines.iter().cloned().collect(), tail.live.subscribe())
    }

    /// The last lines of an instance that are not empty, the oldest first.
    pub fn last(&self, name: &str, instance: &str, count: usize) -> Vec<String> {
        let all = self.0.lock();
        let lines = all.get(name).into_iter().flat_map(|tail| tail.lines.iter().rev());
        let mine = lines.filter(|(_, line)| line.instance == instance && !line.text.trim().is_empty());
        let mut last: Vec<String> = mine.take(count).map(|(_, line)| line.text.clone()).collect();
        last.reverse();
        last
    }

    /// Forgets a function's lines; who follows them sees the end.
    pub fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Reads the lines of a pipe to its end.
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

/// Hands on the lines of a pipe until its end, or until they are not wanted any more. The reader of a pipe that is closed before its
/// end would end the program that writes to it: any bytes are a line.
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
        Self { lines: VecDeque::new(), live: broadcast::channel(BEHIND).0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measurement of a function that printed another line than of UTF-8 failed: its pipe was closed, and the next line ended it.
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
