//! The names of blocks in the prefix cache.

/// Names the content of a full block and of everything before it: a 128-bit hash of
/// (previous hash, tokens).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChainHash(u64, u64);

impl ChainHash {
    /// The hash of a block with these tokens after the blocks that `self` names.
    /// `ChainHash::default()` names the empty prefix.
    pub fn then(self, tokens: &[u32]) -> Self {
        let (mut a, mut b) = (self.0 ^ 0x9E37_79B9_7F4A_7C15, self.1 ^ 0xD1B5_4A32_D192_ED03);
        for &token in tokens {
            let token = u64::from(token);
            a = fold(a ^ token, 0xA076_1D64_78BD_642F);
            b = fold(b.wrapping_add(token), 0xE703_7ED1_A0B4_28DB);
        }
        Self(fold(a ^ tokens.len() as u64, 0x8EBC_6AF0_9C88_C6E3), fold(b ^ a, 0x5899_65CC_7537_4CC3))
    }
}

/// Both halves of the 128-bit product, folded.
fn fold(x: u64, y: u64) -> u64 {
    let product = u128::from(x) * u128::from(y);
    (product as u64) ^ ((product >> 64) as u64) ^ x.rotate_left(32)
}
