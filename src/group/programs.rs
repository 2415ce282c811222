//! Programs that a group keeps for later calls, and the memory of partial sums, which its operations share.

use std::borrow::Cow;
use std::panic::Location;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::{Group, Inner};
use crate::backend::Backend;
use crate::error::{Error, MadeCall, Result, called_at};
use crate::profile::nvtx::range;
use crate::resources::require_available;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::PARTIALS;
use crate::schedule::plan::{over_hosts, plan, tile_order};
use crate::schedule::{Accumulation, Agreed, Config, Numerics, Problem, Schedule};

/// A list of tiles of more bytes than this is asked for before it is made.
const LONG_LIST: usize = 1 << 20;

/// A program for the short calls.
pub struct Kept<B: Backend> {
    program: Arc<B::Program>,
    config: Config,
}

impl<B: Backend> Group<B> {
    /// The program for a problem. It is prepared at its first use and kept for the next one. If there are too many, the
    /// least recently used one is dropped. Without a configuration, the backend chooses one.
    pub(crate) fn program(
        &self,
        problem: Problem,
        config: Option<Config>,
    ) -> Result<Arc<B::Program>> {
        let (program, _) = self.configured_program(problem, config)?;
        Ok(program)
    }

    /// [`Group::program`], and its configuration.
    pub(crate) fn configured_program(
        &self,
        problem: Problem,
        config: Option<Config>,
    ) -> Result<(Arc<B::Program>, Config)> {
        let key = (problem, config);
        self.refuse_misplaced()?;
        let mut state = self.state(None)?;
        if let Some(kept) = state.programs.get(&key) {
            return Ok((kept.program.clone(), kept.config));
        }
        // A capture allows no allocation.
        self.refuse_recording()?;
        let _range = range(|| format!("gemmesh prepare {}", key.0.operation));
        let (schedule, config) = self.planned(&key.0, config)?;
        let Inner {
            backend, members, ..
        } = self.inner();
        let program = Arc::new(backend.prepare(members, schedule)?);
        let kept = Kept {
            program: program.clone(),
            config,
        };
        let evicted = state.programs.push(key, kept);
        drop(state);
        if let Some((_, evicted)) = evicted {
            self.evict(evicted);
        }
        Ok((program, config))
    }

    /// Checks that [`Group::configured_program`] would make the program, apart from its memory. Returns the schedule and
    /// the configuration.
    pub(crate) fn checked_schedule(
        &self,
        problem: &Problem,
        config: Option<Config>,
    ) -> Result<(Schedule, Config)> {
        self.check()?;
        let (schedule, config) = self.planned(problem, config)?;
        self.inner().backend.check(&schedule)?;
        Ok((schedule, config))
    }

    /// The schedule of a problem, and its configuration. The backend chooses one that is not given.
    fn planned(&self, problem: &Problem, config: Option<Config>) -> Result<(Schedule, Config)> {
        let Inner {
            backend,
            members,
            numerics,
            ..
        } = self.inner();
        // Before anything is computed of them.
        limit("N", problem.n, 0, MAX_EXTENT)?;
        config.map_or(Ok(()), |config| config.check())?;
        let mut problem = Cow::Borrowed(problem);
        // Not all kernels have fast sums, and which one runs depends on M.
        if *numerics == Numerics::Invariant && problem.form.accumulation == Accumulation::Fast {
            problem.to_mut().form.accumulation = Accumulation::Promoted;
        }
        if members.hosts.count() > 1 && problem.layout.world() == members.world {
            problem.to_mut().hosts = members.hosts.clone();
        }
        let problem = &*problem;
        let config = config.unwrap_or_else(|| {
            let rows = problem.layout.with_a_row();
            let with_a_row = rows.map(|layout| Problem {
                layout,
                ..problem.clone()
            });
            backend.default_config(with_a_row.as_ref().unwrap_or(problem), *numerics)
        });
        let config = over_hosts(problem, config);
        config.check_numerics(*numerics)?;
        let listed = tile_order::bytes(problem, &config);
        // Asking takes longer than planning a short list.
        if listed > LONG_LIST {
            require_available(listed).map_err(Error::out_of_memory(members.rank, listed))?;
        }
        Ok((plan(problem, members.rank, config)?, config))
    }

    /// Keeps a program until this rank waits for the device, and drops it then. If there are many, the oldest is
    /// dropped at once.
    fn evict(&self, program: Kept<B>) {
        const MOST: usize = 16;
        let mut evicted = self.evicted();
        let oldest = (evicted.len() == MOST).then(|| evicted.remove(0));
        evicted.push(program);
        // Unlocked first, so that no one waits while a program is dropped.
        drop(evicted);
        drop(oldest);
    }

    pub(super) fn evicted(&self) -> MutexGuard<'_, Vec<Kept<B>>> {
        // A panic cannot have left it half-changed, because each change is one call.
        let evicted = &self.inner.evicted;
        evicted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the program of a captured operation as long as the group lives.
    pub(crate) fn keep_recorded(&self, program: &Arc<B::Program>) -> Result<()> {
        let recorded = &mut self.state(None)?.recorded;
        if !recorded.iter().any(|kept| Arc::ptr_eq(kept, program)) {
            recorded.push(program.clone());
        }
        Ok(())
    }

    /// Symmetric memory for the partial sums of a schedule. Operations use it one after the other. If there is not
    /// enough yet, the call is collective: ranks that agree on the operation need the same size.
    #[track_caller]
    pub(crate) fn partials(&self, schedule: &Schedule) -> Result<Arc<B::Symmetric>> {
        self.check()?;
        let place = Location::caller();
        let matrix = schedule.matrices()[PARTIALS];
        let bytes = matrix.rows.saturating_mul(matrix.row_bytes());
        // Whole blocks, so that a few more rows need no new allocation. A size that overflows is too large for any
        // machine.
        let bytes = bytes.checked_next_multiple_of(B::BLOCK);
        let bytes = bytes.unwrap_or(usize::MAX);
        let Inner {
            backend, members, ..
        } = self.inner();
        // A panic while it was held has not left it half-changed.
        let partials = &self.inner.partials;
        let mut partials = partials.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((memory, room)) = &*partials
            && *room >= bytes
        {
            if self.is_recording()? {
                let kept = &mut self.state(None)?.recorded_partials;
                if !kept.iter().any(|kept| Arc::ptr_eq(kept, memory)) {
                    kept.push(memory.clone());
                }
            }
            return Ok(memory.clone());
        }
        self.refuse_recording()
            .inspect_err(|error| members.refuse(error))?;
        members.withdraw_refusal();
        // All ranks are here. Memory that is too small is freed first, to make room.
        *partials = None;
        let call = MadeCall::from_lines(schedule.agreed().map_or("", Agreed::lines));
        // This is a part of the operation's call.
        let made = called_at(Some(place), || backend.symmetric(members, &call, bytes));
        let memory = Arc::new(self.noted(made)?);
        *partials = Some((memory.clone(), bytes));
        Ok(memory)
    }
}
