//! Times of the streams' work, for a trace.

use std::sync::Arc;

use crate::backend::cuda::driver::{Device, Event, Stream};
use crate::error::Result;
use crate::profile::span::{Lane, Span, Work};

/// Events before and after each piece of work on a stream, if the call is traced.
#[derive(Debug)]
pub struct Stamps {
    device: Arc<Device>,
    taken: Option<Vec<(Lane, Work, Event, Event)>>,
}

impl Stamps {
    pub fn new(device: &Arc<Device>, is_traced: bool) -> Stamps {
        Stamps {
            device: device.clone(),
            taken: is_traced.then(Vec::new),
        }
    }

    /// An event at the present end of `stream`, if the call is traced.
    pub fn now(&self, stream: &Stream) -> Result<Option<Event>> {
        match self.taken {
            Some(_) => stamp(&self.device, stream).map(Some),
            None => Ok(None),
        }
    }

    /// Notes the work that was put on `stream` since `before`.
    pub fn add(
        &mut self,
        lane: Lane,
        before: Option<Event>,
        stream: &Stream,
        work: impl FnOnce() -> Work,
    ) -> Result<()> {
        if let (Some(taken), Some(before)) = (&mut self.taken, before) {
            taken.push((lane, work(), before, stamp(&self.device, stream)?));
        }
        Ok(())
    }

    /// Adds the spans, with times counted from `begun`. The streams must have passed all events.
    pub fn spans(self, begun: &Event, spans: &mut Vec<Span>) -> Result<()> {
        let nanos = |event: &Event| -> Result<u64> {
            Ok((event.micros_since(begun)?.max(0.0) * 1e3) as u64)
        };
        for (lane, work, before, after) in self.taken.unwrap_or_default() {
            let (begin, end) = (nanos(&before)?, nanos(&after)?);
            spans.push(Span {
                lane,
                work,
                begin,
                end,
            });
        }
        Ok(())
    }
}

/// Records an event that takes the time.
pub fn stamp(device: &Arc<Device>, stream: &Stream) -> Result<Event> {
    let event = Event::new(device, true)?;
    event.record(stream)?;
    Ok(event)
}
