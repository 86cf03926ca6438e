//! The paged KV cache: for each layer, rows of K and of V by slot.

use crate::Error;
use crate::cpu::simd::Isa;
use crate::cpu::simd::vector::{self, Cached};

/// Element type of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheType {
    /// For checkpoints in f32.
    F32,
    /// For all others.
    F16,
}

impl CacheType {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

/// K and V of all layers, `[num_blocks * block_size, kv_heads * head_dim]` each.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
    row: usize,
    layers: Vec<(Store, Store)>,
}

#[derive(Debug)]
enum Store {
    F32(Vec<f32>),
    F16(Vec<u16>),
}

impl Cache {
    /// Errors with [`Error::Config`] when the system does not give the memory.
    pub(crate) fn new(
        ty: CacheType,
        layers: usize,
        row: usize,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self, Error> {
        let bytes = num_blocks as u128 * block_size as u128 * row as u128 * ty.bytes() as u128 * 2 * layers as u128;
        let refused = || Error::Config {
            key: "kv_cache_memory_bytes",
            what: format!("the system does not give {bytes} bytes for the KV cache; set a smaller size"),
        };
        if bytes > isize::MAX as u128 {
            return Err(refused());
        }
        let len = num_blocks * block_size * row;
        let store = || {
            Ok(match ty {
                CacheType::F32 => Store::F32(zeroed(len).ok_or_else(refused)?),
                CacheType::F16 => Store::F16(zeroed(len).ok_or_else(refused)?),
            })
        };
        let layers = (0..layers).map(|_| Ok((store()?, store()?))).collect::<Result<_, Error>>()?;
        Ok(Self { block_size, num_blocks, row, layers })
    }

    /// Stores K and V of a token, `[kv_heads * head_dim]` each.
    pub(crate) fn write(&mut self, isa: Isa, layer: usize, slot: usize, k: &[f32], v: &[f32]) {
        let range = slot * self.row..(slot + 1) * self.row;
        let (keys, values) = &mut self.layers[layer];
        for (store, x) in [(keys, k), (values, v)] {
            match store {
                Store::F32(store) => store[range.clone()].copy_from_slice(x),
                Store::F16(store) => vector::to_f16(isa, &mut store[range.clone()], x),
            }
        }
    }

    /// K and V of a layer.
    pub(crate) fn layer(&self, layer: usize) -> (Cached<'_>, Cached<'_>) {
        fn cached(store: &Store) -> Cached<'_> {
            match store {
                Store::F32(x) => Cached::F32(x),
                Store::F16(x) => Cached::F16(x),
            }
        }
        let (k, v) = &self.layers[layer];
        (cached(k), cached(v))
    }

    /// Fills every slot with NaN, so that a test sees a read of what was not written.
    #[cfg(test)]
    pub(crate) fn poison(&mut self) {
        for (k, v) in &mut self.layers {
            for store in [k, v] {
                match store {
                    Store::F32(x) => x.fill(f32::NAN),
                    Store::F16(x) => x.fill(half::f16::NAN.to_bits()),
                }
            }
        }
    }
}

/// Zeroed memory that the system backs page by page as it is written; `None` when refused.
fn zeroed<T: Copy + Default>(len: usize) -> Option<Vec<T>> {
    let mut probe = Vec::<T>::new();
    probe.try_reserve_exact(len).ok()?;
    drop(probe);
    Some(vec![T::default(); len])
}
