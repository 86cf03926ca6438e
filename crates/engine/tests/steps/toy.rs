//! A two-layer toy model whose every logit depends on every token before it, read
//! through the block table. Exact integers: any wrong slot, block, position or chunk
//! gives other tokens. It also checks every step it is given.

use std::collections::HashSet;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use overnight_engine::Error;
use overnight_engine::model::{Forward, ModelShape, StepInput};

pub(crate) const VOCAB: u32 = 97;
pub(crate) const EOS: u32 = 96;
/// A short prompt that ends with it makes its own logits NaN.
pub(crate) const NAN_TOKEN: u32 = 95;
/// A prompt that ends with it makes its own logits NaN, however long it is.
pub(crate) const NAN_END_TOKEN: u32 = 92;
/// The layer that gives such logits.
pub(crate) const BAD_LAYER: u32 = 1;
/// A sequence that begins with it makes its step panic, or fail.
pub(crate) const PANIC_TOKEN: u32 = 94;
pub(crate) const ERROR_TOKEN: u32 = 93;
/// Prompts of tests stay below the special ones.
pub(crate) const NUM_PLAIN: u32 = 90;

/// What the toy saw.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    pub(crate) num_steps: u32,
    pub(crate) num_tokens_max: u32,
    pub(crate) num_rows_max: u32,
    pub(crate) num_logits_max: u32,
    /// Tokens computed, over all steps.
    pub(crate) num_tokens: u64,
    /// Query lengths of each step.
    pub(crate) query_lens: Vec<Vec<u32>>,
}

pub(crate) struct Toy {
    shape: ModelShape,
    block_size: u32,
    /// `[layer][slot]`
    cache: [Vec<u64>; 2],
    logits: Vec<f32>,
    seen: Arc<Mutex<Seen>>,
    /// Columns of logits beyond the real ids, larger than all real ones.
    num_padding: u32,
    /// The first step waits until its sender is gone.
    gate: Option<Receiver<()>>,
    has_bad_layer: bool,
}

impl Toy {
    pub(crate) fn new(max_position: u32) -> Self {
        Self {
            shape: ModelShape {
                architecture: "Toy".to_owned(),
                vocab_size: VOCAB,
                max_position,
                eos_token_ids: vec![EOS],
                kv_bytes_per_token: 16,
                weights_bytes: 0,
            },
            block_size: 0,
            cache: [Vec::new(), Vec::new()],
            logits: Vec::new(),
            seen: Arc::default(),
            num_padding: 0,
            gate: None,
            has_bad_layer: false,
        }
    }

    /// Its first step ends when the sender of `gate` is dropped.
    pub(crate) fn held_by(mut self, gate: Receiver<()>) -> Self {
        self.gate = Some(gate);
        self
    }

    /// A head with columns beyond the tokenizer's ids.
    pub(crate) fn with_padding(mut self, num_padding: u32) -> Self {
        self.num_padding = num_padding;
        self.shape.vocab_size = VOCAB + num_padding;
        self
    }

    pub(crate) fn seen(&self) -> Arc<Mutex<Seen>> {
        self.seen.clone()
    }

    fn check(&self, step: &StepInput<'_>) {
        let num_rows = step.cu_seqlens.len() - 1;
        assert_eq!((step.cu_seqlens[0], step.block_table_starts[0]), (0, 0));
        assert_eq!(step.cu_seqlens[num_rows] as usize, step.token_ids.len());
        assert_eq!(step.block_table_starts[num_rows] as usize, step.block_tables.len());
        assert_eq!((step.positions.len(), step.slot_mapping.len()), (step.token_ids.len(), step.token_ids.len()));
        assert!(
            step.logits_tokens.is_sorted() && step.logits_tokens.iter().all(|&at| at < step.token_ids.len() as u32)
        );
        // Field report 37: no placeholder reaches the embedding.
        assert!(step.token_ids.iter().all(|&token| token < self.shape.vocab_size), "an id is no token");
        let mut written = HashSet::new();
        for row in 0..num_rows {
            let tokens = step.cu_seqlens[row] as usize..step.cu_seqlens[row + 1] as usize;
            assert!(!tokens.is_empty(), "a row without tokens");
            let first = step.context_lens[row] - tokens.len() as u32;
            let table = self.table(step, row);
            assert_eq!(
                table.len() as u32,
                step.context_lens[row].div_ceil(self.block_size),
                "block table of row {row}"
            );
            for (position, at) in (first..).zip(tokens) {
                assert_eq!(step.positions[at], position);
                let slot = table[(position / self.block_size) as usize] * self.block_size + position % self.block_size;
                assert_eq!(step.slot_mapping[at], slot);
                assert!(written.insert(slot), "slot {slot} is written twice");
            }
        }
        for row in 0..num_rows {
            let num_query = step.cu_seqlens[row + 1] - step.cu_seqlens[row];
            for position in 0..step.context_lens[row] - num_query {
                let block = self.table(step, row)[(position / self.block_size) as usize];
                let slot = block * self.block_size + position % self.block_size;
                assert!(!written.contains(&slot), "slot {slot} is read as context and written in one step");
            }
        }
    }

    fn table<'a>(&self, step: &StepInput<'a>, row: usize) -> &'a [u32] {
        &step.block_tables[step.block_table_starts[row] as usize..step.block_table_starts[row + 1] as usize]
    }

    /// The fold of a layer's cache over positions `0..len`.
    fn attend(&self, layer: usize, table: &[u32], len: u32) -> u64 {
        (0..len).fold(1, |sum, position| {
            let slot = table[(position / self.block_size) as usize] * self.block_size + position % self.block_size;
            mix(sum ^ self.cache[layer][slot as usize])
        })
    }
}

impl Forward for Toy {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn allocate_kv_cache(&mut self, num_blocks: u32, block_size: u32) -> Result<(), Error> {
        self.block_size = block_size;
        let num_slots = u64::from(num_blocks) * u64::from(block_size);
        // Unwritten slots hold values that would show.
        self.cache = [(0..num_slots).map(|slot| mix(slot + 1_000)).collect(), (0..num_slots).map(mix).collect()];
        Ok(())
    }

    fn forward(&mut self, step: StepInput<'_>) -> Result<&[f32], Error> {
        if let Some(gate) = self.gate.take() {
            let _gone = gate.recv();
        }
        self.check(&step);
        let begins_with = |token| step.token_ids.iter().zip(step.positions).any(|at| at == (&token, &0));
        assert!(!begins_with(PANIC_TOKEN), "the toy panics as asked");
        if begins_with(ERROR_TOKEN) {
            return Err(Error::Stopped("the toy's device failed as asked".to_owned()));
        }
        let mut outputs = vec![0; step.token_ids.len()];
        for row in 0..step.context_lens.len() {
            let table = self.table(&step, row);
            let tokens = step.cu_seqlens[row] as usize..step.cu_seqlens[row + 1] as usize;
            for (at, output) in tokens.clone().zip(&mut outputs[tokens]) {
                let (position, slot) = (step.positions[at], step.slot_mapping[at] as usize);
                self.cache[0][slot] = mix(u64::from(step.token_ids[at]) << 32 | u64::from(position));
                self.cache[1][slot] = self.attend(0, table, position + 1);
                *output = self.attend(1, table, position + 1);
            }
        }
        self.logits.clear();
        self.has_bad_layer = false;
        for &at in step.logits_tokens {
            let (token, position) = (step.token_ids[at as usize], step.positions[at as usize]);
            let is_nan = token == NAN_END_TOKEN || token == NAN_TOKEN && position < 4;
            self.has_bad_layer |= is_nan;
            let logit = |id| match id {
                _ if is_nan => f32::NAN,
                // Never chosen, only given.
                _ if (u64::from(NUM_PLAIN)..u64::from(EOS)).contains(&id) => -1e3,
                _ => (mix(outputs[at as usize] ^ id) >> 40) as f32 / 2e6,
            };
            self.logits.extend((0..u64::from(VOCAB)).map(logit));
            self.logits.extend((0..self.num_padding).map(|_| 1e3));
        }
        let mut seen = self.seen.lock().expect("no test panics while it holds this");
        seen.num_steps += 1;
        seen.num_tokens += step.token_ids.len() as u64;
        seen.num_tokens_max = seen.num_tokens_max.max(step.token_ids.len() as u32);
        seen.num_rows_max = seen.num_rows_max.max(step.context_lens.len() as u32);
        seen.num_logits_max = seen.num_logits_max.max(step.logits_tokens.len() as u32);
        seen.query_lens.push(step.cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).collect());
        Ok(&self.logits)
    }

    fn first_bad_layer(&self) -> Option<u32> {
        self.has_bad_layer.then_some(BAD_LAYER)
    }
}

/// SplitMix64's finalizer.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}
