//! A hash of a shard's item lines, taken at intake and compared when the shard is
//! fed, so that an input whose bytes changed in between is noticed although its
//! length and its number of lines did not.
//!
//! Each line's content is hashed once (SipHash-1-3: Aumasson, Bernstein, SipHash: a
//! fast short-input PRF, 2012), and the hashes are chained in line order, so that two
//! ways to cut an input share the cost of its bytes. Blank lines and the bytes
//! around a line's content hold no item and are left out. The key is public: this
//! finds damage and edits, not a forger who can write the object store anyway.

use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;

/// The hash of the lines so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LinesHash(u64);

impl LinesHash {
    /// Of one line's content, for [`LinesHash::push`].
    #[inline]
    pub fn of_line(content: &[u8]) -> u64 {
        SipHasher13::new().hash(content)
    }

    /// Takes the next line, by its hash.
    #[inline]
    pub fn push(&mut self, line: u64) {
        self.0 = SipHasher13::new_with_keys(self.0, 0).hash(&line.to_le_bytes());
    }

    /// Of all lines taken.
    pub fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&[u8]]) -> u64 {
        let mut hash = LinesHash::default();
        lines.iter().for_each(|line| hash.push(LinesHash::of_line(line)));
        hash.value()
    }

    #[test]
    fn order_cut_and_every_byte_of_the_lines_count() {
        let whole = of(&[b"{\"a\":1}", b"{\"b\":2}"]);
        assert_eq!(whole, of(&[b"{\"a\":1}", b"{\"b\":2}"]));
        for other in [
            &[b"{\"b\":2}".as_slice(), b"{\"a\":1}"][..],
            &[b"{\"a\":1}{\"b\":2}"],
            &[b"{\"a\":1}", b"{\"b\":3}"],
            &[b"{\"a\":1}"],
            &[b"{\"a\":1}", b"{\"b\":2}", b""],
            &[],
        ] {
            assert_ne!(whole, of(other), "{other:?}");
        }
    }

    /// Recorded in databases, so it may never change.
    #[test]
    fn value_is_fixed() {
        assert_eq!(of(&[b"{}"]), 0x4a69_62d3_db92_3d42);
    }
}
