//! Why ranks were refused calls, and from when on a refusal counts.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::{NOTE_BYTES, POSTS, SharedState, encode, now_ms};
use crate::error::Error;
use crate::json;
use crate::ranks::deadlines::Deadlines;

/// Why a rank was refused a call that it has not made after all.
struct Refusal {
    error: Error,
    age: Duration,
    /// How often the rank has been refused that call by now.
    count: u64,
}

impl SharedState {
    /// Notes why this rank was refused what would have been its call `number`. Two threads must not call this at once.
    pub fn note_refusal(&self, number: u64, error: &Error) {
        let mut refused = self.refused();
        let count = refused.get(&number).unwrap_or(&0) + 1;
        refused.insert(number, count);
        // Nobody waits in a call from that long ago.
        refused.retain(|of, _| of + POSTS > number);
        drop(refused);
        let mut bytes = [now_ms(), count].map(u64::to_le_bytes).concat();
        bytes.extend(encode(error, NOTE_BYTES - bytes.len()));
        self.block().refusals[self.rank].write(number, &bytes);
    }

    fn refused(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // A panic while it was held has not left it half-changed.
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that this rank makes its next call, whatever it was refused before. Two threads must not call this at
    /// once.
    pub fn withdraw_refusal(&self) {
        // Calls are numbered from 1.
        self.block().refusals[self.rank].write(0, &[]);
    }

    /// Why `rank` was refused its call `number`, if it has not made that call after all.
    fn refusal_of(&self, rank: usize, number: u64) -> Option<Refusal> {
        let bytes = self.block().refusals[rank].read(number)?;
        if self.has_begun(rank, number) {
            return None;
        }
        let (noted, bytes) = bytes.split_first_chunk::<8>()?;
        let (count, error) = bytes.split_first_chunk::<8>()?;
        let age = now_ms().saturating_sub(u64::from_le_bytes(*noted));
        Some(Refusal {
            error: json::error(error).ok()?,
            age: Duration::from_millis(age),
            count: u64::from_le_bytes(*count),
        })
    }

    /// The error of that refusal.
    pub fn refusal(&self, rank: usize, number: u64) -> Option<Error> {
        Some(self.refusal_of(rank, number)?.error)
    }

    /// Why some rank was refused its call `number`. `waited` is how long this rank has waited in that call.
    ///
    /// None until that, and the age of the refusal, reach [`Deadlines::correction`]: until then the other rank may
    /// still make the call.
    ///
    /// If this rank was refused the same call before, the other ranks may have been refused too, and may try again
    /// within [`Deadlines::another_try`]. Until then a refusal counts only if its rank was refused more often than this
    /// one.
    pub fn standing_refusal(
        &self,
        number: impl FnOnce() -> Option<u64>,
        waited: Duration,
        deadlines: &Deadlines,
    ) -> Option<Error> {
        let time = deadlines.correction();
        if waited < time {
            return None;
        }
        let number = number()?;
        let own = self.refused().get(&number).copied().unwrap_or(0);
        let mut refusals = (0..self.world).filter_map(|rank| self.refusal_of(rank, number));
        refusals
            .find(|refusal| {
                let may_try_again = refusal.count <= own && waited < deadlines.another_try();
                refusal.age >= time && !may_try_again
            })
            .map(|refusal| refusal.error)
    }
}
