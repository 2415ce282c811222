//! Tests of what every backend promises, each written once. What all backends run alike is listed
//! here, and each runs the list; what depends on the backend is listed by its test file.

pub mod collectives;
pub mod counts;
pub mod failures;
pub mod forms;
pub mod fp8;
pub mod fp8_gathers;
pub mod groups;
pub mod hosts;
pub mod invariant;
pub mod late;
pub mod mismatches;
pub mod pipelines;
pub mod quantized;
pub mod quantized_products;
pub mod reduce_scatter;
pub mod refusals;
pub mod results;
pub mod shards;
pub mod staged;

/// Runs functions of this folder as tests on a backend: those listed by their file under their own names, and calls
/// with arguments under the names before them. A test holds what `$leave` gives, and does nothing if that is `None`.
macro_rules! on_backend {
    (
        $backend:ty, $leave:expr;
        $($file:ident { $($test:ident)* })*;
        $($name:ident = $other:ident::$called:ident($($argument:expr),*);)*
    ) => {
        $($(
            #[test]
            fn $test() {
                let Some(_leave) = $leave else { return };
                $crate::support::shared::$file::$test::<$backend>($crate::test_name!());
            }
        )*)*
        $(
            #[test]
            fn $name() {
                let Some(_leave) = $leave else { return };
                $crate::support::shared::$other::$called::<$backend>($crate::test_name!(), $($argument),*);
            }
        )*
    };
}
pub(crate) use on_backend;

/// Rows that ranks exchange and add up.
macro_rules! collectives_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            collectives {
                what_is_produced_is_summed_by_its_owner
                what_is_produced_is_the_next_input
                what_is_produced_reaches_its_rank
                an_error_of_a_producer_is_every_ranks
                a_panic_of_a_producer_ends_the_group
                a_producer_that_takes_too_long_is_named
                producers_of_other_blocks_are_a_mismatch
                what_cannot_be_exchanged_is_refused
                ranks_out_of_step_lose_time_only
                a_rank_that_sends_nothing_completes
                a_trace_shows_blocks_sent_when_they_are_made
            }
            counts {
                counts_that_do_not_fit_are_refused
                counts_that_differ_are_a_mismatch
            }
            ;
            blocks_of_counts_of_one_rank_stay = counts::blocks_of_counts_reach_their_ranks(1);
            blocks_of_counts_of_two_ranks_reach_them = counts::blocks_of_counts_reach_their_ranks(2);
            blocks_of_counts_of_three_ranks_reach_them = counts::blocks_of_counts_reach_their_ranks(3);
            blocks_of_counts_of_four_ranks_reach_them = counts::blocks_of_counts_reach_their_ranks(4);
            collectives_of_one_rank_exchange_what_they_have = collectives::collectives_exchange_what_ranks_have(1);
            collectives_of_two_ranks_exchange_what_they_have = collectives::collectives_exchange_what_ranks_have(2);
            collectives_of_three_ranks_exchange_what_they_have = collectives::collectives_exchange_what_ranks_have(3);
            collectives_of_four_ranks_exchange_what_they_have = collectives::collectives_exchange_what_ranks_have(4);
        }
    };
}
pub(crate) use collectives_tests;

/// What the caller computes, beside what is moved.
macro_rules! pipelines_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            pipelines {
                each_row_is_consumed_once_own_rows_first
                a_product_follows_a_consumer_of_the_same_rows
                an_error_of_a_consumer_is_every_ranks
                a_panic_of_a_consumer_ends_the_group
                a_consumer_makes_no_calls_of_its_group
                a_consumer_beside_a_product_is_a_mismatch
                a_consumer_that_takes_too_long_is_named
                two_matrices_are_consumed_together
                a_trace_shows_calls_behind_their_rows
            }
            staged {
                products_of_staged_rows_are_right
                staged_rows_are_consumed_by_stage
                what_cannot_be_staged_is_refused
                other_stages_are_a_mismatch
            }
            ;
        }
    };
}
pub(crate) use pipelines_tests;

/// Products of other forms.
macro_rules! forms_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            forms {
                parts_of_matrices_are_operands
                forms_that_do_not_fit_are_refused
            }
            ;
        }
    };
}
pub(crate) use forms_tests;

/// Data that goes into shards and out of them without the host.
macro_rules! shards_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            shards {
                a_product_writes_own_rows
                own_rows_are_copied_in_order
                a_residual_is_the_shard
                gathered_rows_are_operands
                staged_shards_are_copied_block_by_block
                parts_of_matrices_are_moved_by_collectives
                copies_that_do_not_fit_are_refused
            }
            ;
        }
    };
}
pub(crate) use shards_tests;

/// Sums over ranks that each have a part of K.
macro_rules! reduce_scatter_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            reduce_scatter {
                a_bias_on_some_ranks_only_is_a_mismatch
            }
            ;
            a_reduce_scatter_refuses_what_does_not_fit = reduce_scatter::what_does_not_fit_is_refused();
            another_m_in_a_reduce_scatter_is_a_mismatch = reduce_scatter::other_rows_are_a_mismatch([5, 5]);
        }
    };
}
pub(crate) use reduce_scatter_tests;

/// Parts of a group.
macro_rules! groups_tests {
    ($backend:ty, $leave:expr) => {
        $crate::support::shared::on_backend! {
            $backend, $leave;
            groups {
                products_of_all_parts_at_once_are_right
                sums_of_all_parts_at_once_are_right
                a_rank_is_in_several_groups
            }
            ;
        }
    };
}
pub(crate) use groups_tests;
