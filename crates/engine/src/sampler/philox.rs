//! A counter-based random generator: the same key and counter give the same numbers,
//! whatever was drawn before, elsewhere or beside.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror & Shaw, Parallel Random Numbers: As Easy as
//! 1, 2, 3, SC 2011, section 3.3.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const NUM_ROUNDS: u32 = 10;

/// Four random words for a counter under a key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..NUM_ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let low = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let high = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
    }
    counter
}

/// A number in [0, 1) with 53 random bits: the one that a request with this seed draws
/// for its output token at `position`.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let words = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with Random123 (kat_vectors).
    #[test]
    fn words_are_those_of_the_paper() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_fills_the_unit_interval_evenly() {
        const NUM_BINS: usize = 20;
        let mut counts = [0u32; NUM_BINS];
        for position in 0..20_000 {
            counts[(uniform(7, position) * NUM_BINS as f64) as usize] += 1;
        }
        // 1,000 expected a bin, standard deviation about 31: five of them.
        assert!(counts.iter().all(|count| count.abs_diff(1_000) < 155), "{counts:?}");
    }
}
