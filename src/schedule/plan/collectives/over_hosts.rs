//! Sums of rows over the ranks of several hosts. [`SumsOverHosts`] has them.

use std::ops::Range;

use super::{CollectivePlan, SumPlace};
use crate::Result;
use crate::route::Route;
use crate::schedule::limits::require;
use crate::schedule::plan::chunks::{Part, most_on_rails};
use crate::schedule::plan::host_sums::{Source, SumsOverHosts};
use crate::schedule::plan::matrices::OUT;
use crate::schedule::plan::partials::Partials;
use crate::schedule::plan::ways::{Ways, cut_for_rail};
use crate::schedule::{Problem, Schedule, Sum};

/// Gives each rank its rows of the sum.
///
/// # Errors
/// `Kind::Unsupported` if rows are stored.
pub(super) fn sums(plan: &CollectivePlan, place: SumPlace) -> Result<Schedule> {
    let what = "over several hosts the rows of a sum must not be stored";
    require(what, plan.config.route != Route::Store)?;
    let &CollectivePlan { problem, rank, .. } = plan;
    let layout = &problem.layout;
    let (source, callers) = if plan.is_produced() {
        (Source::Caller, layout.m())
    } else {
        (Source::Input, 0)
    };
    let most = layout.rows().into_iter().max().unwrap_or(0);
    let room = Partials::of_callers(problem, callers, most);
    let most = most_on_rails(&problem.hosts, layout);
    let cut = |maker: usize, owner: usize| plan.cut_over_hosts(most, [maker, owner]);
    let ways = Ways::new(problem, rank, room, cut);
    let sums = SumsOverHosts::new((problem, rank), source, problem.n, ways);
    let (first, out) = place.of(layout, rank);
    let mut parts = plan.parts([layout.m(), out], &room);
    parts.arrivals = sums.arrivals();
    parts.departures = sums.departures();
    parts.requests = sums.requests();
    parts.host_sums = sums.host_sums();
    parts.reduction = sums.own_sum(Sum::plain(OUT, first));
    Schedule::new(parts)
}

impl CollectivePlan<'_> {
    /// How `maker` cuts its addend to rows of `owner`: the caller's blocks as within one host, and other rows as they go
    /// over the network, in at most `most` parts.
    fn cut_over_hosts(&self, most: usize, [maker, owner]: [usize; 2]) -> Vec<Range<usize>> {
        let Problem {
            layout,
            hosts,
            n,
            dtypes,
            ..
        } = self.problem;
        let rows = layout.rows_of(owner);
        let ranges = |parts: Vec<Part>| parts.into_iter().map(|part| part.rows).collect();
        match (self.is_produced(), hosts.share(maker, owner)) {
            (true, _) if maker == owner => ranges(self.cut_own(rows)),
            (false, _) if maker == owner => Vec::new(),
            (false, false) => {
                let row = n * dtypes.operands.bytes();
                cut_for_rail(most, rows, row, self.config.entry_rows())
            }
            _ => ranges(self.cut(rows)),
        }
    }
}
