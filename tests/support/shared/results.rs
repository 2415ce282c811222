//! Every result is the one that it must be.

use gemmesh::{Builder, Config, Error, bf16};

use crate::support::numbers::{Reference, bits};
use crate::support::products::{Case, Placed, TRANSPORTS};
use crate::support::tested::{Tested, all_done, ranks};

/// 100 times: the fused product of one of `cases`, under delays that differ each time, has the bits of the product after
/// the gather.
#[track_caller]
pub fn fused_is_gather_then_matmul<B: Tested>(test: &str, world: usize, cases: &[Case]) {
    let ranks = ranks::<B>(test, world, |rank| {
        let workers = cases.iter().map(|case| case.workers).max();
        let builder = Builder::<B>::new()
            .timeout(B::TIMEOUT)
            .workers(workers.unwrap_or(0).max(1));
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let mut expected = Vec::new();
        let mut placed = Vec::new();
        for case in cases {
            let a = case.a::<bf16>();
            let (b, bias) = case.b::<bf16>(rank.rank);
            let mut matrices = Placed::new(&group, case, &a, &b, bias.as_deref())?;
            matrices.poison()?;
            matrices.gather_then_matmul(case.config)?;
            let (gathered, out) = matrices.read()?;
            assert_eq!(bits(&gathered), bits(&a), "{case:?}");
            let reference = Reference::new(&a, &b, bias.as_deref(), case.k);
            if let Err(what) = reference.check(&out) {
                panic!("rank {}, {case:?}: {what}", rank.rank);
            }
            expected.push((gathered, out));
            placed.push(matrices);
        }
        for seed in 0..100 {
            gemmesh::testing::delay_chunks(Some(seed));
            let index = seed as usize % cases.len();
            let (case, matrices) = (&cases[index], &mut placed[index]);
            let config = case.config.map(|config| Config {
                transport: TRANSPORTS[seed as usize / cases.len() % TRANSPORTS.len()],
                ..config
            });
            matrices.poison()?;
            matrices.fused(config)?;
            let (gathered, out) = matrices.read()?;
            let (all_rows, product) = &expected[index];
            assert_eq!(bits(&gathered), bits(all_rows), "seed {seed}, {case:?}");
            assert!(bits(&out) == bits(product), "seed {seed}, {case:?}");
        }
        gemmesh::testing::delay_chunks(None);
        Ok::<_, Error>("the same bits 100 times".into())
    });
    all_done(ranks);
}
