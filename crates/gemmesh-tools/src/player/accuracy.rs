//! How far what is played is right: on one host, and on two GPUs as two hosts.

mod measured;

use std::fmt;

use super::*;
use crate::calibrate::{Sample, fit, median_error};
use measured::Measured;

/// Files of benches/results, without their ending: one, two and four H200s, models' layers and random shapes.
const FILES: [&str; 7] = [
    "h200-random",
    "h200x2",
    "h200x2-random",
    "h200x4",
    "h200x4-random",
    "h200x2-sums",
    "h200x2-random-sums",
];

fn measured() -> impl Iterator<Item = Measured> {
    FILES.into_iter().flat_map(measured::read)
}

fn problem_of(line: &Measured) -> Problem {
    let [m, n, k] = line.shape;
    let layout = Layout::balanced(m, k, line.world).unwrap();
    Problem::new(line.operation, DType::Bf16, layout, n)
}

/// Plays a line in the configuration in which it was measured. Returns by how much of the measured time it is off.
fn off(line: &Measured) -> f64 {
    let network = SimulatedNetwork {
        bytes: 1.0,
        latency: 0.0,
    };
    let played = play_configured(&problem_of(line), line.config, &network).unwrap();
    (played.micros / line.micros - 1.0).abs()
}

/// In ascending order.
struct Errors(Vec<f64>);

impl Errors {
    fn of(lines: impl Iterator<Item = Measured>) -> Errors {
        let mut errors: Vec<f64> = lines.map(|line| off(&line)).collect();
        errors.sort_by(f64::total_cmp);
        Errors(errors)
    }

    /// The error that this part of the lines does not exceed.
    fn at(&self, part: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * part) as usize]
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [median, most, worst] = [0.5, 0.9, 1.0].map(|part| 100.0 * self.at(part));
        let close = self.0.iter().filter(|error| **error <= 0.05).count();
        let (count, mean) = (self.0.len(), 100.0 * self.mean());
        write!(
            f,
            "{close} of {count} within 5 %; median {median:.1}, mean {mean:.1}, nine of ten {most:.1}, worst {worst:.1} %"
        )
    }
}

#[test]
fn half_of_what_was_measured_is_played_within_5_percent() {
    for operation in [
        Operation::MATMUL,
        Operation::ALL_GATHER_MATMUL,
        Operation::MATMUL_REDUCE_SCATTER,
        Operation::MATMUL_ALL_REDUCE,
    ] {
        for world in [1, 2, 4] {
            let errors =
                Errors::of(measured().filter(|l| (l.operation, l.world) == (operation, world)));
            if !errors.0.is_empty() {
                println!("{operation}, {world} GPUs: {errors}");
            }
        }
        let errors = Errors::of(measured().filter(|line| line.operation == operation));
        assert!(errors.at(0.5) < 0.05, "{operation}: {errors}");
        assert!(errors.at(1.0) < 0.3, "{operation}: {errors}");
    }
    let errors = Errors::of(measured());
    println!("all: {errors}");
    assert_eq!(errors.0.len(), 591);
    assert!(errors.at(0.5) < 0.042 && errors.at(0.9) < 0.14, "{errors}");
}

#[test]
fn prefills_of_models_are_played_within_5_percent_in_the_mean() {
    let cases: [(&[&str], usize); 2] = [(&["h200x2", "h200x4"], 18), (&["h200x2-sums"], 18)];
    for (files, count) in cases {
        let lines = files.iter().copied().flat_map(measured::read);
        let errors = Errors::of(lines.filter(|line| line.shape[0] >= 4096));
        println!("{files:?}, 4096 rows and more: {errors}");
        assert_eq!(errors.0.len(), count);
        assert!(errors.mean() < 0.05 && errors.at(1.0) < 0.15, "{errors}");
    }
}

/// The network's rate is that at which the line's collective moved its bytes, alone or, if that was faster, with the product:
/// it was at least as fast.
#[test]
fn two_hosts_are_played_within_5_percent_in_the_mean() {
    let mut errors = Vec::new();
    for line in measured::read("h200x2-hosts") {
        let problem = Problem {
            hosts: Hosts::of(&["a", "b"]).unwrap(),
            ..problem_of(&line)
        };
        let [m, n, k] = line.shape;
        // An all-reduce is a sum and a gather.
        let columns = match line.operation {
            Operation::ALL_GATHER_MATMUL => k,
            Operation::MATMUL_ALL_REDUCE => 2 * n,
            _ => n,
        };
        let network = SimulatedNetwork {
            bytes: (m / 2 * columns * 2) as f64 / line.alone.unwrap().min(line.micros),
            latency: 10.0,
        };
        let played = play_configured(&problem, line.config, &network).unwrap();
        println!(
            "{} {:?}: {:.0} {:.0}",
            line.operation, line.shape, line.micros, played.micros
        );
        errors.push((played.micros / line.micros - 1.0).abs());
    }
    errors.sort_by(f64::total_cmp);
    let errors = Errors(errors);
    println!("two hosts: {errors}");
    assert_eq!(errors.0.len(), 26);
    assert!(errors.mean() < 0.05 && errors.at(1.0) < 0.15, "{errors}");
}

#[test]
fn collectives_are_played_within_5_percent_in_the_mean() {
    let path = "../../benches/results/h200x2-collectives.json";
    let text = std::fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR")));
    let (text, mut errors) = (text.unwrap(), Vec::new());
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let operation = Operation::named(line["op"].as_str().unwrap()).unwrap();
        if !is_simulated(operation) {
            continue;
        }
        // Bytes are those of a rank's rows, or of the addend of an all-reduce.
        let ranks = if operation == Operation::ALL_REDUCE {
            1
        } else {
            2
        };
        let m = ranks * line["bytes"].as_u64().unwrap() as usize / 1024;
        let network = SimulatedNetwork {
            bytes: 1.0,
            latency: 0.0,
        };
        let played = play_operation(operation, [m, 0, 512], [1, 2], &network).unwrap();
        let found = line["us"].as_f64().unwrap();
        println!(
            "{operation} {}: {found:.1} {:.1}",
            line["bytes"], played.micros
        );
        errors.push((played.micros / found - 1.0).abs());
    }
    errors.sort_by(f64::total_cmp);
    let errors = Errors(errors);
    println!("collectives: {errors}");
    assert_eq!(errors.0.len(), 24);
    assert!(errors.mean() < 0.05 && errors.at(1.0) < 0.15, "{errors}");
}

/// The time that a line would have taken in a burst.
fn burst(line: &Measured) -> Sample {
    let problem = problem_of(line);
    let (mut less, mut more) = (line.micros / 2.0, line.micros);
    for _ in 0..32 {
        let middle = f64::midpoint(less, more);
        if middle * slower(&problem, middle) > line.micros {
            more = middle
        } else {
            less = middle
        }
    }
    Sample {
        gathers: line.operation == Operation::ALL_GATHER_MATMUL,
        problem,
        config: line.config,
        micros: less,
    }
}

#[test]
fn rates_that_are_fitted_to_half_of_the_results_are_right_for_the_other_half() {
    let lines = measured().filter(|line| !line.operation.sends_product());
    let samples: Vec<Sample> = lines.map(|line| burst(&line)).collect();
    // A shape may stand there twice, one line after the other.
    let half = |number: usize| {
        let pairs = samples.chunks(2).skip(number).step_by(2);
        pairs.flatten().cloned().collect::<Vec<_>>()
    };
    let (fitted, others) = (half(0), half(1));
    let rates = fit(&H200, &fitted);
    for (what, rates) in [("fitted", rates), ("timed", TIMED), ("that choose", H200)] {
        let [of_fitted, of_others] = [&fitted, &others].map(|of| median_error(&rates, of));
        println!("rates {what}: {of_fitted:.3} on one half, {of_others:.3} on the other");
    }
    assert!(median_error(&rates, &others) < 0.042);
    assert!(median_error(&TIMED, &samples) < 0.042);
    assert!(median_error(&H200, &samples) > 0.05);
}
