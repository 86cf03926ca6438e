//! What the kernels that read or write the KV cache have in common: head counts, the cache of
//! a layer, and block tables, with their checks.

use crate::Error;
use crate::memory::DeviceSlice;

/// Smallest block: no kernel's run of keys crosses one.
pub const BLOCK_SIZE_MIN: u32 = 16;
/// Largest block.
pub const BLOCK_SIZE_MAX: u32 = 256;

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Of queries.
    pub num_heads: u32,
    /// Of keys and values; divides `num_heads`.
    pub num_kv_heads: u32,
    /// Elements of a head: 64, 128 or 256.
    pub head_dim: u32,
}

impl Heads {
    /// Query heads that share a kv head.
    pub fn group(self) -> u32 {
        self.num_heads / self.num_kv_heads
    }

    /// Elements of a row of qkv.
    pub fn qkv_width(self) -> usize {
        (self.num_heads as usize + 2 * self.num_kv_heads as usize) * self.head_dim as usize
    }

    /// Elements of a row of the attention's output.
    pub fn out_width(self) -> usize {
        self.num_heads as usize * self.head_dim as usize
    }

    /// Errors with `Shape` unless `kernel`, compiled for `head_dim`, takes them with groups up
    /// to `group_max`.
    pub fn check(self, kernel: &'static str, head_dim: u32, group_max: u32) -> Result<(), Error> {
        let Self { num_heads, num_kv_heads, .. } = self;
        if self.head_dim != head_dim {
            return Err(Error::shape(kernel, format!("head_dim {}; it was loaded for {head_dim}", self.head_dim)));
        }
        if num_kv_heads == 0 || num_heads == 0 || num_heads % num_kv_heads != 0 {
            let what = format!("{num_heads} heads over {num_kv_heads} kv heads; the second must divide the first");
            return Err(Error::shape(kernel, what));
        }
        if self.group() > group_max {
            let what = format!("{num_heads} heads over {num_kv_heads} kv heads; at most {group_max} may share one");
            return Err(Error::shape(kernel, what));
        }
        Ok(())
    }
}

/// Keys and values of one layer: each `[num_blocks, num_kv_heads, block_size, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct PagedCache {
    /// Keys.
    pub k: DeviceSlice<u16>,
    /// Values.
    pub v: DeviceSlice<u16>,
    /// Blocks of each.
    pub num_blocks: u32,
    /// Token slots of a block, a power of two in 16..=256.
    pub block_size: u32,
}

impl PagedCache {
    /// Errors with `Shape` unless both tensors hold the blocks.
    pub fn check(&self, kernel: &'static str, heads: Heads) -> Result<(), Error> {
        check_block_size(kernel, self.block_size)?;
        let block = u64::from(heads.num_kv_heads) * u64::from(self.block_size) * u64::from(heads.head_dim);
        let len = usize::try_from(u64::from(self.num_blocks) * block)
            .map_err(|_| Error::shape(kernel, format!("{} blocks of {block} elements", self.num_blocks)))?;
        self.k.expect_len(kernel, "k_cache", len)?;
        self.v.expect_len(kernel, "v_cache", len)
    }
}

/// Errors with `Shape` unless it is a power of two in range.
pub(crate) fn check_block_size(kernel: &'static str, block_size: u32) -> Result<(), Error> {
    if !block_size.is_power_of_two() || !(BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&block_size) {
        let what = format!("block_size {block_size}; it must be a power of two in {BLOCK_SIZE_MIN}..={BLOCK_SIZE_MAX}");
        return Err(Error::shape(kernel, what));
    }
    Ok(())
}

/// Cache blocks of each row, in order: `[num_rows, stride]`. Entries past a row's context, and
/// those wholly before its window, are never used.
#[derive(Debug, Clone, Copy)]
pub struct BlockTables {
    /// The entries.
    pub entries: DeviceSlice<u32>,
    /// Entries of a row.
    pub stride: u32,
}

impl BlockTables {
    /// Errors with `Shape` when there are fewer rows.
    pub fn check(&self, kernel: &'static str, num_rows: u32) -> Result<(), Error> {
        self.entries.expect_len(kernel, "block_tables", num_rows as usize * self.stride as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_do_not_divide_or_share_too_much_are_refused_with_their_numbers() {
        let heads = |num_heads, num_kv_heads| Heads { num_heads, num_kv_heads, head_dim: 128 };
        assert!(heads(32, 8).check("attention", 128, 16).is_ok());
        for (heads, dim, expected) in [
            (heads(7, 2), 128, "7 heads"),
            (heads(4, 0), 128, "0 kv"),
            (heads(32, 1), 128, "at most 16"),
            (heads(4, 4), 64, "128"),
        ] {
            let error = heads.check("attention", dim, 16).expect_err("refused").to_string();
            assert!(error.contains(expected) && error.contains("attention"), "{error}");
        }
    }

    #[test]
    fn a_block_size_is_a_power_of_two_from_16_to_256() {
        for size in 0..600 {
            let is_good = [16, 32, 64, 128, 256].contains(&size);
            assert_eq!(check_block_size("attention", size).is_ok(), is_good, "{size}");
        }
    }
}
