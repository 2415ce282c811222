//! Lines on standard error for whoever watches a job that does not begin.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

/// A rank that has waited this long says for whom.
pub const LONG: Duration = Duration::from_secs(10);

/// Writes a line in one piece. If it can't be written, it is lost.
pub fn say(words: impl fmt::Display) {
    let line = format!("gemmesh: {words}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// A wait that is told of once.
pub struct Wait {
    begin: Instant,
    is_told: bool,
}

impl Wait {
    pub fn since(begin: Instant) -> Wait {
        let is_told = false;
        Wait { begin, is_told }
    }

    /// True once, when the wait has become long.
    pub fn is_to_be_told(&mut self, now: Instant) -> bool {
        let is_long = now.saturating_duration_since(self.begin) >= LONG;
        is_long && !std::mem::replace(&mut self.is_told, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_told_of_once() {
        let begin = Instant::now();
        let mut wait = Wait::since(begin);
        let after = |ms| begin + Duration::from_millis(ms);
        let told = [0, 9_999, 10_000, 10_001, 60_000].map(|ms| wait.is_to_be_told(after(ms)));
        assert_eq!(told, [false, false, true, false, false]);
    }
}
