//! Why ranks were refused calls, and from when on a refusal counts.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::{NOTE_BYTES, POSTS, SharedState, encode, now_ms};
use crate::error::Error;
use crate::json;
use crate::ranks::deadlines::Deadlines;

/// The time of a refusal that does not stand any more.
pub const WITHDRAWN: u64 = u64::MAX;

/// Why a rank was refused a call.
struct Refusal {
    error: Error,
    /// When it was noted, in ms, or [`WITHDRAWN`].
    noted: u64,
    /// How often the rank has been refused that call by now.
    count: u64,
}

impl Refusal {
    /// How long ago it was noted.
    fn age(&self) -> Duration {
        Duration::from_millis(now_ms().saturating_sub(self.noted))
    }
}

impl SharedState {
    /// Notes why this rank was refused what would have been its call `number`. Two threads must not call this at once.
    pub fn note_refusal(&self, number: u64, error: &Error) {
        let mut refused = self.refused();
        let count = refused.get(&number).unwrap_or(&0) + 1;
        refused.insert(number, count);
        // No one waits in a call from that long ago.
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

    /// Notes that this rank makes its call `number`, which is its next, whatever it was refused before. Two threads must
    /// not call this at once.
    pub fn withdraw_refusal(&self, number: u64) {
        let refusal = &self.block().refusals[self.rank];
        if let Some(mut bytes) = refusal.read(number) {
            if let Some(noted) = bytes.first_chunk_mut() {
                *noted = WITHDRAWN.to_le_bytes();
            }
            refusal.write(number, &bytes);
        }
    }

    /// Why `rank` was refused its call `number`, if it has not made that call after all.
    fn refusal_of(&self, rank: usize, number: u64) -> Option<Refusal> {
        let refusal = self.latest_refusal(rank, number)?;
        let stands = refusal.noted != WITHDRAWN && !self.has_begun(rank, number);
        stands.then_some(refusal)
    }

    /// The last refusal of `rank` before its call `number`.
    fn latest_refusal(&self, rank: usize, number: u64) -> Option<Refusal> {
        let bytes = self.block().refusals[rank].read(number)?;
        let (noted, bytes) = bytes.split_first_chunk::<8>()?;
        let (count, error) = bytes.split_first_chunk::<8>()?;
        Some(Refusal {
            error: json::error(error).ok()?,
            noted: u64::from_le_bytes(*noted),
            count: u64::from_le_bytes(*count),
        })
    }

    /// Why `rank` was refused what would have been its call `number`, also if it has made a call since.
    pub fn was_refused(&self, rank: usize, number: u64) -> Option<Error> {
        let refusal = self.latest_refusal(rank, number)?;
        // The ranks in its fields are those of the job already.
        Some(refusal.error.cause())
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
                refusal.age() >= time && !may_try_again
            })
            .map(|refusal| refusal.error)
    }
}
