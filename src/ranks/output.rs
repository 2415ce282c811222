//! What launched ranks write. The launcher reads it from pipes and forwards it line by line, with the rank before each
//! line, so that lines of several ranks do not mix.
//!
//! One thread forwards all lines. It reads from the ranks only if its own output takes more, so ranks that write faster
//! than a reader reads have to wait. It never waits for one output while the other has room.

mod sink;

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use self::sink::{Loss, Sink};
use super::poll;

/// A longer line is forwarded in pieces of this many bytes.
const LONGEST: usize = 64 << 10;
/// The pause between looks. It can be long, because everything that happens wakes the thread.
const PAUSE: Duration = Duration::from_secs(3600);

/// The outputs of launched ranks.
#[derive(Default)]
pub struct RankOutputs {
    out: Vec<Pipe>,
    err: Vec<Pipe>,
}

impl RankOutputs {
    /// Takes the output of `rank`, which `command` is going to start.
    pub fn take(&mut self, rank: usize, command: &mut Command) -> io::Result<()> {
        let (out, of_rank) = io::pipe()?;
        command.stdout(of_rank);
        self.out.push(Pipe::new(rank, out));
        let (err, of_rank) = io::pipe()?;
        command.stderr(of_rank);
        self.err.push(Pipe::new(rank, err));
        Ok(())
    }

    /// Does `work`, and forwards meanwhile what the ranks write to this process's own output. It returns when all that
    /// they have written by the end of `work` is out.
    ///
    /// A process that holds a pipe longer, such as a child of a rank, is not waited for.
    ///
    /// Lines that an output does not take, for example because its disk is full, are dropped, so that the ranks can go
    /// on. The error output says so at once. Later lines are tried again. The second result is an error then, unless
    /// the output's reader has gone, which may have read all that it wants.
    ///
    /// # Errors
    /// If there can be no thread. Then the work is not done.
    pub fn forward_during<T>(self, work: impl FnOnce() -> T) -> io::Result<(T, io::Result<()>)> {
        let (out, err) = (io::stdout(), io::stderr());
        self.forward_to([out.as_fd(), err.as_fd()], work)
    }

    fn forward_to<T>(
        self,
        to: [BorrowedFd; 2],
        work: impl FnOnce() -> T,
    ) -> io::Result<(T, io::Result<()>)> {
        let (over, mut done) = io::pipe()?;
        let [out, err] = to;
        let sinks = [
            Sink::new("standard output", out, self.out),
            Sink::new("the error output", err, self.err),
        ];
        thread::scope(|scope| {
            let forwards = thread::Builder::new().name("gemmesh output".into());
            let forwards = forwards.spawn_scoped(scope, move || forward(sinks, &over))?;
            let result = work();
            // Dropping it is not enough, because a fork of this process may hold it too.
            let _ = done.write_all(&[0]);
            let lost = forwards.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok((result, lost))
        })
    }
}

/// Forwards until `over` is readable, and then what is still there. Fails if lines were lost.
fn forward(mut sinks: [Sink; 2], over: &PipeReader) -> io::Result<()> {
    let (mut is_over, mut is_said) = (false, false);
    loop {
        let mut events = Vec::new();
        if !is_over {
            events.push(PollFd::new(over, PollFlags::IN));
        }
        sinks.iter().for_each(|sink| sink.await_in(&mut events));
        if events.is_empty() {
            return lost(sinks);
        }
        // It fails only if the system has no memory.
        if poll::poll(&mut events, PAUSE).is_err() {
            thread::sleep(Duration::from_millis(10));
            continue;
        }
        let mut happened = events.iter().map(PollFd::revents).collect::<Vec<_>>();
        let ends = !is_over && !happened.remove(0).is_empty();
        let mut happened = happened.into_iter();
        sinks.iter_mut().for_each(|sink| sink.go_on(&mut happened));
        if ends {
            is_over = true;
            sinks.iter_mut().for_each(Sink::end);
        }
        let [out, err] = &mut sinks;
        if let Some(loss) = out.loss.as_ref().filter(|_| !is_said) {
            err.text.extend(loss.news().as_bytes());
            is_said = true;
        }
    }
}

/// Fails if lines of ranks were lost.
fn lost(sinks: [Sink; 2]) -> io::Result<()> {
    let losses: Vec<Loss> = sinks.into_iter().filter_map(|sink| sink.loss).collect();
    let Some(first) = losses.first() else {
        return Ok(());
    };
    let kind = first.error.kind();
    let words: Vec<String> = losses.iter().map(Loss::to_string).collect();
    Err(io::Error::new(kind, words.join("; ")))
}

/// The pipe that a rank writes to.
struct Pipe {
    from: PipeReader,
    /// The rank, as it stands before a line.
    rank: String,
    /// The line that has begun.
    line: Vec<u8>,
    /// True if a carriage return has just ended a line.
    has_returned: bool,
}

impl Pipe {
    fn new(rank: usize, from: PipeReader) -> Pipe {
        Pipe {
            from,
            rank: format!("[{rank}] "),
            line: Vec::new(),
            has_returned: false,
        }
    }

    /// Reads up to `bytes` bytes, and adds the lines that have ended to `text`. Returns false if nothing more can come.
    fn read(&mut self, text: &mut Vec<u8>, bytes: usize) -> bool {
        let mut read = vec![0; bytes];
        match self.from.read(&mut read) {
            Ok(0) => {
                self.end(text);
                false
            }
            Ok(bytes) => {
                read[..bytes].iter().for_each(|&byte| self.add(byte, text));
                true
            }
            Err(error) => error.kind() == io::ErrorKind::Interrupted,
        }
    }

    /// A carriage return ends a line too, so that progress can be seen while it is made.
    fn add(&mut self, byte: u8, text: &mut Vec<u8>) {
        let had_returned = std::mem::take(&mut self.has_returned);
        match byte {
            b'\n' if had_returned => {}
            b'\n' => self.end_line(text),
            b'\r' if self.line.is_empty() => {}
            b'\r' => {
                self.end_line(text);
                self.has_returned = true;
            }
            byte => {
                if self.line.len() == LONGEST {
                    self.end_line(text);
                }
                self.line.push(byte);
            }
        }
    }

    fn end_line(&mut self, text: &mut Vec<u8>) {
        text.extend(self.rank.as_bytes());
        text.append(&mut self.line);
        text.push(b'\n');
    }

    /// The last line need not have ended.
    fn end(&mut self, text: &mut Vec<u8>) {
        if !self.line.is_empty() {
            self.end_line(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::PipeWriter;

    use super::*;

    /// The outputs of `world` ranks, and where those write to: first standard output, then the error output.
    fn ranks(world: usize) -> (RankOutputs, Vec<[PipeWriter; 2]>) {
        let mut outputs = RankOutputs::default();
        let writers = (0..world).map(|rank| {
            let (out, to_out) = io::pipe().unwrap();
            let (err, to_err) = io::pipe().unwrap();
            outputs.out.push(Pipe::new(rank, out));
            outputs.err.push(Pipe::new(rank, err));
            [to_out, to_err]
        });
        let writers = writers.collect();
        (outputs, writers)
    }

    /// What comes out, at each output, if ranks do `work`.
    fn forwarded(world: usize, work: impl FnOnce(Vec<[PipeWriter; 2]>)) -> [String; 2] {
        let (outputs, writers) = ranks(world);
        let (from_out, out) = io::pipe().unwrap();
        let (from_err, err) = io::pipe().unwrap();
        thread::scope(|scope| {
            let read = |mut from: PipeReader| {
                let mut text = String::new();
                from.read_to_string(&mut text).unwrap();
                text
            };
            let readers = [from_out, from_err].map(|from| scope.spawn(move || read(from)));
            let to = [out.as_fd(), err.as_fd()];
            let ((), lost) = outputs.forward_to(to, || work(writers)).unwrap();
            lost.unwrap();
            drop((out, err));
            readers.map(|reader| reader.join().unwrap())
        })
    }

    #[test]
    fn lines_of_several_ranks_come_out_whole_each_behind_its_rank_and_where_it_was_written_to() {
        let [out, err] = forwarded(3, |writers| {
            for byte in 0..6 {
                for [out, err] in &writers {
                    (&*out).write_all(&b"a line"[byte..][..1]).unwrap();
                    (&*err).write_all(&b"errors"[byte..][..1]).unwrap();
                }
            }
            for [mut out, mut err] in writers {
                out.write_all(b"\n\nand a second\n").unwrap();
                err.write_all(b"\n").unwrap();
            }
        });
        for rank in 0..3 {
            let begin = format!("[{rank}] ");
            let own = |text: &str| -> Vec<String> {
                let own = text.lines().filter_map(|line| line.strip_prefix(&begin));
                own.map(String::from).collect()
            };
            assert_eq!(own(&out), ["a line", "", "and a second"]);
            assert_eq!(own(&err), ["errors"]);
        }
        assert_eq!((out.lines().count(), err.lines().count()), (9, 3));
    }

    #[test]
    fn a_last_line_that_has_no_end_comes_out() {
        let [out, err] = forwarded(1, |mut writers| {
            let [mut out, err] = writers.remove(0);
            out.write_all(b"first\nlast").unwrap();
            // This pipe stays open, as in a child of the rank. The test's own end does not close it either.
            (&err).write_all(b"held").unwrap();
            std::mem::forget(err);
        });
        assert_eq!([out, err], ["[0] first\n[0] last\n", "[0] held\n"]);
    }

    #[test]
    fn progress_that_returns_to_the_begin_of_its_line_comes_out_in_lines() {
        let [out, err] = forwarded(1, |mut writers| {
            let [mut out, mut err] = writers.remove(0);
            out.write_all(b"\r 10%\r 20%\r 30%\ndone\n").unwrap();
            err.write_all(b"of Windows\r\n\r\nand\rso\r\n").unwrap();
        });
        assert_eq!(out, "[0]  10%\n[0]  20%\n[0]  30%\n[0] done\n");
        assert_eq!(err, "[0] of Windows\n[0] \n[0] and\n[0] so\n");
    }

    #[test]
    fn a_line_that_is_too_long_comes_out_in_pieces_and_nothing_of_it_is_lost() {
        let long = 3 * LONGEST;
        let [out, err] = forwarded(1, |mut writers| {
            let [mut out, mut err] = writers.remove(0);
            out.write_all(&[&vec![b'x'; long][..], b"\nshort\n"].concat())
                .unwrap();
            err.write_all(&vec![b'y'; long + 1]).unwrap();
        });
        let pieces = |text: &str| -> Vec<usize> {
            let lines = text.lines().map(|line| line.strip_prefix("[0] ").unwrap());
            lines.map(str::len).collect()
        };
        assert_eq!(pieces(&out), [LONGEST, LONGEST, LONGEST, 5]);
        assert_eq!(pieces(&err), [LONGEST, LONGEST, LONGEST, 1]);
    }

    #[test]
    fn ranks_go_on_if_nobody_reads_what_they_write() {
        let (outputs, mut writers) = ranks(1);
        let (from_out, out) = io::pipe().unwrap();
        let (mut from_err, err) = io::pipe().unwrap();
        drop(from_out);
        let to = [out.as_fd(), err.as_fd()];
        let worked = outputs.forward_to(to, || {
            let [mut out, mut err] = writers.remove(0);
            // This is more than all pipes hold.
            let lines = "a line\n".repeat(1 << 20);
            out.write_all(lines.as_bytes()).unwrap();
            err.write_all(b"after it\n").unwrap();
        });
        let ((), lost) = worked.unwrap();
        lost.expect("a reader that has gone may have read all that it wants");
        drop(err);
        let mut text = String::new();
        from_err.read_to_string(&mut text).unwrap();
        assert_eq!(text, "[0] after it\n");
    }

    #[test]
    fn one_output_that_nobody_reads_yet_does_not_hold_up_the_other() {
        let (outputs, mut writers) = ranks(2);
        let (mut from_out, out) = io::pipe().unwrap();
        let (mut from_err, err) = io::pipe().unwrap();
        let lines = "a line\n".repeat(1 << 17);
        let read = thread::scope(|scope| {
            let to = [out.as_fd(), err.as_fd()];
            let worked = outputs.forward_to(to, || {
                let [mut of_0, _] = writers.remove(0);
                let [_, mut of_1] = writers.remove(0);
                let lines = lines.as_bytes();
                let fills = scope.spawn(move || of_0.write_all(lines).unwrap());
                of_1.write_all(b"an error\n").unwrap();
                let mut said = [0; "[1] an error\n".len()];
                from_err.read_exact(&mut said).unwrap();
                assert!(!fills.is_finished(), "nobody has read that yet");
                let reads = scope.spawn(move || {
                    let mut text = String::new();
                    from_out.read_to_string(&mut text).map(|_| text)
                });
                fills.join().unwrap();
                (said, reads)
            });
            let ((said, reads), lost) = worked.unwrap();
            lost.unwrap();
            assert_eq!(said, *b"[1] an error\n");
            drop((out, err));
            reads.join().unwrap().unwrap()
        });
        assert_eq!(read, lines.replace("a line", "[0] a line"));
    }
}
