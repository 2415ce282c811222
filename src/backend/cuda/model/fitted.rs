//! Numbers of the model that were fitted to measurements, besides the rates of a device
//! ([`Rates`](crate::backend::cuda::family::rates::Rates)).
//!
//! They were fitted on H200s if no other device is named; benches/NOTES.md has the measurements. Each table names the
//! tests that compare it with what was measured, or with the choice that was the fastest.

/// Waves of tiles. Test: `products_are_predicted_within_a_fifth_and_most_within_seven_percent`.
pub mod tiles {
    /// Share of a read's time. How much longer reads take, times the share of multiprocessors that are idle, if these
    /// do not lie evenly: those of a kernel that begins early, whose CTAs lie where others became free, and those of a
    /// gather by single CTAs, of which some read at half the speed of others. From chains of products, and from a trace
    /// on two.
    pub const UNEVEN_READS: f64 = 0.4;
    /// µs. The most that first reads from device memory take, until the number under way fills its bandwidth.
    pub const FIRST_READS: f64 = 1.0;
    /// Bytes. After this many reads it is about that.
    pub const FIRST_READ_BYTES: f64 = 10e6;
    /// Part of the clusters that fit by number, of three or four CTAs: some multiprocessors have too few neighbours.
    pub const CLUSTERS_OF_FOUR: [usize; 2] = [10, 11];
    /// The same of more CTAs.
    pub const LARGER_CLUSTERS: [usize; 2] = [7, 8];
    /// µs. A launch on a stream that is busy, of the kernel that quantises a product's results.
    pub const QUANTIZE_LAUNCH: f64 = 2.0;
}

/// The search for kernels and slices of K. Tests: `each_kernel_is_chosen_for_some_shape`,
/// `k_is_cut_into_as_many_slices_as_fill_waves`,
/// `constant_weights_are_multiplied_by_as_many_ctas_as_there_are_multiprocessors`.
pub mod search {
    /// The most slices. Adding more takes longer than they save.
    pub const MOST_SLICES: usize = 8;
    /// The most waves for which slices are considered. With more waves, the last one matters little.
    pub const MOST_WAVES: usize = 12;
    /// Part of the waves of fewer slices. More slices are considered only if they take less.
    pub const SLICES_WORTH: f64 = 0.95;
    /// The fewest steps through K of a slice.
    pub const LEAST_STEPS: f64 = 4.0;
    /// Rows. So few have one low tile.
    pub const FEW_ROWS: usize = 64;
    /// Neighbouring tiles whose loads count once. This, and that few rows of tiles are better walked together, were
    /// measured on 2989 products.
    pub const MERGED_TILES: f64 = 12.0;
    /// Rows. Sums over hosts of fewer have low tiles. Test:
    /// `what_is_chosen_over_hosts_runs_and_is_low_if_there_are_few_rows`.
    pub const MANY_ROWS_OVER_HOSTS: usize = 4096;
}

/// The route of gathered rows. Tests: `few_rows_are_stored_and_read_by_low_tiles_and_many_copied`,
/// `of_short_rows_more_bytes_are_stored_than_of_long_ones`.
pub mod gather {
    /// Bytes in a µs. So many are stored rather than copied, for each microsecond that copies take to begin and to
    /// signal. Even more bytes would arrive sooner by stores, but stores hold up products.
    pub const STORED_INSTEAD: f64 = 320e3;
    /// The same for short rows that two ranks gather. It was not measured for more ranks.
    pub const STORED_INSTEAD_IF_SHORT: f64 = 800e3;
    /// Bytes. The longest of the short rows.
    pub const SHORT_ROW: f64 = 4800.0;
    /// Bytes. A larger shard is copied in two chunks.
    pub const LARGE_SHARD: f64 = 80e6;
}

/// Partial sums of two GPUs. Tests: `the_model_comes_within_a_seventh_of_what_was_measured`,
/// `sums_behind_the_product_come_within_a_seventh_of_what_was_measured`.
pub mod sums {
    /// µs. What adding to a tile takes.
    pub const ADD: f64 = 1.2;
    /// µs. From the end of a block's last tile until an idle copy engine moves its first byte.
    pub const COPY_START: f64 = 12.0;
    /// µs. From the end of one copy to the beginning of the next.
    pub const COPY_NEXT: f64 = 1.0;
    /// Bytes in a µs, that the copy engine moves to a peer while kernels run.
    pub const COPY_BYTES: f64 = 300e3;
    /// µs. What a copied flag takes.
    pub const COPY_FLAG: f64 = 5.0;
    /// µs. What the start and the end of a kernel with copies take.
    pub const AROUND_COPIES: f64 = 13.0;
    /// µs. The same of a kernel that stores.
    pub const AROUND_STORES: f64 = 10.0;
    /// Bytes in a µs, that kernels store to a peer.
    pub const STORE_BYTES: f64 = 330e3;
    /// Part of the stores' time in which nothing is multiplied, because loads wait for them.
    pub const STORE_HINDERS: f64 = 0.6;
    /// µs. What the flag after stores takes.
    pub const STORE_FLAG: f64 = 4.0;
    /// µs. What the start and the end of a low-latency kernel take, with the way of one word.
    pub const LOW_LATENCY: f64 = 14.0;
    /// µs. What a second kernel takes, which adds one-shot partials.
    pub const SECOND_KERNEL: f64 = 4.5;
    /// µs. What a kernel takes that follows the product, stores its partials and adds those that come, with the flags.
    pub const FOLLOWING_KERNEL: f64 = 10.5;
    /// Bytes in a µs, that this kernel stores to a peer.
    pub const FOLLOWING_BYTES: f64 = 280e3;
    /// Part of the time of other ways. Sums follow the product only if they take less: a rank's K may be shorter than
    /// is assumed, and what is hidden by a short product counts more. Test:
    /// `sums_follow_products_that_other_kernels_make_much_faster`.
    pub const FOLLOWING_WORTH: f64 = 0.95;
    /// The K for which ranks choose what they must agree on, because theirs may differ. They take what is the fastest
    /// in the geometric mean of both. On random shapes that is predicted to take 1.02 times as long as what the very K
    /// would choose, and the choice for one K 1.04.
    pub const DEPTHS: [usize; 2] = [2048, 16384];
}
