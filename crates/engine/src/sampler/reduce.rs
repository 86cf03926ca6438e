//! Passes over a row of logits that the compiler turns into vector code.
//!
//! A row is cut into chunks of [`CHUNK`] ids. Each pass has a fixed number of lanes
//! and a fixed order of sums, so its result is the same on every machine.

/// Ids in a chunk.
pub(super) const CHUNK: usize = 256;
const LANES: usize = 16;

/// The largest logit of each chunk into `maxima`, and of the row. `None` when the row
/// has a NaN, or no finite largest logit.
pub(super) fn chunk_maxima(logits: &[f32], maxima: &mut Vec<f32>) -> Option<f32> {
    maxima.clear();
    let mut is_nan = false;
    for chunk in logits.chunks(CHUNK) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut nans = [0u32; LANES];
        let (groups, rest) = chunk.as_chunks::<LANES>();
        for group in groups {
            for lane in 0..LANES {
                lanes[lane] = if group[lane] > lanes[lane] { group[lane] } else { lanes[lane] };
                nans[lane] |= u32::from(group[lane].is_nan());
            }
        }
        let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
        is_nan |= nans.iter().any(|&nan| nan != 0) || rest.iter().any(|logit| logit.is_nan());
        maxima.push(max);
    }
    let max = maxima.iter().fold(f32::NEG_INFINITY, |max, &chunk| if chunk > max { chunk } else { max });
    (!is_nan && max.is_finite()).then_some(max)
}

/// The lowest id with the largest logit.
pub(super) fn argmax(logits: &[f32], maxima: &[f32], max: f32) -> u32 {
    let chunk = maxima.iter().position(|&chunk| chunk == max).expect("the largest logit is in a chunk") * CHUNK;
    let within = logits[chunk..].iter().position(|&logit| logit == max).expect("the chunk has its largest logit");
    u32::try_from(chunk + within).expect("ids are u32")
}

/// The sum of `exp((logit - max) * scale)` over each chunk into `sums`, and over the row.
pub(super) fn sum_weights(logits: &[f32], max: f32, scale: f32, sums: &mut Vec<f64>) -> f64 {
    sums.clear();
    for chunk in logits.chunks(CHUNK) {
        let mut lanes = [0f32; LANES];
        let (groups, rest) = chunk.as_chunks::<LANES>();
        for group in groups {
            for lane in 0..LANES {
                lanes[lane] += weight(group[lane], max, scale);
            }
        }
        let whole: f64 = lanes.iter().map(|&lane| f64::from(lane)).sum();
        let part: f64 = rest.iter().map(|&logit| f64::from(weight(logit, max, scale))).sum();
        sums.push(whole + part);
    }
    sums.iter().sum()
}

/// Logits greater than `logit`, and equal ones of ids below `id`.
pub(super) fn num_before(logits: &[f32], logit: f32, id: u32) -> u32 {
    let mut num_greater = 0;
    for chunk in logits.chunks(CHUNK) {
        num_greater += chunk.iter().map(|&other| u32::from(other > logit)).sum::<u32>();
    }
    num_greater + logits[..id as usize].iter().map(|&other| u32::from(other == logit)).sum::<u32>()
}

/// `exp((logit - max) * scale)`: 1 for the largest logit, 0 for one far below.
#[inline]
pub(super) fn weight(logit: f32, max: f32, scale: f32) -> f32 {
    exp_of_negative((logit - max) * scale)
}

/// e^x for x ≤ 0, to about 1e-7 of its value; 0 below -87, where f32 runs out.
///
/// x = n ln 2 + r with |r| ≤ ln 2 / 2; e^r by the polynomial of the Cephes library (Moshier 1992, expf).
/// Cody and Waite's two-part ln 2 keeps r exact.
#[inline]
fn exp_of_negative(x: f32) -> f32 {
    /// Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.987_569_1e-4_f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let e = p * r * r + r + 1.0;
    let power = f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { e * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_library() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1_000.0;
            let (got, want) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 2e-7 * want, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(-88.0), 0.0);
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn maxima_see_every_id_and_every_nan() {
        for len in [1, 15, 16, 17, 255, 256, 257, 1_000] {
            for at in [0, len / 2, len - 1] {
                let mut logits = vec![-3.0f32; len];
                logits[at] = 5.0;
                let mut maxima = Vec::new();
                assert_eq!(chunk_maxima(&logits, &mut maxima), Some(5.0));
                assert_eq!(argmax(&logits, &maxima, 5.0), at as u32);
                logits[at] = f32::NAN;
                assert_eq!(chunk_maxima(&logits, &mut maxima), None, "NaN at {at} of {len}");
            }
        }
        assert_eq!(chunk_maxima(&[f32::NEG_INFINITY; 40], &mut Vec::new()), None);
        assert_eq!(chunk_maxima(&[f32::INFINITY; 40], &mut Vec::new()), None);
    }

    #[test]
    fn first_of_equal_logits_wins() {
        let logits = vec![1.0f32; 600];
        let mut maxima = Vec::new();
        let max = chunk_maxima(&logits, &mut maxima).expect("finite");
        assert_eq!(argmax(&logits, &maxima, max), 0);
        assert_eq!(num_before(&logits, 1.0, 599), 599);
        assert_eq!(num_before(&logits, 1.0, 0), 0);
    }
}
