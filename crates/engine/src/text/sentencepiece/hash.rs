//! The hash of the vocabulary's tables, which are looked up at every character.

use std::hash::{BuildHasherDefault, Hasher};

/// Multiplicative hash (Knuth, The Art of Computer Programming 3, 6.4); keys come from the
/// model's own vocabulary, not from clients.
pub(super) type FastHash = BuildHasherDefault<Multiplicative>;

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Multiplicative(u64);

const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Multiplicative {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(FACTOR);
    }
}
