//! The sampler against plain definitions: full sorts and f64.

use proptest::prelude::*;

use super::filter::{Candidates, Filter};
use super::*;

/// More than two chunks, and no multiple of one.
const VOCAB: usize = 700;

/// Logits in about [-6, 6], different for every salt.
fn logits(salt: u64, vocab: usize) -> Vec<f32> {
    (0..vocab).map(|id| (philox::uniform(salt, id as u32) * 12.0 - 6.0) as f32).collect()
}

fn sample_one(logits: &[f32], sampling: &SamplingParams, position: u32) -> u32 {
    let task = Task::Choose { sampling, penalties: None, masked: &[], position };
    let sampled = Sampler::default().sample(&[SampleRow { logits, task, num_logprobs: None }]);
    sampled[0].as_ref().expect("finite").token
}

/// Ids in order of likelihood with their probabilities after all filters, by definition.
fn exact(logits: &[f32], sampling: &SamplingParams) -> Vec<(u32, f64)> {
    let scaled = |logit: f32| f64::from(logit) / f64::from(sampling.temperature);
    let max = logits.iter().map(|&logit| scaled(logit)).fold(f64::NEG_INFINITY, f64::max);
    let mut ids: Vec<(u32, f64)> = (0..).zip(logits).map(|(id, &logit)| (id, (scaled(logit) - max).exp())).collect();
    ids.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    ids.truncate(sampling.top_k.map_or(usize::MAX, |k| k as usize));
    let sum: f64 = ids.iter().map(|id| id.1).sum();
    let mut reached = 0.0;
    let num_kept = ids.iter().take_while(|id| {
        let is_kept = reached < f64::from(sampling.top_p) * sum;
        reached += id.1;
        is_kept
    });
    ids.truncate(num_kept.count().max(1));
    ids.retain(|id| id.1 >= f64::from(sampling.min_p));
    let sum: f64 = ids.iter().map(|id| id.1).sum();
    ids.iter().map(|&(id, weight)| (id, weight / sum)).collect()
}

/// Draws once per seed and compares how often each id came with its exact probability.
#[track_caller]
fn assert_frequencies(sampling: &SamplingParams) {
    const NUM_DRAWS: u32 = 8_000;
    let logits = logits(1, VOCAB);
    let mut counts = vec![0u32; VOCAB];
    for seed in 0..NUM_DRAWS {
        let sampling = SamplingParams { seed: u64::from(seed), ..sampling.clone() };
        counts[sample_one(&logits, &sampling, 3) as usize] += 1;
    }
    let mut probabilities = vec![0.0; VOCAB];
    exact(&logits, sampling).iter().for_each(|&(id, probability)| probabilities[id as usize] = probability);
    for (id, (&count, &probability)) in counts.iter().zip(&probabilities).enumerate() {
        let expected = probability * f64::from(NUM_DRAWS);
        // Five standard deviations, and a little for rare ids.
        let tolerance = 5.0 * (expected * (1.0 - probability)).sqrt() + 3.0 * f64::from(u8::from(probability > 0.0));
        let off = (f64::from(count) - expected).abs();
        assert!(off <= tolerance, "id {id} came {count} times, {expected:.1} expected");
    }
}

#[test]
fn ids_come_as_often_as_their_probability_says() {
    let plain = SamplingParams::default;
    assert_frequencies(&plain());
    assert_frequencies(&SamplingParams { temperature: 0.6, ..plain() });
    assert_frequencies(&SamplingParams { temperature: 1.7, top_k: Some(40), ..plain() });
    assert_frequencies(&SamplingParams { top_p: 0.8, ..plain() });
    assert_frequencies(&SamplingParams { min_p: 0.1, ..plain() });
    assert_frequencies(&SamplingParams { top_k: Some(50), top_p: 0.9, min_p: 0.05, ..plain() });
}

#[test]
fn different_positions_draw_different_numbers() {
    let logits = vec![0.0; VOCAB];
    let tokens: Vec<u32> = (0..20).map(|position| sample_one(&logits, &SamplingParams::default(), position)).collect();
    let distinct: std::collections::HashSet<_> = tokens.iter().collect();
    assert!(distinct.len() > 15, "{tokens:?}");
}

/// Field report 7: vllm#1623, aici#19. At T or top_p = 1e-4 the choice is the likeliest token.
#[test]
fn tiny_temperature_or_top_p_is_greedy() {
    let logits: Vec<f32> = logits(2, VOCAB).iter().map(|logit| logit * 1e4).collect();
    let greedy = sample_one(&logits, &SamplingParams { temperature: 0.0, ..Default::default() }, 0);
    for seed in 0..50 {
        let cold = SamplingParams { temperature: 1e-4, seed, ..Default::default() };
        assert_eq!(sample_one(&logits, &cold, 0), greedy);
        assert_eq!(sample_one(&logits, &SamplingParams { top_k: Some(5), ..cold }, 0), greedy);
        let narrow = SamplingParams { top_p: 1e-4, seed, ..Default::default() };
        assert_eq!(sample_one(&logits, &narrow, 0), greedy);
    }
}

/// Field report 6: sendnn-inference#542. Greedy and top-k rows in one step each get their own.
#[test]
fn huge_top_k_clamps_beside_other_rows() {
    let logits = logits(3, VOCAB);
    let all: Vec<SamplingParams> = [
        SamplingParams { temperature: 0.0, ..Default::default() },
        SamplingParams { top_k: Some(9_999_999), seed: 4, ..Default::default() },
        SamplingParams { top_k: Some(1), seed: 5, ..Default::default() },
        SamplingParams { seed: 4, ..Default::default() },
    ]
    .to_vec();
    let rows: Vec<SampleRow<'_>> = all
        .iter()
        .map(|sampling| {
            let task = Task::Choose { sampling, penalties: None, masked: &[], position: 0 };
            SampleRow { logits: &logits, task, num_logprobs: None }
        })
        .collect();
    let tokens: Vec<u32> = Sampler::default().sample(&rows).into_iter().map(|row| row.expect("finite").token).collect();
    for (sampling, &token) in all.iter().zip(&tokens) {
        assert_eq!(sample_one(&logits, sampling, 0), token);
    }
    assert_eq!(tokens[1], tokens[3], "a clamped top_k keeps everything");
    assert_eq!(tokens[0], tokens[2], "top_k = 1 is greedy");
}

/// Field report 24, and 11: rows go to several threads once there is enough to do.
#[test]
fn row_beside_others_equals_row_alone() {
    let vocab = 1 << 18;
    let many: Vec<Vec<f32>> = (0..5).map(|salt| logits(10 + salt, vocab)).collect();
    let kinds = [
        SamplingParams { temperature: 0.0, ..Default::default() },
        SamplingParams { seed: 1, ..Default::default() },
        SamplingParams { seed: 2, top_p: 0.95, ..Default::default() },
        SamplingParams { seed: 3, top_k: Some(64), top_p: 0.9, ..Default::default() },
        SamplingParams { seed: 4, min_p: 0.02, ..Default::default() },
    ];
    let row = |index: usize| SampleRow {
        logits: &many[index],
        task: Task::Choose { sampling: &kinds[index], penalties: None, masked: &[], position: 7 },
        num_logprobs: Some(20),
    };
    let rows: Vec<SampleRow<'_>> = (0..5).map(row).collect();
    assert!(rows.len() * vocab >= PARALLEL_MIN);
    let together = Sampler::default().sample(&rows);
    for (index, result) in together.iter().enumerate() {
        assert_eq!(&Sampler::default().sample(&[row(index)])[0], result);
    }
}

/// Field report 53: vllm#14126, Qwen3#761. A NaN is an error of its row alone.
#[test]
fn nan_fails_its_row_alone() {
    let good = logits(6, VOCAB);
    let mut bad = good.clone();
    bad[VOCAB - 1] = f32::NAN;
    let sampling = SamplingParams::default();
    let row = |logits| SampleRow {
        logits,
        task: Task::Choose { sampling: &sampling, penalties: None, masked: &[], position: 0 },
        num_logprobs: None,
    };
    let results = Sampler::default().sample(&[row(&good), row(&bad), row(&good)]);
    assert_eq!(results[1], Err(NotFinite));
    assert!(results[0].is_ok());
    assert_eq!(results[0], results[2]);
}

/// Field report 20: the chosen token is always in the list, or beside it with its rank.
#[test]
fn logprobs_agree_with_log_softmax() {
    let mut logits = logits(7, VOCAB);
    logits[5] = f32::NEG_INFINITY;
    let log_sum = logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
    let mut order: Vec<u32> = (0..VOCAB as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    for token in [0, 5, 699, order[0], order[3]] {
        let row = SampleRow { logits: &logits, task: Task::Score(token), num_logprobs: Some(4) };
        let sampled = Sampler::default().sample(&[row]).remove(0).expect("finite");
        let TokenLogprobs { chosen, top } = sampled.logprobs.expect("asked for");
        assert_eq!(chosen.token, token);
        assert_eq!(order[chosen.rank as usize - 1], token, "rank");
        let ids: Vec<u32> = top.iter().map(|entry| entry.token).collect();
        assert_eq!(ids, order[..4]);
        for entry in top.iter().chain([&chosen]) {
            let want = f64::from(logits[entry.token as usize]) - log_sum;
            assert!(
                entry.logprob == want as f32 || (f64::from(entry.logprob) - want).abs() < 2e-6,
                "{entry:?}, not {want}"
            );
        }
    }
}

#[test]
fn penalties_bias_and_mask_change_the_choice() {
    let logits = [1.0, 3.0, 2.0, -1.0];
    let choose = |sampling: &SamplingParams, used: &[u32], masked: &[u32]| {
        let mut penalties = Penalties::new(sampling, &[2]);
        used.iter().for_each(|&token| penalties.iter_mut().for_each(|penalties| penalties.count(token)));
        let task = Task::Choose { sampling, penalties: penalties.as_ref(), masked, position: 0 };
        let row = SampleRow { logits: &logits, task, num_logprobs: Some(1) };
        let sampled = Sampler::default().sample(&[row]).remove(0).expect("finite");
        assert_eq!(sampled.logprobs.expect("asked for").top[0].token, 1, "logprobs are the raw ones");
        sampled.token
    };
    let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
    assert_eq!(choose(&greedy, &[], &[]), 1);
    assert_eq!(choose(&greedy, &[], &[1]), 2);
    assert_eq!(choose(&SamplingParams { presence_penalty: 1.5, ..greedy.clone() }, &[1], &[]), 2);
    assert_eq!(choose(&SamplingParams { frequency_penalty: 0.4, ..greedy.clone() }, &[1], &[]), 1);
    assert_eq!(choose(&SamplingParams { frequency_penalty: 0.4, ..greedy.clone() }, &[1, 1, 1], &[]), 2);
    // Of prompt token 2 too: 3 / 2 and 2 / 2 both fall, the former to above 1.
    assert_eq!(choose(&SamplingParams { repetition_penalty: 2.0, ..greedy.clone() }, &[1], &[]), 1);
    assert_eq!(choose(&SamplingParams { repetition_penalty: 4.0, ..greedy.clone() }, &[1], &[]), 0);
    assert_eq!(choose(&SamplingParams { logit_bias: vec![(3, 5.0)], ..greedy.clone() }, &[], &[]), 3);
    assert_eq!(choose(&SamplingParams { logit_bias: vec![(1, -100.0)], ..greedy }, &[], &[]), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The first and last ids that can be picked are the first and last of the exact kept set.
    #[test]
    fn filters_keep_exactly_what_their_definition_says(
        values in prop::collection::vec(-40i32..40, 1..600),
        top_k in prop::option::of(1usize..50),
        top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.9],
        temperature in 0.2f32..3.0,
    ) {
        let logits: Vec<f32> = values.iter().map(|&value| value as f32 * 0.173).collect();
        let top_k = top_k.filter(|&k| k < logits.len());
        prop_assume!(top_k.is_some() || top_p < 1.0 || min_p > 0.0);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut maxima = Vec::new();
        reduce::chunk_maxima(&logits, &mut maxima);
        let filter = Filter { top_k, top_p, min_p, max, scale: 1.0 / temperature };
        let pick = |random| Candidates::default().pick(&logits, &maxima, &mut Vec::new(), &filter, random);
        let params = |top_p: f32, min_p: f32| SamplingParams {
            temperature, top_k: top_k.map(|k| k as u32), top_p, min_p, ..Default::default()
        };
        // Rounding may move the edge of the kept set by one id: a little narrower and wider filters frame it.
        let ids = |params: &SamplingParams| -> Vec<u32> { exact(&logits, params).iter().map(|id| id.0).collect() };
        let narrow = ids(&params(top_p * (1.0 - 1e-5), min_p * (1.0 + 1e-5)));
        let wide = ids(&params((top_p * (1.0 + 1e-5)).min(1.0), min_p * (1.0 - 1e-5)));
        for random in [0.0, 0.3, 0.7, 1.0 - 1e-9] {
            let picked = pick(random);
            prop_assert!(wide.contains(&picked), "{picked} is not among {wide:?}");
        }
        // What rounding cannot touch is reached from both ends.
        if narrow.len() == wide.len() {
            prop_assert_eq!(pick(0.0), *narrow.iter().min().expect("one is kept"));
            prop_assert_eq!(pick(1.0 - 1e-12), *narrow.iter().max().expect("one is kept"));
        }
    }
}
