//! Rows over a paged cache for the tests of the kernels that read it. Slots that no query sees
//! hold NaN, and table entries that no query needs name a block that does not exist.

use crate::attention_prefill::reference::Inputs;
use crate::memory::Buffer;
use crate::paged::{BlockTables, Heads, PagedCache};
use crate::testing::Bed;

/// Beyond any cache.
const WILD_BLOCK: u32 = 0x7fff_fff0;

/// A step's worth of rows, on the host.
pub(crate) struct PagedCase {
    pub(crate) rows: Vec<(u32, u32)>,
    pub(crate) heads: Heads,
    pub(crate) block_size: u32,
    pub(crate) window: u32,
    pub(crate) qkv: Vec<f32>,
    pub(crate) k_cache: Vec<f32>,
    pub(crate) v_cache: Vec<f32>,
    pub(crate) tables: Vec<u32>,
    pub(crate) stride: u32,
    pub(crate) cu_seqlens: Vec<u32>,
    pub(crate) context_lens: Vec<u32>,
    pub(crate) num_blocks: u32,
}

/// The tensors of a case on the device.
pub(crate) struct OnDevice {
    pub(crate) qkv: Buffer<u16>,
    k: Buffer<u16>,
    v: Buffer<u16>,
    tables: Buffer<u32>,
    pub(crate) cu_seqlens: Buffer<u32>,
    pub(crate) context_lens: Buffer<u32>,
    pub(crate) cache: PagedCache,
    pub(crate) block_tables: BlockTables,
}

/// Numbers in -1..1, the same for a seed.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 24
    }

    pub(crate) fn number(&mut self) -> f32 {
        (self.bits() & 0xffff) as f32 / 32768.0 - 1.0
    }

    pub(crate) fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }
}

impl PagedCase {
    /// `rows` are (queries, tokens in the cache). `round` makes a number one of the device's type.
    pub(crate) fn new(
        rows: &[(u32, u32)],
        heads: Heads,
        block_size: u32,
        window: u32,
        round: impl Fn(f32) -> f32,
    ) -> Self {
        let mut noise = Noise::new(u64::from(block_size) + u64::from(heads.num_heads));
        let blocks_of = |context_len: u32| context_len.div_ceil(block_size);
        let stride = rows.iter().map(|&(_, context)| blocks_of(context)).max().unwrap_or(0) + 2;
        let num_blocks = rows.iter().map(|&(_, context)| blocks_of(context)).sum::<u32>() + 3;
        let mut free: Vec<u32> = (0..num_blocks).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, (noise.bits() % (i as u64 + 1)) as usize);
        }
        let dim = heads.head_dim as usize;
        let block_len = (heads.num_kv_heads * block_size) as usize * dim;
        let mut case = Self {
            rows: rows.to_vec(),
            heads,
            block_size,
            window,
            qkv: Vec::new(),
            k_cache: vec![f32::NAN; num_blocks as usize * block_len],
            v_cache: vec![f32::NAN; num_blocks as usize * block_len],
            tables: vec![WILD_BLOCK; rows.len() * stride as usize],
            stride,
            cu_seqlens: vec![0],
            context_lens: rows.iter().map(|&(_, context)| context).collect(),
            num_blocks,
        };
        for (row, &(queries, context)) in rows.iter().enumerate() {
            case.cu_seqlens.push(case.cu_seqlens[row] + queries);
            let first = if window == 0 { 0 } else { (context - queries + 1).saturating_sub(window) };
            for key in first..context {
                let entry = &mut case.tables[row * stride as usize + (key / block_size) as usize];
                if *entry == WILD_BLOCK {
                    *entry = free.pop().expect("blocks for every row");
                }
                for kv_head in 0..heads.num_kv_heads {
                    let slot = (*entry * heads.num_kv_heads + kv_head) * block_size + key % block_size;
                    for place in slot as usize * dim..(slot as usize + 1) * dim {
                        case.k_cache[place] = round(noise.number());
                        case.v_cache[place] = round(noise.number());
                    }
                }
            }
        }
        // Of qkv only the queries may be read.
        for _ in 0..case.num_tokens() {
            case.qkv.extend(noise.numbers(heads.out_width()).into_iter().map(|q| round(3.0 * q)));
            case.qkv.resize(case.qkv.len() + 2 * heads.num_kv_heads as usize * dim, f32::NAN);
        }
        case
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.cu_seqlens[self.rows.len()]
    }

    pub(crate) fn scale(&self) -> f32 {
        (self.heads.head_dim as f32).sqrt().recip()
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            qkv: &self.qkv,
            k_cache: &self.k_cache,
            v_cache: &self.v_cache,
            block_tables: &self.tables,
            block_table_stride: self.stride as usize,
            cu_seqlens: &self.cu_seqlens,
            context_lens: &self.context_lens,
            heads: self.heads,
            block_size: self.block_size as usize,
            scale: self.scale(),
            window: self.window,
        }
    }

    /// Row `row` alone, as a case of its own over the same cache.
    pub(crate) fn alone(&self, row: usize) -> Self {
        let width = self.heads.qkv_width();
        let (first, end) = (self.cu_seqlens[row] as usize, self.cu_seqlens[row + 1] as usize);
        Self {
            rows: vec![self.rows[row]],
            qkv: self.qkv[first * width..end * width].to_vec(),
            k_cache: self.k_cache.clone(),
            v_cache: self.v_cache.clone(),
            tables: self.tables[row * self.stride as usize..][..self.stride as usize].to_vec(),
            cu_seqlens: vec![0, self.rows[row].0],
            context_lens: vec![self.context_lens[row]],
            ..*self
        }
    }

    pub(crate) fn upload(&self, bed: &Bed) -> OnDevice {
        let (k, v) = (bed.upload_half(&self.k_cache), bed.upload_half(&self.v_cache));
        let tables = bed.upload(&self.tables);
        OnDevice {
            qkv: bed.upload_half(&self.qkv),
            cu_seqlens: bed.upload(&self.cu_seqlens),
            context_lens: bed.upload(&self.context_lens),
            cache: PagedCache { k: k.slice(), v: v.slice(), num_blocks: self.num_blocks, block_size: self.block_size },
            block_tables: BlockTables { entries: tables.slice(), stride: self.stride },
            k,
            v,
            tables,
        }
    }
}

impl OnDevice {
    /// Keeps the buffers alive to the end of a test.
    pub(crate) fn len_on_device(&self) -> usize {
        self.k.slice().len() + self.v.slice().len() + self.tables.slice().len()
    }
}

/// Asserts that the distance of `actual` from `expected` is at most `tolerance` of its length.
#[track_caller]
pub(crate) fn assert_near(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let distance = norm(&mut actual.iter().zip(expected).map(|(a, b)| a - b));
    let length = norm(&mut expected.iter().copied());
    // NaN fails: it compares as false.
    assert!(distance <= f64::from(tolerance) * length, "{what}: off by {distance} of {length}");
}
