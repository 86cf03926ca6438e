//! Attention of rows with one query each over the paged cache, split over the keys.
//!
//! A plan, made on the device once per step and window, cuts every row into chunks; persistent
//! CTAs take (chunk, kv head) items from it, longest first; the last chunk of a row to finish
//! merges its partial answers in chunk order. Where a row is cut depends on its length alone, so
//! its answer does not depend on its neighbours. See `attention_decode.cu` for shapes.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::compile::Arch;
use crate::memory::DeviceSlice;
use crate::paged::{BlockTables, Heads, PagedCache};
use crate::sources::Source;
use crate::{Device, Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source =
    Source::new("attention_decode", "attention_decode/attention_decode.cu", include_str!("attention_decode.cu"));

/// Device code of the plan.
pub const PLAN_SOURCE: Source =
    Source::new("attention_decode_plan", "attention_decode/plan.cu", include_str!("plan.cu"));

/// Most query heads that may share a kv head: one side of a tensor core tile.
pub const GROUP_MAX: u32 = 16;

/// Words of an entry of the work list.
pub(crate) const ENTRY_WORDS: usize = 8;
/// Threads of the plan's one CTA.
const PLAN_THREADS: u32 = 1024;
/// Tokens that a warp loads at a time.
const SLICE: u32 = 16;

/// How the kernel is built for an architecture: the other side of the table at the end of
/// `attention_decode.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Warps of a CTA.
    pub num_warps: u32,
    /// Slices of keys and values that a warp has in shared memory.
    pub num_stages: u32,
    /// Tokens of a chunk, about: a row's last chunk has half to one and a half as many.
    pub chunk: u32,
}

impl Variant {
    /// Bytes of dynamic shared memory.
    pub fn shared_bytes(self, head_dim: u32) -> u32 {
        self.num_warps * self.num_stages * 2 * SLICE * head_dim * 2
    }
}

/// The variant for a GPU. Errors with `Shape` for a head dim other than 64, 128 and 256.
pub fn choose(arch: Arch, head_dim: u32) -> Result<Variant, Error> {
    let variant = |num_warps, num_stages, chunk| Ok(Variant { num_warps, num_stages, chunk });
    match (head_dim, arch.number) {
        (64, 80..) => variant(4, 6, 1024),
        (128, 80..) => variant(4, 3, 768),
        (256, 80..) => variant(2, 3, 640),
        (64, _) => variant(4, 2, 1024),
        (128, _) => variant(2, 2, 640),
        (256, _) => variant(1, 2, 256),
        _ => Err(Error::shape("attention_decode", format!("head_dim {head_dim}; 64, 128 and 256 exist"))),
    }
}

/// Chunks that the plan cuts a row of `context_len` tokens into; with a window they are no more.
pub fn num_chunks(context_len: u32, chunk: u32) -> u32 {
    let (num_whole, tail) = (context_len / chunk, context_len % chunk);
    // A tail of less than half a chunk stays with the chunk before it, where there is one.
    let has_own_chunk = tail > 0 && (num_whole == 0 || tail >= chunk / 2);
    num_whole + u32::from(has_own_chunk)
}

/// Chunks of `num_rows` rows whose contexts have at most `context_len_max` tokens each, at most.
pub fn chunks_max(num_rows: u32, context_len_max: u32, chunk: u32) -> u32 {
    // A window may begin inside a chunk: one more than its length has.
    num_rows.saturating_mul(context_len_max.div_ceil(chunk) + 1)
}

/// Scratch of the plan and of the kernel. One for all layers: a layer is done before the next.
#[derive(Debug, Clone, Copy)]
pub struct Workspace {
    /// The work list, 8 words a chunk.
    pub work: DeviceSlice<u32>,
    /// How many chunks are listed, one word; `u32::MAX` when there was no room for all, which a
    /// run ends on with a device error.
    pub work_count: DeviceSlice<u32>,
    /// Partial answers, `[chunks, num_heads, head_dim]`.
    pub partial_out: DeviceSlice<f32>,
    /// Their weights, `[chunks, num_heads]`.
    pub partial_lse: DeviceSlice<f32>,
    /// The queue, and how many chunks of each (row, kv head) are done: `2 + num_rows *
    /// num_kv_heads`. Zeroed once; every launch leaves zeros.
    pub counters: DeviceSlice<u32>,
}

/// Lengths of the parts of a [`Workspace`], in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkspaceLens {
    /// Of `work`.
    pub work: usize,
    /// Of `partial_out`.
    pub partial_out: usize,
    /// Of `partial_lse`.
    pub partial_lse: usize,
    /// Of `counters`.
    pub counters: usize,
}

/// Lengths for up to `num_rows` rows and `num_chunks` chunks, see [`chunks_max`].
pub fn workspace_lens(heads: Heads, num_rows: u32, num_chunks: u32) -> WorkspaceLens {
    let num_chunks = num_chunks as usize;
    WorkspaceLens {
        work: num_chunks * ENTRY_WORDS,
        partial_out: num_chunks * heads.out_width(),
        partial_lse: num_chunks * heads.num_heads as usize,
        counters: 2 + num_rows as usize * heads.num_kv_heads as usize,
    }
}

/// Tensors and scalars of a call.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
    /// `[num_rows or more, qkv_width]`, q normed and rotated; row r is token r.
    pub qkv: DeviceSlice<u16>,
    /// Cache of the layer, this step's keys and values written.
    pub cache: &'a PagedCache,
    /// Blocks of the rows.
    pub block_tables: &'a BlockTables,
    /// `[num_rows]`, this step's token included; at least 1.
    pub context_lens: DeviceSlice<u32>,
    /// Scratch, with the plan of these lengths and this window in it.
    pub workspace: &'a Workspace,
    /// Rows.
    pub num_rows: u32,
    /// Chunks that the plan may list, see [`chunks_max`].
    pub num_chunks_max: u32,
    /// Heads of the layer.
    pub heads: Heads,
    /// Of the scores.
    pub scale: f32,
    /// Keys that a query sees, itself included; 0: all.
    pub window: u32,
}

/// The kernels for one head dim.
#[derive(Debug)]
pub struct AttentionDecode {
    plan: Function,
    narrow: Function,
    wide: Function,
    variant: Variant,
    head_dim: u32,
    num_ctas: u32,
}

impl AttentionDecode {
    /// Errors with `Shape` for a head dim other than 64, 128 and 256.
    pub fn load(device: &Device, modules: &Modules, head_dim: u32) -> Result<Self, Error> {
        let variant = choose(device.arch(), head_dim)?;
        let (narrow, wide) = match head_dim {
            64 => ("attention_decode_64", "attention_decode_64_wide"),
            128 => ("attention_decode_128", "attention_decode_128_wide"),
            _ => ("attention_decode_256", "attention_decode_256_wide"),
        };
        let shared = variant.shared_bytes(head_dim);
        let mut narrow = modules.function(SOURCE.name, narrow)?;
        let mut wide = modules.function(SOURCE.name, wide)?;
        narrow.allow_shared(shared)?;
        wide.allow_shared(shared)?;
        let per_sm = narrow.ctas_per_sm(variant.num_warps * 32, shared)?.max(1);
        let num_ctas = per_sm * device.properties().num_sms;
        let plan = modules.function(PLAN_SOURCE.name, "attention_decode_plan")?;
        Ok(Self { plan, narrow, wide, variant, head_dim, num_ctas })
    }

    /// Tokens of a chunk, for [`chunks_max`].
    pub fn chunk(&self) -> u32 {
        self.variant.chunk
    }

    /// Lists the chunks of rows with these lengths, for every later [`AttentionDecode::run`] of
    /// the step with the same window. Errors with `Shape` when the list is shorter than
    /// `num_chunks_max`. The caller counts with [`num_chunks`] that the rows have no more than
    /// that; of more the device lists none, and the run ends as a device error.
    pub fn plan(
        &self,
        stream: &Stream,
        workspace: &Workspace,
        context_lens: DeviceSlice<u32>,
        num_rows: u32,
        num_chunks_max: u32,
        window: u32,
    ) -> Result<(), Error> {
        let name = self.plan.name();
        context_lens.expect_len(name, "context_lens", num_rows as usize)?;
        workspace.work.expect_len(name, "work", num_chunks_max as usize * ENTRY_WORDS)?;
        workspace.work_count.expect_len(name, "work_count", 1)?;
        // SAFETY: arguments are those of attention_decode_plan in its order; the kernel lists at
        // most `num_chunks_max` chunks, for which there is room, checked above.
        unsafe {
            Launch::new(&self.plan)
                .cta(PLAN_THREADS)
                .overlaps_previous(true)
                .arg(workspace.work)
                .arg(workspace.work_count)
                .arg(context_lens)
                .arg(num_rows)
                .arg(num_chunks_max)
                .arg(self.variant.chunk)
                .arg(window)
                .run(stream)
        }
    }

    /// Attention of rows `0..num_rows`, to `out [num_rows, out_width]`. Errors with `Shape` when
    /// dims or lengths differ. What lies on the device (plan, tables, lengths) is not checked:
    /// every block of a row's visible keys must be below `num_blocks`.
    pub fn run(&self, stream: &Stream, out: DeviceSlice<u16>, call: &Decode<'_>) -> Result<(), Error> {
        let heads = call.heads;
        let function = if heads.num_kv_heads != 0 && heads.group() > GROUP_MAX / 2 { &self.wide } else { &self.narrow };
        let name = function.name();
        heads.check(name, self.head_dim, GROUP_MAX)?;
        call.cache.check(name, heads)?;
        call.block_tables.check(name, call.num_rows)?;
        let rows = call.num_rows as usize;
        out.expect_len(name, "out", rows.saturating_mul(heads.out_width()))?;
        call.qkv.expect_len(name, "qkv", rows.saturating_mul(heads.qkv_width()))?;
        call.context_lens.expect_len(name, "context_lens", rows)?;
        let lens = workspace_lens(heads, call.num_rows, call.num_chunks_max);
        call.workspace.work.expect_len(name, "work", lens.work)?;
        call.workspace.work_count.expect_len(name, "work_count", 1)?;
        call.workspace.partial_out.expect_len(name, "partial_out", lens.partial_out)?;
        call.workspace.partial_lse.expect_len(name, "partial_lse", lens.partial_lse)?;
        call.workspace.counters.expect_len(name, "counters", lens.counters)?;
        if rows == 0 {
            return Ok(());
        }
        // SAFETY: arguments are those of attention_decode.cu in its order; lengths were checked
        // above for these dims, contents of plan, tables and lengths are the caller's promise.
        unsafe {
            Launch::new(function)
                .grid(self.num_ctas)
                .cta(self.variant.num_warps * 32)
                .shared(self.variant.shared_bytes(self.head_dim))
                .overlaps_previous(true)
                .arg(out)
                .arg(call.qkv)
                .arg(call.cache.k)
                .arg(call.cache.v)
                .arg(call.block_tables.entries)
                .arg(call.block_tables.stride)
                .arg(call.context_lens)
                .arg(call.workspace.work)
                .arg(call.workspace.work_count)
                .arg(call.workspace.partial_out)
                .arg(call.workspace.partial_lse)
                .arg(call.workspace.counters)
                .arg(call.num_rows)
                .arg(heads.num_heads)
                .arg(heads.num_kv_heads)
                .arg(call.cache.block_size)
                .arg(self.variant.chunk)
                .arg(call.scale)
                .arg(call.window)
                .run(stream)
        }
    }
}
