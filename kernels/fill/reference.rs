//! The definition of the filling, and the generator that sampling draws from too.

/// Four random words for a counter under a key: Philox4x32-10 of Salmon, Moraes, Dror & Shaw,
/// Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 3.3.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let low = u64::from(counter[0]) * 0xD251_1F53;
        let high = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The first `count` normal numbers of a seed.
pub fn fill_normal(count: usize, seed: u64, std: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(count.next_multiple_of(4));
    for counter in (0u32..).take(count.div_ceil(4)) {
        let words = philox4x32([counter, 0, 0, 1], [seed as u32, (seed >> 32) as u32]);
        for pair in words.chunks(2) {
            let unit = f64::from((pair[0] >> 8) + 1) / f64::from(1 << 24);
            let angle = f64::from(pair[1] >> 8) / f64::from(1 << 24) * std::f64::consts::TAU;
            let radius = f64::from(std) * (-2.0 * unit.ln()).sqrt();
            out.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        }
    }
    out.truncate(count);
    out
}
