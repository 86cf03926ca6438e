//! An item's state as shown, and the bitmap that holds one bit per item of a shard.

use crate::job::worded_enum;

worded_enum!(
    /// What is shown for one item; derived, never stored.
    ItemState, "item state", {
    /// Not run yet.
    Pending = "pending",
    /// Its shard is leased and it waits for nothing.
    Running = "running",
    /// A retry is due later.
    Waiting = "waiting",
    /// Ended with a 2xx answer.
    Completed = "completed",
    /// Ended with another answer or an error code.
    Failed = "failed",
    /// Ended by a cancel.
    Cancelled = "cancelled",
    /// Ended by the window's end.
    Expired = "expired",
});

/// One bit per item of a shard, bit `i` at byte `i / 8`, least significant first.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Bitmap {
    bytes: Vec<u8>,
    num_bits: u32,
}

impl Bitmap {
    /// All bits clear.
    pub fn new(num_bits: u32) -> Self {
        Self { bytes: vec![0; num_bits.div_ceil(8) as usize], num_bits }
    }

    /// Reads stored bytes; `None` when the length does not fit or a bit past the end is set.
    pub fn from_bytes(bytes: &[u8], num_bits: u32) -> Option<Self> {
        let fits = bytes.len() == num_bits.div_ceil(8) as usize;
        let tail_clear = num_bits.is_multiple_of(8) || bytes.last().is_none_or(|last| last >> (num_bits % 8) == 0);
        (fits && tail_clear).then(|| Self { bytes: bytes.to_vec(), num_bits })
    }

    /// The stored form.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many bits there are, set or not.
    pub fn num_bits(&self) -> u32 {
        self.num_bits
    }

    /// Whether the bit is set. Panics past the end.
    #[track_caller]
    pub fn get(&self, index: u32) -> bool {
        assert!(index < self.num_bits, "bit {index} of {}", self.num_bits);
        self.bytes[index as usize / 8] >> (index % 8) & 1 == 1
    }

    /// Sets the bit. Panics past the end.
    #[track_caller]
    pub fn set(&mut self, index: u32) {
        assert!(index < self.num_bits, "bit {index} of {}", self.num_bits);
        self.bytes[index as usize / 8] |= 1 << (index % 8);
    }

    /// Clears the bit. Panics past the end.
    #[track_caller]
    pub fn clear(&mut self, index: u32) {
        assert!(index < self.num_bits, "bit {index} of {}", self.num_bits);
        self.bytes[index as usize / 8] &= !(1 << (index % 8));
    }

    /// How many bits are set.
    pub fn count_ones(&self) -> u32 {
        self.bytes.iter().map(|byte| byte.count_ones()).sum()
    }

    /// Whether every bit is set.
    pub fn is_full(&self) -> bool {
        self.count_ones() == self.num_bits
    }

    /// Sets every bit that is set in `other`. Panics when the lengths differ.
    #[track_caller]
    pub fn union(&mut self, other: &Bitmap) {
        assert_eq!(self.num_bits, other.num_bits, "bitmaps of different length");
        self.bytes.iter_mut().zip(&other.bytes).for_each(|(byte, more)| *byte |= more);
    }

    /// Clears every bit that is set in `other`. Panics when the lengths differ.
    #[track_caller]
    pub fn subtract(&mut self, other: &Bitmap) {
        assert_eq!(self.num_bits, other.num_bits, "bitmaps of different length");
        self.bytes.iter_mut().zip(&other.bytes).for_each(|(byte, less)| *byte &= !less);
    }

    /// Whether a bit is set in both.
    pub fn intersects(&self, other: &Bitmap) -> bool {
        self.bytes.iter().zip(&other.bytes).any(|(a, b)| a & b != 0)
    }

    /// Indices of the set bits, rising.
    pub fn ones(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.num_bits).filter(|&index| self.get(index))
    }

    /// Indices of the clear bits, rising.
    pub fn zeros(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.num_bits).filter(|&index| !self.get(index))
    }
}

impl std::fmt::Debug for Bitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bitmap({} of {})", self.count_ones(), self.num_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmap_reads_back_and_refuses_a_stray_bit() {
        let mut bitmap = Bitmap::new(11);
        bitmap.set(0);
        bitmap.set(10);
        assert_eq!(Bitmap::from_bytes(bitmap.as_bytes(), 11), Some(bitmap.clone()));
        assert_eq!(Bitmap::from_bytes(&[0, 0b1000], 11), None);
        assert_eq!(Bitmap::from_bytes(&[0], 11), None);
        assert_eq!(bitmap.ones().collect::<Vec<_>>(), [0, 10]);
        assert_eq!(bitmap.zeros().count(), 9);
    }
}
