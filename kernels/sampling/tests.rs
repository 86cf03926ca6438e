//! The reference by hand; the device against the reference.

use super::reference::*;
use super::*;
use crate::compile::Dtype;
use crate::memory::Buffer;
use crate::testing::{Bed, Guarded, bed};

fn plain() -> SampleParams {
    SampleParams { temperature: 1.0, top_p: 1.0, repetition_penalty: 1.0, ..SampleParams::default() }
}

#[test]
fn filters_apply_in_their_order_and_ties_keep_lower_ids() {
    let logits = [4f32, 2.0, 1.0, 2.0, 1.0].map(f32::ln);
    let kept = |params: SampleParams| -> Vec<usize> {
        let weights = weights(&logits, &params);
        (0..5).filter(|&id| weights[id] > 0.0).collect()
    };
    assert_eq!(kept(plain()), [0, 1, 2, 3, 4]);
    assert_eq!(kept(SampleParams { top_k: 2, ..plain() }), [0, 1]);
    assert_eq!(kept(SampleParams { top_p: 0.65, ..plain() }), [0, 1, 3]);
    assert_eq!(kept(SampleParams { top_p: 1e-4, ..plain() }), [0]);
    assert_eq!(kept(SampleParams { min_p: 0.49, ..plain() }), [0, 1, 3]);
    // Of the three likeliest, 4 + 2 + 2, three quarters are two.
    assert_eq!(kept(SampleParams { top_k: 3, top_p: 0.74, ..plain() }), [0, 1]);
}

#[test]
fn rows_are_greedy_scored_adjusted_or_broken() {
    let logits = [1.0, 3.0, 2.0, -1.0];
    let greedy = SampleParams { temperature: 0.0, frequency_penalty: 0.4, repetition_penalty: 2.0, ..plain() };
    let penalized = |id, num_output| Adjustment { id, use_: USE_PENALIZED | num_output, bias: 0.0 };
    assert_eq!(sample(&logits, &greedy, &[]), Some(1));
    assert_eq!(sample(&logits, &greedy, &[penalized(1, 0)]), Some(2));
    assert_eq!(sample(&logits, &greedy, &[penalized(1, 2), penalized(2, 1)]), Some(0));
    assert_eq!(sample(&logits, &greedy, &[Adjustment { id: 3, use_: 0, bias: 4.5 }]), Some(3));
    assert_eq!(sample(&logits, &greedy, &[Adjustment { id: 1, use_: USE_MASKED, bias: 9.0 }]), Some(2));
    assert_eq!(sample(&logits, &SampleParams { flags: FLAG_SCORE, score_token: 3, ..greedy }, &[]), Some(3));
    assert_eq!(sample(&[1.0, f32::NAN], &greedy, &[]), None);
    assert_eq!(sample(&[f32::NEG_INFINITY; 3], &greedy, &[]), None);
    assert_eq!(sample(&[0.0, 1.0], &greedy, &[0, 1].map(|id| Adjustment { id, use_: USE_MASKED, bias: 0.0 })), None);
}

#[test]
fn ids_come_as_often_as_their_weights_say() {
    let logits = [0.0, 1.0, -1.0, 0.5];
    let params = SampleParams { temperature: 0.7, top_k: 3, ..plain() };
    let weights = weights(&logits, &params);
    let mut counts = [0u32; 4];
    for seed in 0..20_000 {
        counts[sample(&logits, &SampleParams { seed, ..params }, &[]).expect("sound") as usize] += 1;
    }
    for (count, weight) in counts.into_iter().zip(&weights) {
        let share = weight / weights.iter().sum::<f64>();
        let off = (f64::from(count) - 20_000.0 * share).abs();
        assert!(off <= 5.0 * (20_000.0 * share * (1.0 - share)).sqrt(), "{counts:?} for {weights:?}");
    }
}

/// Rows of logits on the device, with outputs.
struct Case {
    vocab: usize,
    stride: usize,
    logits: Vec<Vec<f32>>,
    params: Vec<SampleParams>,
    adjustments: Vec<Vec<Adjustment>>,
}

/// What came back.
#[derive(Debug)]
struct Results {
    tokens: Vec<u32>,
    status: Vec<u32>,
    chosen_logprobs: Vec<f32>,
    chosen_ranks: Vec<u32>,
    top_ids: Vec<u32>,
    top_logprobs: Vec<f32>,
}

fn run(bed: &Bed, case: &Case) -> Results {
    let num = case.logits.len();
    // What lies beyond the vocabulary must not matter.
    let mut logits = vec![f32::NAN; num * case.stride];
    let mut adjustments = vec![Adjustment::default()];
    let mut params = case.params.clone();
    for row in 0..num {
        logits[row * case.stride..][..case.vocab].copy_from_slice(&case.logits[row]);
        params[row].adjustments_start = adjustments.len() as u32;
        params[row].num_adjustments = case.adjustments[row].len() as u32;
        adjustments.extend(&case.adjustments[row]);
    }
    let (logits, params, adjustments) = (bed.upload_half(&logits), bed.upload(&params), bed.upload(&adjustments));
    let bytes = workspace_bytes(num as u32, case.vocab as u32) as usize;
    let workspace = Buffer::<u8>::new(&bed.device, "workspace", bytes).expect("room");
    let tops = num * TOP_MAX as usize;
    let (tokens, status, ranks, ids): (Guarded<u32>, Guarded<u32>, Guarded<u32>, Guarded<u32>) =
        (bed.poisoned(num), bed.poisoned(num), bed.poisoned(num), bed.poisoned(tops));
    let (chosen, top): (Guarded<f32>, Guarded<f32>) = (bed.poisoned(num), bed.poisoned(tops));
    let outputs = Outputs {
        tokens: tokens.slice(),
        status: status.slice(),
        chosen_logprobs: chosen.slice(),
        chosen_ranks: ranks.slice(),
        top_ids: ids.slice(),
        top_logprobs: top.slice(),
    };
    let rows = Rows {
        num_rows: num as u32,
        row_stride: case.stride as u32,
        vocab_size: case.vocab as u32,
        is_filtered: true,
        has_logprobs: true,
    };
    let sampling = Sampling::load(&bed.modules).expect("loaded");
    sampling
        .run(&bed.stream, &outputs, logits.slice(), params.slice(), adjustments.slice(), workspace.slice(), rows)
        .expect("ran");
    Results {
        tokens: bed.download(&tokens),
        status: bed.download(&status),
        chosen_logprobs: bed.download(&chosen),
        chosen_ranks: bed.download(&ranks),
        top_ids: bed.download(&ids),
        top_logprobs: bed.download(&top),
    }
}

/// Rows of every kind of logits under every kind of params.
fn mixed(bed: &Bed, vocab: usize, num: usize) -> Case {
    let random = |salt: usize, id: usize| uniform(salt as u64, id as u32) as f32;
    let row = |row: usize| -> Vec<f32> {
        let value = |id: usize| match row % 5 {
            0 => random(row, id) * 12.0 - 6.0,
            1 => (random(row, id) * 4.0).floor(),
            2 => 1.5,
            3 => {
                if random(row, id) < 0.5 {
                    f32::NEG_INFINITY
                } else {
                    random(row + 1, id) * 3.0
                }
            }
            _ => random(row, id).powi(12) * 30.0,
        };
        (0..vocab).map(|id| bed.to_number(bed.to_bits(value(id)))).collect()
    };
    let pick =
        |row: usize, salt: usize, from: &[f32]| from[(random(salt * 1000 + 7, row) * from.len() as f32) as usize];
    let params = |row: usize| SampleParams {
        seed: row as u64 * 77 + 5,
        position: row as u32,
        temperature: pick(row, 1, &[0.0, 0.3, 1.0, 1.0, 2.0]),
        top_k: pick(row, 2, &[0.0, 0.0, 1.0, 40.0, 5000.0]) as u32,
        top_p: pick(row, 3, &[1.0, 1.0, 1e-4, 0.5, 0.95]),
        min_p: pick(row, 4, &[0.0, 0.0, 0.05]),
        presence_penalty: 0.7,
        frequency_penalty: 0.3,
        repetition_penalty: 1.3,
        ..SampleParams::default()
    };
    let adjustments = |row: usize| -> Vec<Adjustment> {
        let ids = (0..vocab as u32).filter(|&id| row.is_multiple_of(3) && random(row + 900, id as usize) < 0.05);
        let use_of = |id: u32| if id.is_multiple_of(7) { USE_MASKED } else { USE_PENALIZED | (id % 3) };
        ids.map(|id| Adjustment { id, use_: use_of(id), bias: (id % 5) as f32 * 0.25 }).collect()
    };
    Case {
        vocab,
        stride: (vocab + 8).next_multiple_of(8),
        logits: (0..num).map(row).collect(),
        params: (0..num).map(params).collect(),
        adjustments: (0..num).map(adjustments).collect(),
    }
}

/// Whether `token` is the reference's choice, or rounding alone makes the difference.
fn is_choice(logits: &[f32], params: &SampleParams, adjustments: &[Adjustment], token: u32) -> bool {
    let adjusted = adjusted(logits, params, adjustments);
    if params.temperature < 1e-5 {
        return ranking(&adjusted)[0] == token;
    }
    let edges = [1.0, 1.0 + 1e-6, 1.0 - 1e-6];
    edges.iter().any(|edge| {
        let params = SampleParams { top_p: (params.top_p * edge).min(1.0), min_p: params.min_p / edge, ..*params };
        let weights = weights(&adjusted, &params);
        let sum: f64 = weights.iter().sum();
        let target = uniform(params.seed, params.position) * sum;
        let before: f64 = weights[..token as usize].iter().sum();
        let weight = weights[token as usize];
        weight > 0.0 && before - 3e-6 * sum <= target && target <= before + weight + 3e-6 * sum
    })
}

#[test]
fn device_choices_equal_the_reference_within_rounding() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("device_choices_equal_the_reference_within_rounding", dtype) else { return };
        for (vocab, num) in [(5, 40), (1000, 60), (1025, 30), (151_936, 20)] {
            let case = mixed(&bed, vocab, num);
            let results = run(&bed, &case);
            for row in 0..num {
                let (logits, params, adjustments) = (&case.logits[row], &case.params[row], &case.adjustments[row]);
                let what = format!("row {row} of {vocab} ids: {params:?}");
                let Some(want) = sample(logits, params, adjustments) else {
                    assert_eq!(results.status[row], STATUS_NOT_FINITE, "{what}");
                    continue;
                };
                assert_eq!(results.status[row], STATUS_OK, "{what}");
                let token = results.tokens[row];
                assert!((token as usize) < vocab, "{what}: {token}");
                assert!(token == want || is_choice(logits, params, adjustments, token), "{what}: {token}, not {want}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    let Some(bed) = bed("a_row_does_not_depend_on_the_rows_beside_it", Dtype::F16) else { return };
    // More rows than get a whole SM each: the other CTA size.
    let many = mixed(&bed, 3000, 150);
    let together = run(&bed, &many);
    let again = run(&bed, &many);
    assert_eq!((again.tokens, again.status), (together.tokens.clone(), together.status.clone()), "twice the same");
    for row in (0..150).step_by(13) {
        let alone = Case {
            logits: vec![many.logits[row].clone()],
            params: vec![many.params[row]],
            adjustments: vec![many.adjustments[row].clone()],
            ..many
        };
        let alone = run(&bed, &alone);
        assert_eq!((alone.tokens[0], alone.status[0]), (together.tokens[row], together.status[row]), "row {row}");
    }
}

#[test]
fn a_broken_row_fails_alone() {
    let Some(bed) = bed("a_broken_row_fails_alone", Dtype::F16) else { return };
    for params in [SampleParams { temperature: 0.0, ..plain() }, plain(), SampleParams { top_p: 0.9, ..plain() }] {
        let good: Vec<f32> = (0..2050).map(|id| bed.to_number(bed.to_bits(uniform(1, id) as f32))).collect();
        let mut logits = vec![good; 5];
        logits[1][2049] = f32::NAN;
        logits[2][0] = f32::INFINITY;
        logits[3].fill(f32::NEG_INFINITY);
        let case = Case { vocab: 2050, stride: 2056, logits, params: vec![params; 5], adjustments: vec![vec![]; 5] };
        let results = run(&bed, &case);
        assert_eq!(results.status, [0, 1, 1, 1, 0]);
        assert_eq!(results.tokens[1..4], [0; 3], "an id that can be looked up");
        assert_eq!(results.tokens[0], results.tokens[4]);
    }
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some(bed) = bed("logprobs_are_those_of_the_raw_logits", dtype) else { return };
        for vocab in [5, 3000] {
            let mut case = mixed(&bed, vocab, 25);
            for (row, params) in case.params.iter_mut().enumerate() {
                let score = if row % 2 == 0 { FLAG_SCORE } else { 0 };
                params.flags = FLAG_LOGPROBS | score;
                params.score_token = row as u32 % vocab as u32;
                params.num_logprobs = [0, 1, 20][row % 3];
            }
            let results = run(&bed, &case);
            for row in (0..25).filter(|&row| results.status[row] == STATUS_OK) {
                let (logits, token) = (&case.logits[row], results.tokens[row]);
                let (ranking, logprobs) = (ranking(logits), logprobs(logits));
                let near = |got: f32, want: f32| got == want || (got - want).abs() <= 1e-5 * want.abs().max(1.0);
                assert!(near(results.chosen_logprobs[row], logprobs[token as usize]), "row {row} of {vocab}");
                assert_eq!(ranking[results.chosen_ranks[row] as usize - 1], token, "rank in row {row} of {vocab}");
                let num = (case.params[row].num_logprobs as usize).min(vocab);
                let at = row * TOP_MAX as usize;
                assert_eq!(results.top_ids[at..][..num], ranking[..num], "row {row} of {vocab}");
                for (&id, &got) in ranking.iter().zip(&results.top_logprobs[at..][..num]) {
                    assert!(near(got, logprobs[id as usize]), "{got} of id {id} in row {row} of {vocab}");
                }
            }
        }
    }
}
