//! Messages between ranks and tables of tuned configurations, as JSON.
//!
//! The public types are described here a second time, so that serde's traits are no part of the interface. If the two
//! descriptions differ, the crate does not compile.

#[cfg(feature = "cuda")]
pub mod config;

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::element::DType;
use crate::error::{Call, Deadline, Error, MadeCall, Result};
use crate::profile::span::{Lane, Span, Work};
use crate::schedule::Route;

/// Writes an error.
pub fn of_error(error: &Error) -> Vec<u8> {
    serde_json::to_vec(&SentError(error.clone())).unwrap_or_default()
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
    serde_json::from_slice(bytes).map(|SentError(error)| error)
}

/// Writes a result with its value or its error.
pub fn of_outcome<T: Serialize>(outcome: &Result<T>) -> Vec<u8> {
    let outcome = outcome.as_ref().map_err(|error| SentError(error.clone()));
    serde_json::to_vec(&outcome).unwrap_or_default()
}

/// Reads what [`of_outcome`] has written.
pub fn outcome<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<Result<T>> {
    let outcome: Result<T, SentError> = serde_json::from_slice(bytes)?;
    Ok(outcome.map_err(|SentError(error)| error))
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
#[serde(remote = "Route")]
enum RouteJson {
    Pull,
    Push,
    Store,
    Net,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Deadline")]
enum DeadlineJson {
    Call,
    Arrival,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "MadeCall")]
struct MadeCallJson {
    name: String,
    arguments: Vec<String>,
    configuration: Vec<String>,
    place: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "DType")]
pub enum DTypeJson {
    Bf16,
    F16,
    F32,
    F8E4M3,
    F8E5M2,
    U8,
    U16,
    U32,
    U64,
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

#[derive(Serialize, Deserialize)]
struct SentError(#[serde(with = "ErrorJson")] Error);

/// For an error that a field may hold, boxed or not.
pub mod optional {
    use std::borrow::Borrow;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::SentError;
    use crate::error::Error;

    pub fn serialize<S: Serializer>(
        error: &Option<impl Borrow<Error>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let error = error.as_ref().map(|error| error.borrow().clone());
        error.map(SentError).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>, E: From<Error>>(
        deserializer: D,
    ) -> Result<Option<E>, D::Error> {
        let error = Option::<SentError>::deserialize(deserializer)?;
        Ok(error.map(|SentError(error)| error.into()))
    }
}

/// A call as its name and its place.
mod call {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::error::Call;

    pub fn serialize<S: Serializer>(call: &Call, serializer: S) -> Result<S::Ok, S::Error> {
        (call.name(), call.place()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Call, D::Error> {
        let (name, place) = <(String, Option<String>)>::deserialize(deserializer)?;
        Ok(Call::new(name, place))
    }
}

mod optional_call {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::error::Call;

    pub fn serialize<S: Serializer>(call: &Option<Call>, serializer: S) -> Result<S::Ok, S::Error> {
        let call = call.as_ref().map(|call| (call.name(), call.place()));
        call.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Call>, D::Error> {
        let call = Option::<(String, Option<String>)>::deserialize(deserializer)?;
        Ok(call.map(|(name, place)| Call::new(name, place)))
    }
}

mod boxed_call {
    use serde::{Deserializer, Serializer};

    use super::MadeCallJson;
    use crate::error::MadeCall;

    pub fn serialize<S: Serializer>(call: &MadeCall, serializer: S) -> Result<S::Ok, S::Error> {
        MadeCallJson::serialize(call, serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Box<MadeCall>, D::Error> {
        MadeCallJson::deserialize(deserializer).map(Box::new)
    }
}

mod boxed {
    use serde::{Deserializer, Serializer};

    use super::ErrorJson;
    use crate::error::Error;

    pub fn serialize<S: Serializer>(error: &Error, serializer: S) -> Result<S::Ok, S::Error> {
        ErrorJson::serialize(error, serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<Error>, D::Error> {
        ErrorJson::deserialize(deserializer).map(Box::new)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Error")]
enum ErrorJson {
    Limit {
        rank: Option<usize>,
        #[serde(with = "call")]
        call: Call,
        what: String,
        value: usize,
        min: usize,
        max: usize,
    },
    Unsupported {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        what: String,
    },
    Refused {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        what: String,
    },
    Shape {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        argument: String,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    Count {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        whole: String,
        unit: String,
        expected: usize,
        part: String,
        found: usize,
    },
    DType {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        argument: String,
        #[serde(with = "DTypeJson")]
        expected: DType,
        #[serde(with = "DTypeJson")]
        found: DType,
    },
    Unsuitable {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        what: String,
        expected: String,
        found: String,
    },
    ForeignArgument {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        argument: String,
        expected: Option<Box<str>>,
        found: Option<Box<str>>,
    },
    Environment {
        launcher: String,
        missing: String,
    },
    EnvironmentValue {
        name: String,
        value: String,
        reason: String,
    },
    RanksMissing {
        ranks: Vec<usize>,
        address: String,
        waited_ms: u64,
        reason: Option<Box<str>>,
    },
    RankNeverJoined {
        rank: usize,
    },
    AddressTaken {
        rank: usize,
        address: String,
        holder: String,
        waited_ms: u64,
    },
    UnknownUser {
        ranks: Vec<usize>,
        rank: usize,
        address: String,
        reason: String,
    },
    KeyRefused {
        rank: usize,
        address: String,
    },
    DuplicateRank {
        rank: usize,
        pids: [u32; 2],
    },
    Mismatch {
        rank: usize,
        what: String,
        theirs: String,
        other: usize,
        expected: String,
        #[serde(with = "optional_call")]
        call: Option<Call>,
    },
    CallMismatch {
        rank: usize,
        #[serde(with = "boxed_call")]
        theirs: Box<MadeCall>,
        other: usize,
        #[serde(with = "boxed_call")]
        expected: Box<MadeCall>,
        call: u64,
        #[serde(with = "optional")]
        refused: Option<Box<Error>>,
    },
    OutOfMemory {
        rank: usize,
        bytes: usize,
        reason: String,
    },
    RankLost {
        rank: usize,
        noticed_by: usize,
    },
    HostLost {
        rank: usize,
        noticed_by: usize,
        silent_ms: u64,
    },
    RankPanicked {
        rank: usize,
        message: Option<String>,
    },
    ProgramFailed {
        rank: usize,
        reason: String,
    },
    Callback {
        rank: usize,
        call: String,
        reason: String,
    },
    CallInCallback {
        rank: usize,
    },
    Busy {
        rank: usize,
        call: String,
        waited_ms: u64,
    },
    Forked {
        rank: usize,
        process: u32,
        child: u32,
    },
    RankLeft {
        rank: usize,
        waiting: usize,
        what: String,
    },
    Timeout {
        rank: usize,
        waiting: usize,
        what: String,
        waited_ms: u64,
        #[serde(with = "DeadlineJson")]
        deadline: Deadline,
    },
    Poisoned {
        #[serde(with = "boxed")]
        cause: Box<Error>,
    },
    InGroup {
        group: String,
        job_ranks: Vec<usize>,
        #[serde(with = "boxed")]
        error: Box<Error>,
    },
    RankFailed {
        rank: usize,
        status: String,
        #[serde(with = "optional")]
        cause: Option<Box<Error>>,
        killed: Vec<usize>,
    },
    AlreadyRank {
        launcher: String,
    },
    Message {
        rank: usize,
        reason: String,
    },
    Internal {
        rank: usize,
        what: String,
    },
    Unaligned {
        rank: usize,
        #[serde(with = "call")]
        call: Call,
        what: String,
        value: usize,
        multiple: usize,
    },
    NeedsProcesses {
        rank: usize,
    },
    SharedGpu {
        ranks: [usize; 2],
        visible: usize,
    },
    NoGpu {
        rank: usize,
        reason: String,
    },
    DriverTooOld {
        rank: usize,
        function: String,
    },
    NoNccl {
        rank: usize,
        reason: String,
    },
    BuiltWithoutKernels {
        rank: usize,
    },
    UnsupportedGpu {
        rank: usize,
        name: String,
        capability: String,
    },
    NoPeerAccess {
        rank: usize,
        peer: usize,
        reason: String,
    },
    PeerMemory {
        rank: usize,
        peer: usize,
    },
    NoKernel {
        rank: usize,
        asked: String,
        known: String,
    },
    NoRoute {
        rank: usize,
        operation: String,
        #[serde(with = "RouteJson")]
        asked: Route,
        #[serde(with = "RouteJson")]
        instead: Route,
    },
    QueuedTogether {
        rank: usize,
        what: String,
        cause: String,
    },
    Capturing {
        rank: usize,
    },
    Cuda {
        rank: usize,
        call: String,
        reason: String,
    },
    System {
        rank: Option<usize>,
        action: String,
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_crosses_processes_unchanged() {
        let lost = Error::RankLost {
            rank: 1,
            noticed_by: 0,
        };
        let failed = |cause| Error::RankFailed {
            rank: 1,
            status: "exit status: 1".into(),
            cause,
            killed: vec![0],
        };
        let poisoned = Error::Poisoned {
            cause: Box::new(lost.clone()),
        };
        assert_eq!(poisoned.cause(), &lost);
        let program = |reason: &str| Error::ProgramFailed {
            rank: 3,
            reason: reason.into(),
        };
        let no_route = Error::NoRoute {
            rank: 2,
            operation: "all_reduce".into(),
            asked: Route::Store,
            instead: Route::Push,
        };
        let placed = MadeCall {
            configuration: vec!["Route::Push".into()],
            place: Some("src/block.rs:31".into()),
            ..MadeCall::named("barrier")
        };
        for error in [
            failed(None),
            failed(Some(Box::new(lost))),
            poisoned,
            no_route,
            Error::Timeout {
                rank: 1,
                waiting: 0,
                what: "barrier()".into(),
                waited_ms: 300,
                deadline: Deadline::Arrival,
            },
            Error::CallMismatch {
                rank: 1,
                theirs: placed.into(),
                other: 0,
                expected: MadeCall::new("all_gather", ["M = 6".into()]).into(),
                call: 2,
                refused: Some(Box::new(Error::Capturing { rank: 1 })),
            },
            Error::Mismatch {
                rank: 1,
                what: "group name".into(),
                theirs: "\"b\"".into(),
                other: 0,
                expected: "\"a\"".into(),
                call: Some(Call::here("split")),
            },
            Error::Unsupported {
                rank: 2,
                call: Call::here("matmul"),
                what: "operands must be bf16 or f16".into(),
            },
            Error::Internal {
                rank: 4,
                what: "nobody makes block 7".into(),
            },
            program(&"long\0 ".repeat(1000)),
        ] {
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
            let program = Error::ProgramFailed {
                rank: 3,
                reason: reason.clone(),
            };
            let whole = Error::Poisoned {
                cause: Box::new(program),
            };
            let cut = fitted(whole, MOST);
            assert!(fits(&cut), "{text:?}");
            let Error::ProgramFailed {
                rank: 3,
                reason: begins,
            } = cut.cause()
            else {
                panic!("{cut}")
            };
            let begins = begins.strip_suffix('…').expect("it says that it is cut");
            assert!(
                reason.starts_with(begins) && begins.len() > 20,
                "{begins:?}"
            );
        }
        let short = Error::Capturing { rank: 1 };
        assert_eq!(fitted(short.clone(), MOST), short);
    }
}
