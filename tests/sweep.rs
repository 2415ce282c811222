//! The benchmark's random shapes and what it says of them.

#[path = "../benches/operations/sweep.rs"]
mod sweep;
#[path = "../benches/common/time.rs"]
mod time;

use std::collections::HashSet;

use gemmesh::Config;
use gemmesh::tuning::{Chunking, Route, TileShape};
use sweep::{
    LARGEST, LARGEST_ON_HOST, Line, Split, Times, draw, draw_of_models, geometric_mean, percentile,
    rounded_up, summary,
};
use time::Time;

#[test]
fn shapes_are_within_bounds_and_multiples() {
    for largest in [LARGEST, LARGEST_ON_HOST] {
        for [m, n, k] in draw(7, 5000, largest) {
            assert!((1..=largest[0]).contains(&m), "{m}");
            assert!((256..=largest[1]).contains(&n) && n % 8 == 0, "{n}");
            assert!((512..=largest[2]).contains(&k) && k % 64 == 0, "{k}");
        }
    }
}

#[test]
fn shapes_of_fp8_are_those_of_16_bits_with_n_and_k_rounded_up_within_the_bounds() {
    for largest in [LARGEST, LARGEST_ON_HOST] {
        for multiples in [[16, 16], [16, 512]] {
            for shape in draw(7, 2000, largest) {
                let [m, n, k] = rounded_up(shape, multiples);
                assert!(m == shape[0] && n >= shape[1] && k >= shape[2]);
                assert!(n <= largest[1] && n - shape[1] < 16 && n % 16 == 0, "{n}");
                assert!(k <= largest[2] && k % multiples[1] == 0, "{k}");
            }
        }
    }
}

#[test]
fn shapes_are_spread_over_all_sizes_and_ragged_ones_are_among_them() {
    let shapes = draw(1, 1000, LARGEST);
    let share = |holds: fn(&[usize; 3]) -> bool| {
        shapes.iter().filter(|shape| holds(shape)).count() as f64 / 1000.0
    };
    let near = |found: f64, expected: f64| (found - expected).abs() < 0.05;
    // Of 14 powers of two, M is below 64 in 6.
    assert!(near(share(|[m, ..]| *m < 64), 6.0 / 14.0));
    assert!(near(share(|[m, ..]| *m >= 1024), 4.0 / 14.0));
    assert!(near(share(|[_, n, _]| *n < 2679), 0.5));
    assert!(near(share(|[_, _, k]| *k < 3831), 0.5));
    assert!(share(|[m, ..]| m % 2 == 1) > 0.3);
    assert!(share(|[_, n, _]| n % 64 != 0) > 0.1);
    assert!(share(|[_, _, k]| k % 128 != 0) > 0.05);
}

#[test]
fn a_seed_always_draws_the_same_shapes() {
    let shapes = draw(1, 20, LARGEST);
    assert_eq!(shapes[..2], [[2633, 384, 1024], [307, 3072, 896]]);
    assert_eq!(draw(1, 5, LARGEST), shapes[..5]);
    assert_ne!(draw(2, 20, LARGEST), shapes);
}

#[test]
fn shapes_of_models_are_drawn_once_each_and_split_as_tensor_parallel_layers_are() {
    let all = draw_of_models(1, 10_000, &[Split::Columns, Split::Depth], &[1, 2, 4, 8]);
    let distinct: HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    assert!(
        all.iter()
            .all(|[m, n, k]| m.is_power_of_two() && n.is_multiple_of(8) && k.is_multiple_of(8))
    );
    assert_eq!(
        draw_of_models(1, 7, &[Split::Columns, Split::Depth], &[1, 2, 4, 8]),
        all[..7]
    );
    // Llama 3 8B by 2: QKV has half the columns, and down half the depth.
    for (split, shape, other) in [
        (Split::Columns, [64, 3072, 4096], [64, 4096, 7168]),
        (Split::Depth, [64, 4096, 7168], [64, 3072, 4096]),
    ] {
        let drawn = draw_of_models(2, 10_000, &[split], &[2]);
        assert!(drawn.contains(&shape) && !drawn.contains(&other));
    }
}

#[test]
fn percentiles_are_values_and_the_geometric_mean_is_that_of_ratios() {
    let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
    for (share, expected) in [(0.5, 10.0), (0.95, 19.0), (1.0, 20.0)] {
        assert_eq!(percentile(&values, share), Some(expected), "{share}");
    }
    assert_eq!(percentile(&[3.0], 0.95), Some(3.0));
    assert_eq!(percentile(&[], 0.5), None);
    let mean = geometric_mean(&[0.5, 2.0, 8.0]).unwrap();
    assert!((mean - 2.0).abs() < 1e-12, "{mean}");
    assert_eq!(geometric_mean(&[]), None);
}

fn line(m: usize, alone: f64, baseline: Option<f64>, fused: f64) -> Line {
    let config = Config::new(
        TileShape::new(128, 224, 64).with_cluster(2, 1),
        Chunking::new(1).with_last(2).with_cut_last(true),
        Route::Push,
    );
    Line {
        shape: [m, 512, 1024],
        config,
        times: Times {
            alone: alone.into(),
            cublaslt: Time::Absent,
            fast: Time::Absent,
            baseline: baseline.into(),
            fused,
            ideal: Time::Taken(10.0),
            predicted: Time::Absent,
        },
    }
}

#[test]
fn a_summary_tells_few_rows_from_many_and_counts_what_is_lost() {
    let lines = [
        line(64, 8.0, Some(10.0), 20.0),
        line(65, 9.0, Some(40.0), 10.0),
        line(1024, 10.0, Some(20.0), 20.0),
    ];
    let summary = summary(&lines);
    let values = |name: &str| {
        let row = summary.iter().find(|(found, _)| found == name);
        row.map(|(_, values)| values.each_ref().map(String::as_str))
    };
    for (name, expected) in [
        ("shapes", ["1", "1", "1", "3"]),
        ("fused / baseline > 1.00", ["1", "0", "0", "1"]),
        (
            "fused / baseline, geometric mean",
            ["2.000", "0.250", "1.000", "0.794"],
        ),
        (
            "fused / baseline, worst",
            ["2.000", "0.250", "1.000", "2.000"],
        ),
        ("fused - alone, median, µs", ["12.0", "1.0", "10.0", "10.0"]),
    ] {
        assert_eq!(values(name), Some(expected), "{name}");
    }
    assert_eq!(values("alone / cuBLASLt, worst"), None);
    assert!(sweep::table(&summary).to_string().contains("M >= 1024"));
}

#[test]
fn what_cannot_be_timed_has_no_column_and_the_others_stand_below_their_titles() {
    for baseline in [None, Some(3.5)] {
        let line = line(7, 1.5, baseline, 2.0);
        let (head, row) = (sweep::head(&line.times), line.row(12));
        assert!(!head.contains("cuBLASLt"));
        assert_eq!(head.contains("baseline"), baseline.is_some());
        assert_eq!(head.chars().count(), row.chars().count(), "{head}\n{row}");
        assert!(row.contains("push 128×224 c2×1 s1 1/2+cut"), "{row}");
    }
}

#[test]
fn what_a_library_refuses_says_so_and_is_in_no_mean() {
    let mut lines = [
        line(64, 8.0, Some(10.0), 20.0),
        line(65, 9.0, Some(40.0), 10.0),
    ];
    let [taken, refused] = &mut lines;
    taken.times.cublaslt = Time::Taken(4.0);
    refused.times.cublaslt = Time::Refused;
    let [head, row] = [sweep::head(&taken.times), refused.row(1)];
    assert_eq!(row.matches("refused").count(), 2, "{row}");
    assert_eq!(head.chars().count(), row.chars().count(), "{head}\n{row}");
    let summary = summary(&lines);
    let mean = |(name, _): &&(String, _)| name == "alone / cuBLASLt, geometric mean";
    let (_, values) = summary.iter().find(mean).unwrap();
    assert_eq!(
        values.each_ref().map(String::as_str),
        ["2.000", "-", "-", "2.000"]
    );
}
