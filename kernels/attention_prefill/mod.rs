//! Attention of rows with any number of queries over the paged cache: prefill, chunks of it,
//! and mixed steps. Tensor cores, rows packed as (token, head of the group).
//!
//! See `attention_prefill.cu` for shapes. Dao, FlashAttention-2, 2023, gives the order of the
//! sums; Shah et al., FlashAttention-3, 2024, the products of Hopper.

pub mod reference;
#[cfg(test)]
pub(crate) mod tests;

use crate::compile::Arch;
use crate::memory::DeviceSlice;
use crate::paged::{BlockTables, Heads, PagedCache};
use crate::sources::Source;
use crate::{Device, Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source =
    Source::new("attention_prefill", "attention_prefill/attention_prefill.cu", include_str!("attention_prefill.cu"));

/// Most query heads that may share a kv head.
pub const GROUP_MAX: u32 = 64;

/// How the kernel is built for an architecture: the other side of the table at the end of
/// `attention_prefill.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Warps of a CTA.
    pub num_warps: u32,
    /// Query rows of a tile.
    pub tile_rows: u32,
    /// Keys of a step.
    pub keys: u32,
}

impl Variant {
    /// Bytes of dynamic shared memory: the queries and two steps of keys and values.
    pub fn shared_bytes(self, head_dim: u32) -> u32 {
        (self.tile_rows + 4 * self.keys) * head_dim * 2
    }
}

/// The variant for a GPU. Errors with `Shape` for a head dim other than 64, 128 and 256.
pub fn choose(arch: Arch, head_dim: u32) -> Result<Variant, Error> {
    let is_hopper = arch.number == 90 && arch.is_specific;
    let variant = |num_warps, tile_rows, keys| Ok(Variant { num_warps, tile_rows, keys });
    match (head_dim, arch.number) {
        (64 | 128 | 256, _) if is_hopper => variant(8, 128, 64),
        (64 | 128, 80..) => variant(4, 128, 64),
        (256, 80..) => variant(4, 64, 32),
        (64, _) => variant(4, 64, 64),
        (128, _) => variant(4, 64, 32),
        (256, _) => variant(4, 64, 16),
        _ => Err(Error::shape("attention_prefill", format!("head_dim {head_dim}; 64, 128 and 256 exist"))),
    }
}

/// A row of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its place in the step.
    pub row: u32,
    /// Queries.
    pub query_len: u32,
    /// Tokens in the cache, the queries included.
    pub context_len: u32,
}

/// Appends `(row, first query)` of each tile of the rows to `tiles`, most work first.
pub fn list_tiles(tiles: &mut Vec<[u32; 2]>, rows: impl Iterator<Item = Row>, tile_queries: u32, window: u32) {
    let mut listed: Vec<(u32, [u32; 2])> = Vec::new();
    for row in rows {
        for first in (0..row.query_len).step_by(tile_queries as usize) {
            let queries = tile_queries.min(row.query_len - first);
            let end = row.context_len - row.query_len + first + queries;
            let keys = if window == 0 { end } else { end.min(window.saturating_add(queries) - 1) };
            listed.push((keys, [row.row, first]));
        }
    }
    listed.sort_by_key(|&(keys, tile)| (std::cmp::Reverse(keys), tile));
    tiles.extend(listed.into_iter().map(|(_, tile)| tile));
}

/// Tensors and scalars of a call.
#[derive(Debug, Clone, Copy)]
pub struct Prefill<'a> {
    /// `[num_tokens, qkv_width]`, q normed and rotated.
    pub qkv: DeviceSlice<u16>,
    /// Cache of the layer, this step's keys and values written.
    pub cache: &'a PagedCache,
    /// Blocks of all rows of the step.
    pub block_tables: &'a BlockTables,
    /// `[num_rows + 1]`.
    pub cu_seqlens: DeviceSlice<u32>,
    /// `[num_rows]`.
    pub context_lens: DeviceSlice<u32>,
    /// `[num_tiles, 2]`, from [`list_tiles`] with [`AttentionPrefill::tile_queries`].
    pub tiles: DeviceSlice<u32>,
    /// Tiles.
    pub num_tiles: u32,
    /// Rows of the step.
    pub num_rows: u32,
    /// Tokens of the step.
    pub num_tokens: u32,
    /// Heads of the layer.
    pub heads: Heads,
    /// Of the scores.
    pub scale: f32,
    /// Keys that a query sees, itself included; 0: all.
    pub window: u32,
}

/// The kernel for one head dim.
#[derive(Debug)]
pub struct AttentionPrefill {
    function: Function,
    variant: Variant,
    head_dim: u32,
}

impl AttentionPrefill {
    /// Errors with `Shape` for a head dim other than 64, 128 and 256.
    pub fn load(device: &Device, modules: &Modules, head_dim: u32) -> Result<Self, Error> {
        let variant = choose(device.arch(), head_dim)?;
        let entry = match head_dim {
            64 => "attention_prefill_64",
            128 => "attention_prefill_128",
            _ => "attention_prefill_256",
        };
        let mut function = modules.function(SOURCE.name, entry)?;
        function.allow_shared(variant.shared_bytes(head_dim))?;
        Ok(Self { function, variant, head_dim })
    }

    /// Queries of one row that a tile takes.
    pub fn tile_queries(&self, group: u32) -> u32 {
        self.variant.tile_rows / group
    }

    /// Attention of the tiles' queries, to `out [num_tokens, out_width]`. Tokens of rows without
    /// tiles are left alone. Errors with `Shape` when dims or lengths differ. What lies on the
    /// device (tiles, tables, lengths) is not checked: every block of a row's visible keys must
    /// be below `num_blocks`.
    pub fn run(&self, stream: &Stream, out: DeviceSlice<u16>, call: &Prefill<'_>) -> Result<(), Error> {
        let name = self.function.name();
        let heads = call.heads;
        heads.check(name, self.head_dim, GROUP_MAX)?;
        call.cache.check(name, heads)?;
        call.block_tables.check(name, call.num_rows)?;
        let tokens = call.num_tokens as usize;
        out.expect_len(name, "out", tokens.saturating_mul(heads.out_width()))?;
        call.qkv.expect_len(name, "qkv", tokens.saturating_mul(heads.qkv_width()))?;
        call.cu_seqlens.expect_len(name, "cu_seqlens", call.num_rows as usize + 1)?;
        call.context_lens.expect_len(name, "context_lens", call.num_rows as usize)?;
        call.tiles.expect_len(name, "tiles", 2 * call.num_tiles as usize)?;
        if call.num_tiles > 0xffff {
            return Err(Error::shape(name, format!("{} tiles; a launch takes 65535", call.num_tiles)));
        }
        // SAFETY: arguments are those of attention_prefill.cu in its order; lengths were checked
        // above for these dims, contents of tiles, tables and lengths are the caller's promise.
        unsafe {
            Launch::new(&self.function)
                .grid3(heads.num_kv_heads, call.num_tiles, 1)
                .cta(self.variant.num_warps * 32)
                .shared(self.variant.shared_bytes(self.head_dim))
                .overlaps_previous(true)
                .arg(out)
                .arg(call.qkv)
                .arg(call.cache.k)
                .arg(call.cache.v)
                .arg(call.block_tables.entries)
                .arg(call.block_tables.stride)
                .arg(call.cu_seqlens)
                .arg(call.context_lens)
                .arg(call.tiles)
                .arg(call.num_tiles)
                .arg(heads.num_heads)
                .arg(heads.num_kv_heads)
                .arg(call.cache.block_size)
                .arg(call.scale)
                .arg(call.window)
                .run(stream)
        }
    }
}
