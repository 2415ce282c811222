//! The device's queues, in which streams may hold one another up.

use crate::error::{Kind, Result};

/// Which streams may share a queue of the device. In a shared queue, one stream's work can hold up another's.
///
/// The device has fewer queues than a process may have streams. Streams of different priorities share none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queues {
    /// Why kernels and copies may share a queue, if they may.
    pub together: Option<String>,
    /// Whether all streams of one priority share a queue.
    single: bool,
    /// The least and the greatest priority: lower numbers are higher priorities.
    priorities: (i32, i32),
}

impl Queues {
    pub fn found(priorities: (i32, i32)) -> Queues {
        Queues::of(|name| std::env::var(name).unwrap_or_default(), priorities)
    }

    fn of(variable: impl Fn(&str) -> String, priorities: (i32, i32)) -> Queues {
        let single = variable("CUDA_DEVICE_MAX_CONNECTIONS") == "1";
        let (least, greatest) = priorities;
        let together = if single {
            Some("CUDA_DEVICE_MAX_CONNECTIONS=1".into())
        } else if !["", "0"].contains(&&*variable("CUDA_LAUNCH_BLOCKING")) {
            Some("CUDA_LAUNCH_BLOCKING".into())
        } else if least - greatest < 2 {
            let count = least - greatest + 1;
            Some(format!(
                "a driver with {count} stream priorities, as under MPS or on a virtual GPU"
            ))
        } else {
            None
        };
        Queues {
            together,
            single,
            priorities,
        }
    }

    /// Checks that the stream that releases the device after a failure has a queue in which nothing waits.
    pub fn check(&self, rank: usize) -> Result<()> {
        let (least, greatest) = self.priorities;
        if self.single && least - greatest < 2 {
            let cause = "CUDA_DEVICE_MAX_CONNECTIONS=1 and a driver without stream priorities";
            return Err(queued_together("a group", cause).on(rank));
        }
        Ok(())
    }

    /// Checks that operations may be put on a caller's stream of this priority.
    pub fn check_main(&self, rank: usize, priority: i32) -> Result<()> {
        let (least, greatest) = self.priorities;
        // The priorities of the rescue stream, the copy streams and the host stream.
        let ours = priority <= (greatest + 2).min(least);
        if self.single && ours {
            let what = format!("a stream of priority {priority}");
            return Err(queued_together(&what, "CUDA_DEVICE_MAX_CONNECTIONS=1").on(rank));
        }
        Ok(())
    }
}

/// `what` needs queues of its own, which `cause`, a variable of the environment or a property of the driver, prevents.
pub fn queued_together(what: &str, cause: &str) -> Kind {
    let what = format!(
        "{what} needs streams that do not block one another, which {cause} prevents; remove the cause, or choose another \
         route or stream"
    );
    Kind::Misuse { what }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIORITIES: (i32, i32) = (0, -5);

    fn queues(variables: &[(&str, &str)], priorities: (i32, i32)) -> Queues {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Queues::of(
            |name| value(name).map_or(String::new(), |(_, value)| value.to_string()),
            priorities,
        )
    }

    #[test]
    fn what_makes_streams_share_a_queue_is_found() {
        let together = |variables: &[_], priorities| queues(variables, priorities).together;
        assert_eq!(together(&[], PRIORITIES), None);
        assert_eq!(together(&[("CUDA_LAUNCH_BLOCKING", "0")], PRIORITIES), None);
        for variable in ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"] {
            let cause = together(&[(variable, "1")], PRIORITIES).unwrap();
            assert!(cause.starts_with(variable), "{cause}");
        }
        let cause = together(&[], (0, 0)).unwrap();
        assert!(cause.contains("1 stream priorities"), "{cause}");
    }

    #[test]
    fn a_stream_of_the_callers_never_shares_a_queue_with_what_sets_it_free() {
        let single = queues(&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")], PRIORITIES);
        assert_eq!(single.check(0), Ok(()));
        for priority in [-5, -4, -3] {
            let error = single.check_main(3, priority).unwrap_err();
            let is_misuse = matches!(error.kind(), Kind::Misuse { .. });
            assert!(is_misuse && error.rank() == Some(3), "{error}");
        }
        for priority in [-2, 0] {
            assert_eq!(single.check_main(0, priority), Ok(()));
        }
        assert_eq!(queues(&[], PRIORITIES).check_main(0, -5), Ok(()));
        let alike = queues(&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")], (0, 0));
        assert!(alike.check(0).is_err());
        assert_eq!(queues(&[], (0, 0)).check(0), Ok(()));
    }
}
