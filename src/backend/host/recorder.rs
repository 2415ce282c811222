//! The spans of a rank's threads, for a trace.

use std::sync::{Mutex, PoisonError};

use crate::profile::span::{Lane, Span, Work, now};

/// Notes spans, if the call is traced.
pub struct Recorder<'a>(Option<Mutex<&'a mut Vec<Span>>>);

impl<'a> Recorder<'a> {
    pub fn new(spans: Option<&'a mut Vec<Span>>) -> Recorder<'a> {
        Recorder(spans.map(Mutex::new))
    }

    pub fn begin(&self) -> u64 {
        if self.0.is_some() { now() } else { 0 }
    }

    pub fn end(&self, begin: u64, lane: Lane, work: impl FnOnce() -> Work) {
        if let Some(spans) = &self.0 {
            let span = Span {
                lane,
                work: work(),
                begin,
                end: now(),
            };
            spans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(span);
        }
    }
}
