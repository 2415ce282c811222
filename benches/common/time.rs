//! Times that may be missing.

use serde_json::Value;

/// A time in microseconds, or a ratio of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Time {
    Taken(f64),
    /// A library can't do this.
    Refused,
    /// It can't be taken here.
    Absent,
}

impl Time {
    pub fn get(self) -> Option<f64> {
        match self {
            Time::Taken(time) => Some(time),
            Time::Refused | Time::Absent => None,
        }
    }

    /// The ratio to another.
    pub fn over(self, other: Time) -> Time {
        match (self, other) {
            (Time::Taken(time), Time::Taken(other)) => Time::Taken(time / other),
            (Time::Absent, _) | (_, Time::Absent) => Time::Absent,
            _ => Time::Refused,
        }
    }

    /// In a table. Nothing stands for a time that is absent.
    pub fn text(self, decimals: usize) -> String {
        match self {
            Time::Taken(time) => format!("{time:.decimals$}"),
            Time::Refused => "refused".into(),
            Time::Absent => String::new(),
        }
    }
}

/// In the JSON.
impl From<Time> for Value {
    fn from(time: Time) -> Value {
        match time {
            Time::Taken(time) => time.into(),
            Time::Refused => "refused".into(),
            Time::Absent => Value::Null,
        }
    }
}

impl From<f64> for Time {
    fn from(time: f64) -> Time {
        Time::Taken(time)
    }
}

impl From<Option<f64>> for Time {
    fn from(time: Option<f64>) -> Time {
        time.map_or(Time::Absent, Time::Taken)
    }
}
