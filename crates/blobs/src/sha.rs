//! SHA-256 whose state can be saved and gone on from, so that an intake that was
//! killed need not read again what it has hashed.
//!
//! The compression function is the `sha2` crate's; this file holds the padding of
//! FIPS 180-4, section 5.1.1.

use serde::{Deserialize, Serialize};
use sha2::digest::core_api::Block;

const BLOCK: usize = 64;
const START: [u32; 8] =
    [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];

/// A SHA-256 in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sha256 {
    state: [u32; 8],
    num_bytes: u64,
    /// Bytes of the block that is not full yet; shorter than a block.
    tail: Vec<u8>,
}

impl Default for Sha256 {
    fn default() -> Self {
        Self { state: START, num_bytes: 0, tail: Vec::with_capacity(BLOCK) }
    }
}

impl Sha256 {
    /// The hash of one slice.
    pub fn of(bytes: &[u8]) -> [u8; 32] {
        let mut sha = Self::default();
        sha.update(bytes);
        sha.finish()
    }

    /// How many bytes went in.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Takes more bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.num_bytes += bytes.len() as u64;
        if !self.tail.is_empty() {
            let take = bytes.len().min(BLOCK - self.tail.len());
            self.tail.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.tail.len() < BLOCK {
                return;
            }
            let block = std::mem::take(&mut self.tail);
            self.compress(&block);
            self.tail = block;
            self.tail.clear();
        }
        let whole = bytes.len() / BLOCK * BLOCK;
        self.compress(&bytes[..whole]);
        self.tail.extend_from_slice(&bytes[whole..]);
    }

    /// The hash of all bytes taken.
    pub fn finish(mut self) -> [u8; 32] {
        let num_bits = self.num_bytes.wrapping_mul(8);
        let mut end = std::mem::take(&mut self.tail);
        end.push(0x80);
        while end.len() % BLOCK != BLOCK - 8 {
            end.push(0);
        }
        end.extend_from_slice(&num_bits.to_be_bytes());
        self.compress(&end);
        let mut out = [0; 32];
        for (word, bytes) in self.state.iter().zip(out.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        out
    }

    fn compress(&mut self, blocks: &[u8]) {
        for block in blocks.chunks_exact(BLOCK) {
            let block: [u8; BLOCK] = block.try_into().expect("chunks of a block's size");
            sha2::compress256(&mut self.state, &[Block::<sha2::Sha256>::from(block)]);
        }
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_state_goes_on_to_the_same_hash_at_every_length() {
        use sha2::Digest;
        let bytes: Vec<u8> = (0..400u32).map(|i| (i * 7) as u8).collect();
        for len in 0..bytes.len() {
            let (first, second) = bytes[..len].split_at(len / 3);
            let mut sha = Sha256::default();
            sha.update(first);
            let saved = serde_json::to_string(&sha).unwrap();
            let mut sha: Sha256 = serde_json::from_str(&saved).unwrap();
            sha.update(second);
            assert_eq!(sha.finish(), <[u8; 32]>::from(sha2::Sha256::digest(&bytes[..len])), "{len} bytes");
        }
        assert_eq!(hex(&Sha256::of(b"")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
