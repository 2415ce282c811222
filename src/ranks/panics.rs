//! Notes what panics say, and tells groups of those that abort.

use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

use super::last_panic::{NO_WORDS, set, text_of};
use super::shared_state::SharedState;
use crate::error::Kind;

/// The groups of this process, if its panics abort. Such a panic unwinds nothing that could tell the other ranks.
static ABORTED: Mutex<Vec<Weak<SharedState>>> = Mutex::new(Vec::new());

/// Notes the messages of panics from now on, before the process's own hook runs. If panics abort, it tells this group
/// of them.
///
/// A hook that the program sets later may replace this one. Then the group learns that a rank panicked, but not why.
pub fn listen(group: &Arc<SharedState>) {
    static ONCE: Once = Once::new();
    if cfg!(panic = "abort") {
        let mut groups = ABORTED.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }
    // A thread that unwinds may not set a hook. The next group sets it.
    if std::thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let program = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            note(panic);
            program(panic);
        }));
    });
}

fn note(panic: &PanicHookInfo) {
    let words = text_of(panic.payload()).unwrap_or(NO_WORDS);
    let message = match panic.location() {
        Some(place) => format!("{words} ({place})"),
        None => words.into(),
    };
    // (try_lock, because the thread that panics may hold the lock.)
    if let (true, Ok(groups)) = (cfg!(panic = "abort"), ABORTED.try_lock()) {
        tell(&groups, &message);
    }
    set(Some(message));
}

/// Tells groups of a panic that ends this process.
fn tell(groups: &[Weak<SharedState>], message: &str) {
    for group in groups.iter().filter_map(Weak::upgrade) {
        group.fail(
            Kind::RankPanicked {
                message: Some(message.into()),
            }
            .on(group.rank()),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use super::*;
    use crate::ranks::last_panic::{forget, message, message_of};
    use crate::ranks::memfd::{Mapping, memfd};

    #[test]
    fn a_process_that_aborts_tells_the_groups_that_it_is_in() {
        let memory = memfd(SharedState::BYTES).unwrap();
        let rank = |rank| {
            let memory = Mapping::shared(&memory, SharedState::BYTES).unwrap();
            Arc::new(SharedState::new(memory, rank, 2))
        };
        let (own, others) = (rank(1), rank(0));
        tell(&[Weak::new(), Arc::downgrade(&own)], "planted (here)");
        let fault = others.fault().map(|fault| fault.to_string());
        assert_eq!(fault.as_deref(), Some("rank 1 panicked: planted (here)"));
    }

    #[test]
    fn a_panic_that_was_caught_says_what_its_payload_does_unless_more_was_noted_of_it() {
        let said = |payload: Box<dyn Any + Send>| message_of(&*payload);
        set(None);
        assert_eq!(said(Box::new(7)), None);
        assert_eq!(said(Box::new("planted")).as_deref(), Some("planted"));
        set(Some("planted (here)".into()));
        assert_eq!(said(Box::new("planted")).as_deref(), Some("planted (here)"));
        assert_eq!(
            said(Box::new("another".to_string())).as_deref(),
            Some("another")
        );
        forget();
        assert_eq!(message(), None);
    }
}
