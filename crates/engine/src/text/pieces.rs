//! The bytes that each token id stands for.

/// Bytes and kind of every token, one buffer for all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl Pieces {
    pub(crate) fn with_capacity(num_tokens: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(num_tokens * 8),
            ends: Vec::with_capacity(num_tokens),
            special: Vec::with_capacity(num_tokens),
        }
    }

    /// Adds the next id's piece.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(u32::try_from(self.bytes.len()).expect("a vocabulary is far below 4 GiB"));
        self.special.push(special);
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// `None` outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// Control tokens such as BOS; left out of text by default.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}
