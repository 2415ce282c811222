//! Continuous batching: which tokens each step has.

use std::collections::VecDeque;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The most requests that are decoded together.
const RUNNING: usize = 64;

/// The tokens of one step: those of prompts, or one of each running request.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub tokens: usize,
    pub decodes: bool,
}

struct Request {
    prompt: usize,
    /// Tokens that are still to be decoded.
    left: usize,
}

/// Random requests, the same on every rank.
pub struct Batching {
    random: SmallRng,
    capacity: usize,
    waiting: VecDeque<Request>,
    running: Vec<Request>,
}

impl Batching {
    pub fn new(capacity: usize) -> Batching {
        Batching {
            random: SmallRng::seed_from_u64(11),
            capacity,
            waiting: VecDeque::new(),
            running: Vec::new(),
        }
    }

    /// A request comes in one step of six.
    fn arrive(&mut self) {
        if self.random.random_range(0..6) == 0 {
            self.waiting.push_back(Request {
                prompt: self.random.random_range(1..=(self.capacity / 2).max(1)),
                left: self.random.random_range(1..96),
            });
        }
    }
}

impl Iterator for Batching {
    type Item = Step;

    /// As many prompts as fit come first.
    fn next(&mut self) -> Option<Step> {
        self.arrive();
        while self.waiting.is_empty() && self.running.is_empty() {
            self.arrive();
        }
        let mut tokens = 0;
        while let Some(request) = self.waiting.front() {
            let fits = tokens + request.prompt <= self.capacity
                && self.running.len() < RUNNING.min(self.capacity);
            if !fits {
                break;
            }
            tokens += request.prompt;
            self.running.extend(self.waiting.pop_front());
        }
        if tokens > 0 {
            return Some(Step {
                tokens,
                decodes: false,
            });
        }
        let tokens = self.running.len();
        self.running
            .iter_mut()
            .for_each(|request| request.left -= 1);
        self.running.retain(|request| request.left > 0);
        Some(Step {
            tokens,
            decodes: true,
        })
    }
}
