//! Norm of q and k, rotary position embedding, and the write of K and V to the cache.
//!
//! One pass over qkv between its projection and the attention; see `rope.cu` for shapes.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::DeviceSlice;
use crate::paged::{Heads, PagedCache};
use crate::sources::Source;
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source = Source::new("rope", "rope/rope.cu", include_str!("rope.cu"));

const THREADS: u32 = 256;

/// The kernel for one head dim.
#[derive(Debug)]
pub struct QkNormRopeKvWrite {
    function: Function,
    head_dim: u32,
}

/// Tensors and scalars of a call.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRope<'a> {
    /// Where each token goes in the cache, `[num_tokens]`; [`crate::PAD_SLOT`] goes nowhere.
    pub slot_mapping: DeviceSlice<i32>,
    /// `[num_tokens]`, below `max_position`; padding tokens have one too.
    pub positions: DeviceSlice<u32>,
    /// Norm weights of q and of k, `[head_dim]` each; none: no norm.
    pub norm_weights: Option<(DeviceSlice<u16>, DeviceSlice<u16>)>,
    /// `[max_position, head_dim]`: cosines of half the dims, then sines.
    pub rope: DeviceSlice<f32>,
    /// Tokens.
    pub num_tokens: u32,
    /// Heads of the layer.
    pub heads: Heads,
    /// Cache of the layer.
    pub cache: &'a PagedCache,
    /// Of the norm.
    pub eps: f32,
    /// Added to norm weights (Gemma: 1).
    pub weight_offset: f32,
}

impl QkNormRopeKvWrite {
    /// Errors with `Shape` for a head dim other than 64, 128 and 256.
    pub fn load(modules: &Modules, head_dim: u32) -> Result<Self, Error> {
        let entry = match head_dim {
            64 => "qk_norm_rope_kv_write_64",
            128 => "qk_norm_rope_kv_write_128",
            256 => "qk_norm_rope_kv_write_256",
            _ => {
                return Err(Error::shape(
                    "qk_norm_rope_kv_write",
                    format!("head_dim {head_dim}; 64, 128 and 256 exist"),
                ));
            }
        };
        Ok(Self { function: modules.function(SOURCE.name, entry)?, head_dim })
    }

    /// Norms and rotates q in `qkv [num_tokens, qkv_width]`, and writes k (normed and rotated)
    /// and v to the cache; the k and v of `qkv` stay as they are. Errors with `Shape` when dims
    /// or lengths differ. Slots and positions are on the device and not checked: a slot must be
    /// below `num_blocks * block_size`, no two tokens may share one.
    pub fn run(&self, stream: &Stream, qkv: DeviceSlice<u16>, call: &QkNormRope<'_>) -> Result<(), Error> {
        let name = self.function.name();
        let heads = call.heads;
        heads.check(name, self.head_dim, u32::MAX)?;
        call.cache.check(name, heads)?;
        let tokens = call.num_tokens as usize;
        qkv.expect_len(name, "qkv", tokens.saturating_mul(heads.qkv_width()))?;
        call.slot_mapping.expect_len(name, "slot_mapping", tokens)?;
        call.positions.expect_len(name, "positions", tokens)?;
        if let Some((q, k)) = call.norm_weights {
            q.expect_len(name, "q_weight", self.head_dim as usize)?;
            k.expect_len(name, "k_weight", self.head_dim as usize)?;
        }
        call.rope.expect_len(name, "rope", self.head_dim as usize)?;
        let heads_per_token = u64::from(heads.num_heads) + 2 * u64::from(heads.num_kv_heads);
        let units = u32::try_from(u64::from(call.num_tokens) * heads_per_token)
            .map_err(|_| Error::shape(name, format!("{} tokens of {heads_per_token} heads", call.num_tokens)))?;
        let heads_per_cta = THREADS / (self.head_dim / 16);
        // SAFETY: arguments are those of rope.cu in its order; lengths were checked above for
        // these dims, slots and positions are the caller's promise.
        unsafe {
            Launch::new(&self.function)
                .grid(units.div_ceil(heads_per_cta))
                .cta(THREADS)
                .overlaps_previous(true)
                .arg(qkv)
                .arg(call.cache.k)
                .arg(call.cache.v)
                .arg(call.slot_mapping)
                .arg(call.positions)
                .arg(call.norm_weights.map(|(q, _)| q))
                .arg(call.norm_weights.map(|(_, k)| k))
                .arg(call.rope)
                .arg(call.num_tokens)
                .arg(heads.num_heads)
                .arg(heads.num_kv_heads)
                .arg(call.cache.block_size)
                .arg(call.eps)
                .arg(call.weight_offset)
                .run(stream)
        }
    }
}
