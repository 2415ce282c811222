//! One of the launcher's own outputs, to which it writes the lines of all ranks.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::Pipe;
use crate::ranks::poll;

/// How much is written at once. A pipe that has room takes this much without waiting, and in one piece.
const PIECE: usize = 4096;
/// How much is read from a rank at once.
const READ: usize = 4096;

/// One of this process's outputs, with the ranks' pipes that lead to it.
pub struct Sink<'a> {
    name: &'static str,
    to: BorrowedFd<'a>,
    /// True if its reader has gone. Then what ranks write is dropped, so that they can go on.
    is_gone: bool,
    pub loss: Option<Loss>,
    /// True if the last line that was written has no end, because an error came in between.
    is_within_line: bool,
    pipes: Vec<Pipe>,
    /// Whole lines. While there are some, nothing is read.
    pub text: Vec<u8>,
    /// How much of the text has been written.
    written: usize,
}

impl<'a> Sink<'a> {
    pub fn new(name: &'static str, to: BorrowedFd<'a>, pipes: Vec<Pipe>) -> Sink<'a> {
        Sink {
            name,
            to,
            is_gone: false,
            loss: None,
            is_within_line: false,
            pipes,
            text: Vec::new(),
            written: 0,
        }
    }

    /// Adds what it waits for.
    pub fn await_in<'b>(&'b self, events: &mut Vec<PollFd<'b>>) {
        if self.text.is_empty() {
            events.extend(
                self.pipes
                    .iter()
                    .map(|pipe| PollFd::new(&pipe.from, PollFlags::IN)),
            )
        } else {
            events.push(PollFd::from_borrowed_fd(self.to, PollFlags::OUT))
        }
    }

    /// Goes on with what has `happened` to what it waited for.
    pub fn go_on(&mut self, happened: &mut impl Iterator<Item = PollFlags>) {
        if !self.text.is_empty() {
            return match happened.next() {
                Some(flags) if !flags.is_empty() => self.write(flags),
                _ => {}
            };
        }
        let Sink { pipes, text, .. } = self;
        pipes.retain_mut(|pipe| match happened.next() {
            Some(flags) if !flags.is_empty() => pipe.read(text, READ),
            _ => true,
        });
        self.drop_if_gone();
    }

    /// Takes what is in the pipes now, and no more.
    pub fn end(&mut self) {
        for mut pipe in std::mem::take(&mut self.pipes) {
            let bytes = rustix::io::ioctl_fionread(&pipe.from).unwrap_or(0);
            pipe.read(&mut self.text, bytes as usize);
            pipe.end(&mut self.text);
        }
        self.drop_if_gone();
    }

    fn drop_if_gone(&mut self) {
        if self.is_gone {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.text.clear();
        self.written = 0;
    }

    /// Writes whole lines, as many as can be written at once.
    fn write(&mut self, flags: PollFlags) {
        if flags.intersects(poll::GONE) {
            self.is_gone = true;
            return self.clear();
        }
        let left = &self.text[self.written..];
        let part = if self.is_within_line {
            b"\n"
        } else {
            &left[..piece(left)]
        };
        match rustix::io::write(self.to, part) {
            Ok(_) if self.is_within_line => self.is_within_line = false,
            Ok(bytes) => self.written += bytes,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => self.is_gone = true,
            Err(error) => return self.lose(error),
        }
        if self.is_gone || self.written == self.text.len() {
            self.clear();
        }
    }

    /// Drops the lines that are not written, because the output fails with `error`.
    fn lose(&mut self, error: Errno) {
        let (written, left) = self.text.split_at(self.written);
        let loss = self.loss.get_or_insert_with(|| Loss {
            output: self.name,
            error: error.into(),
            bytes: 0,
        });
        loss.bytes += left.len();
        self.is_within_line |= written.last().is_some_and(|&last| last != b'\n');
        self.clear();
    }
}

/// Lines of ranks that an output did not take.
pub struct Loss {
    /// The output.
    output: &'static str,
    /// The first error.
    pub error: io::Error,
    bytes: usize,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Loss {
            output,
            error,
            bytes,
            ..
        } = self;
        write!(f, "{bytes} bytes were not written to {output}: {error}")
    }
}

impl Loss {
    /// A line about it.
    pub fn news(&self) -> String {
        let Loss { output, error, .. } = self;
        format!(
            "gemmesh: {output} fails: {error}; what ranks print there is lost until it works again\n"
        )
    }
}

/// How much of `text` is written at once.
fn piece(text: &[u8]) -> usize {
    let first = &text[..text.len().min(PIECE)];
    let lines = first.iter().rposition(|&byte| byte == b'\n');
    lines.map_or(first.len(), |last| last + 1)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn lines_come_out_again_once_there_is_room() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (mut read, write) = io::pipe().unwrap();
        let mut sink = Sink::new("the output", full.as_fd(), Vec::new());
        for line in [&b"lost\n"[..], b"and lost\n"] {
            sink.text.extend(line);
            sink.write(PollFlags::OUT);
            assert!(sink.text.is_empty());
        }
        sink.to = write.as_fd();
        // The begin of this one comes out before the disk is full again.
        sink.text.extend(b"half of a line\n");
        sink.written = rustix::io::write(sink.to, b"half").unwrap();
        sink.lose(Errno::NOSPC);
        sink.text.extend(b"a line\n");
        while !sink.text.is_empty() {
            sink.write(PollFlags::OUT);
        }
        let loss = sink.loss.take().unwrap().to_string();
        assert!(
            loss.starts_with("25 bytes were not written to the output: No space left"),
            "{loss}"
        );
        drop(write);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "half\na line\n");
    }
}
