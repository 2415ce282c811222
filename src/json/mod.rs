//! Messages between ranks and tables of tuned configurations, as JSON.
//!
//! Spans are described here a second time, so that serde's traits are no part of their interface. If the two descriptions
//! differ, the crate does not compile.

#[cfg(feature = "cuda")]
pub mod config;

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::profile::span::{Lane, Span, Work};

/// Writes an error.
pub fn of_error(error: &Error) -> Vec<u8> {
    serde_json::to_vec(error).unwrap_or_default()
}

/// The error, with its texts cut if [`of_error`] would write more than `most` bytes of it.
pub fn fitted(error: Error, most: usize) -> Error {
    const SHORTEST: usize = 8;
    let bytes = of_error(&error);
    if bytes.len() <= most {
        return error;
    }
    let Ok(mut value) = serde_json::from_slice(&bytes) else {
        return error;
    };
    let mut length = most;
    while length > SHORTEST {
        length /= 2;
        cut_texts(&mut value, length);
        let bytes = serde_json::to_vec(&value).unwrap_or_default();
        if bytes.len() <= most {
            return self::error(&bytes).unwrap_or(error);
        }
    }
    // Apart from texts, there are only a few numbers.
    error
}

/// Cuts texts to about `length` bytes.
fn cut_texts(value: &mut Value, length: usize) {
    match value {
        Value::String(text) if text.len() > length => {
            let end = (0..=length).rfind(|&end| text.is_char_boundary(end));
            text.truncate(end.unwrap_or(0));
            text.push('…');
        }
        Value::Array(values) => values.iter_mut().for_each(|value| cut_texts(value, length)),
        Value::Object(fields) => fields
            .values_mut()
            .for_each(|value| cut_texts(value, length)),
        _ => {}
    }
}

/// Reads what [`of_error`] has written.
pub fn error(bytes: &[u8]) -> serde_json::Result<Error> {
    serde_json::from_slice(bytes)
}

/// Writes a result with its value or its error.
pub fn of_outcome<T: Serialize>(outcome: &Result<T>) -> Vec<u8> {
    serde_json::to_vec(outcome).unwrap_or_default()
}

/// Reads what [`of_outcome`] has written.
pub fn outcome<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<Result<T>> {
    serde_json::from_slice(bytes)
}

/// Writes the spans of a rank.
pub fn of_spans(spans: &[Span]) -> serde_json::Result<Vec<u8>> {
    let spans: Vec<SentSpan> = spans.iter().cloned().map(SentSpan).collect();
    serde_json::to_vec(&spans)
}

/// Reads what [`of_spans`] has written.
pub fn spans(bytes: &[u8]) -> serde_json::Result<Vec<Span>> {
    let spans: Vec<SentSpan> = serde_json::from_slice(bytes)?;
    Ok(spans.into_iter().map(|SentSpan(span)| span).collect())
}

#[derive(Serialize, Deserialize)]
struct SentSpan(#[serde(with = "SpanJson")] Span);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Span")]
struct SpanJson {
    #[serde(with = "LaneJson")]
    lane: Lane,
    #[serde(with = "WorkJson")]
    work: Work,
    begin: u64,
    end: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Lane")]
enum LaneJson {
    Copy,
    Network,
    Caller(usize),
    Worker(usize),
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Work")]
enum WorkJson {
    Pull { source: usize, rows: Range<usize> },
    Push { to: usize, rows: Range<usize> },
    Wait { source: usize },
    Tile { source: usize, m: u32, n: u32 },
    Call { rank: usize },
    Add { rows: Range<usize> },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Kind, examples};

    #[test]
    fn errors_cross_processes_unchanged() {
        for error in examples() {
            let sent = super::error(&of_error(&error)).unwrap();
            // Equal errors may differ in the place of a call.
            assert_eq!((sent.to_string(), &sent), (error.to_string(), &error));
            let outcome: Result<()> = Err(error);
            assert_eq!(super::outcome(&of_outcome(&outcome)).unwrap(), outcome);
        }
    }

    #[test]
    fn an_error_too_long_to_be_sent_keeps_its_rank_and_the_beginning_of_its_texts() {
        const MOST: usize = 512;
        let fits = |error: &Error| of_error(error).len() <= MOST;
        for text in ["plain ", "ü", "\0", "\u{1b}[31m\"", "\n"] {
            let reason = text.repeat(10_000);
            let program = Kind::ProgramFailed {
                function_of: None,
                reason: reason.clone(),
            };
            let cut = fitted(program.on(3).again(), MOST);
            assert!(fits(&cut), "{text:?}");
            let Kind::ProgramFailed { reason: begins, .. } = cut.kind() else {
                panic!("{cut}")
            };
            assert_eq!(cut.rank(), Some(3));
            let begins = begins.strip_suffix('…').expect("it says that it is cut");
            assert!(
                reason.starts_with(begins) && begins.len() > 20,
                "{begins:?}"
            );
        }
        let short = Kind::Capturing.on(1);
        assert_eq!(fitted(short.clone(), MOST), short);
    }
}
