//! One step through the layers, on the device.

use overnight_kernels::Error as DeviceError;
use overnight_kernels::attention_decode::{Decode, num_chunks};
use overnight_kernels::attention_prefill::{Prefill, Row, list_tiles};
use overnight_kernels::gemm::Shape;
use overnight_kernels::paged::{BlockTables, PagedCache};
use overnight_kernels::rope::QkNormRope;

use crate::Error;
use crate::cuda::buffers::{DECODE_CHUNKS_MAX, heads};
use crate::cuda::packing::{Layout, StepView, num_decode_rows};
use crate::cuda::{CudaModel, during};
use crate::model::StepInput;
use crate::model::check::check;
use crate::model::config::Architecture;

impl CudaModel {
    /// Starts a step: everything up to the last layer, or up to the logits where a graph has them.
    pub(super) fn compute(&mut self, step: &StepInput<'_>) -> Result<StepView, Error> {
        let Some(num_blocks) = self.cache.as_ref().map(|cache| cache.num_blocks) else {
            return Err(Error::Step("the KV cache is not allocated".to_owned()));
        };
        check(step, num_blocks as usize, self.limits.block_size as usize, self.config.vocab_rows)?;
        let (num_tokens, num_rows) = (step.token_ids.len() as u32, step.context_lens.len() as u32);
        if num_tokens > self.limits.num_tokens || num_rows > self.limits.num_rows {
            let (tokens, rows) = (self.limits.num_tokens, self.limits.num_rows);
            let what = format!("{num_tokens} tokens in {num_rows} rows; memory for {tokens} in {rows} was set aside");
            return Err(Error::Step(what));
        }
        let num_decode = num_decode_rows(step);
        let num_logits = step.logits_tokens.len() as u32;
        let is_decode = num_decode == num_rows && num_logits == num_rows && num_rows > 0;
        let chunk = self.kernels.decode.chunk();
        let graph = self.graphs.bucket(num_rows).filter(|_| is_decode && !self.enforce_eager);
        if let Some(rows) = graph.filter(|&rows| fits_padded(step.context_lens, rows, chunk)) {
            return self.replay(step, rows, num_blocks);
        }
        let mut tiles = std::mem::take(&mut self.tiles);
        tiles.clear();
        let tile = self.kernels.prefill.tile_queries(heads(&self.config).group());
        // The order by work without a window serves layers with one too.
        list_tiles(&mut tiles, (num_decode..num_rows).map(|row| prefill_row(step, row)), tile, 0);
        let layout = Layout { num_tokens, num_rows, num_decode, num_tiles: tiles.len() as u32, num_logits };
        let view = self.packing.pack(&self.stream, step, layout, &tiles, num_blocks);
        self.tiles = tiles;
        let view = view?;
        self.feed_tokens(&view, step)?;
        let splits = decode_splits(&step.context_lens[..num_decode as usize], chunk);
        self.layers(&view, &splits).map_err(during("could not compute a step"))?;
        Ok(view)
    }

    /// Puts tokens that the step before has chosen where this one takes them from.
    pub(super) fn feed_tokens(&self, view: &StepView, step: &StepInput<'_>) -> Result<(), Error> {
        let (feedback, choices) = (&self.kernels.token_feedback, self.sampling.choices());
        let num = step.feedback.len() as u32;
        let fed = feedback.feed(&self.stream, view.token_ids, view.feedback, choices, num);
        fed.map_err(during("could not feed tokens back"))
    }

    /// Embedding and all layers. `splits`: runs of decode rows, (first, count), that attention
    /// takes one launch for.
    pub(super) fn layers(&mut self, view: &StepView, splits: &[(u32, u32)]) -> Result<(), DeviceError> {
        let tokens = view.layout.num_tokens;
        if tokens == 0 {
            return Ok(());
        }
        let (hidden, eps, offset) = (self.config.hidden as u32, self.config.norm_eps, self.weights.norm_offset);
        let (stream, k, b, w) = (&self.stream, &self.kernels, &self.buffers, &self.weights);
        let stride = self.limits.blocks_per_row;
        k.block_tables.expand(stream, b.block_tables, view.table_starts, view.blocks, view.layout.num_rows, stride)?;
        k.embedding.gather(stream, b.residual, w.embedding, view.token_ids, tokens, hidden, w.embedding_scale)?;
        k.rms_norm.rms_norm(
            stream,
            b.normed,
            b.residual,
            w.layers[0].attention_norm,
            None,
            tokens,
            hidden,
            eps,
            offset,
        )?;
        if let [split] = splits {
            self.plan_decode(view, *split)?;
        }
        for layer in 0..self.config.layers.len() {
            self.attention(view, layer, splits)?;
            self.join(view, layer, true)?;
            self.feed_forward(view, layer)?;
            self.join(view, layer, false)?;
        }
        Ok(())
    }

    /// Work lists of decode attention, one for each kind of window in the model.
    fn plan_decode(&self, view: &StepView, (first, num): (u32, u32)) -> Result<(), DeviceError> {
        let context_lens = view.context_lens.slice(first as usize, num as usize);
        for (kind, window) in self.windows() {
            let workspace = &self.buffers.decode[kind];
            self.kernels.decode.plan(&self.stream, workspace, context_lens, num, DECODE_CHUNKS_MAX, window)?;
        }
        Ok(())
    }

    /// The kinds of windows that layers have: 0 none, 1 the model's.
    fn windows(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let of = |kind: usize| self.config.layers.iter().find(|layer| layer.window.is_some() == (kind == 1));
        (0..2).filter_map(move |kind| of(kind).map(|layer| (kind, layer.window.unwrap_or(0))))
    }

    fn attention(&mut self, view: &StepView, layer: usize, splits: &[(u32, u32)]) -> Result<(), DeviceError> {
        let (config, heads) = (&self.config, heads(&self.config));
        let (weights, b, stream) = (&self.weights.layers[layer], &self.buffers, &self.stream);
        let (tokens, width) = (view.layout.num_tokens, heads.qkv_width());
        let shape = Shape { m: tokens, n: width as u32, k: config.hidden as u32, accumulates: false };
        self.gemm.run(stream, b.qkv, b.normed, weights.qkv, shape)?;
        let Some(cache) = self.cache.as_ref().map(|cache| cache.layer(layer, self.limits.block_size)) else {
            return Err(DeviceError::shape("attention", "the KV cache is not allocated"));
        };
        let call = QkNormRope {
            slot_mapping: view.slot_mapping,
            positions: view.positions,
            norm_weights: weights.qk_norms,
            rope: b.ropes[config.layers[layer].rope],
            num_tokens: tokens,
            heads,
            cache: &cache,
            eps: config.norm_eps,
            weight_offset: self.weights.norm_offset,
        };
        self.kernels.rope.run(stream, b.qkv, &call)?;
        for &split in splits {
            if splits.len() > 1 {
                self.plan_decode(view, split)?;
            }
            self.attend_decode(view, layer, &cache, split)?;
        }
        let block_tables = BlockTables { entries: b.block_tables, stride: self.limits.blocks_per_row };
        let call = Prefill {
            qkv: b.qkv,
            cache: &cache,
            block_tables: &block_tables,
            cu_seqlens: view.cu_seqlens,
            context_lens: view.context_lens,
            tiles: view.tiles,
            num_tiles: view.layout.num_tiles,
            num_rows: view.layout.num_rows,
            num_tokens: tokens,
            heads,
            scale: config.attention_scale,
            window: config.layers[layer].window.unwrap_or(0),
        };
        if call.num_tiles > 0 {
            self.kernels.prefill.run(&self.stream, b.attention, &call)?;
        }
        // Without a norm in between, the product itself adds to the residual.
        let (out, accumulates) = self.block_output();
        let shape = Shape { m: tokens, n: self.config.hidden as u32, k: heads.out_width() as u32, accumulates };
        self.gemm.run(&self.stream, out, self.buffers.attention, self.weights.layers[layer].o, shape)
    }

    /// Attention of `num` decode rows from `first` on, whose chunks are listed.
    fn attend_decode(
        &self,
        view: &StepView,
        layer: usize,
        cache: &PagedCache,
        (first, num): (u32, u32),
    ) -> Result<(), DeviceError> {
        let (config, b, heads) = (&self.config, &self.buffers, heads(&self.config));
        let window = config.layers[layer].window.unwrap_or(0);
        let (stride, first, len) = (self.limits.blocks_per_row, first as usize, num as usize);
        let entries = b.block_tables.slice(first * stride as usize, len * stride as usize);
        let call = Decode {
            qkv: b.qkv.slice(first * heads.qkv_width(), len * heads.qkv_width()),
            cache,
            block_tables: &BlockTables { entries, stride },
            context_lens: view.context_lens.slice(first, len),
            workspace: &b.decode[usize::from(window != 0)],
            num_rows: num,
            num_chunks_max: DECODE_CHUNKS_MAX,
            heads,
            scale: config.attention_scale,
            window,
        };
        let out = b.attention.slice(first * heads.out_width(), len * heads.out_width());
        self.kernels.decode.run(&self.stream, out, &call)
    }

    fn feed_forward(&mut self, view: &StepView, layer: usize) -> Result<(), DeviceError> {
        let (hidden, ffn, tokens) = (self.config.hidden as u32, self.config.ffn as u32, view.layout.num_tokens);
        let (weights, b, stream) = (&self.weights.layers[layer], &self.buffers, &self.stream);
        let shape = Shape { m: tokens, n: 2 * ffn, k: hidden, accumulates: false };
        self.gemm.run(stream, b.gate_up, b.normed, weights.gate_up, shape)?;
        match self.config.architecture {
            Architecture::Gemma3 => self.kernels.activation.gelu_tanh_mul(stream, b.gated, b.gate_up, tokens, ffn)?,
            Architecture::Llama | Architecture::Qwen3 => {
                self.kernels.activation.silu_mul(stream, b.gated, b.gate_up, tokens, ffn)?;
            }
        }
        let (out, accumulates) = self.block_output();
        let shape = Shape { m: tokens, n: hidden, k: ffn, accumulates };
        self.gemm.run(stream, out, b.gated, weights.down, shape)
    }

    /// Where a block's output goes, and whether it is added there.
    pub(super) fn block_output(&self) -> (overnight_kernels::DeviceSlice<u16>, bool) {
        match self.config.architecture.post_norms() {
            true => (self.buffers.block, false),
            false => (self.buffers.residual, true),
        }
    }

    /// Adds a block's output to the residual where the product has not, and norms it for what
    /// comes next. After the last layer only the rows of logits are normed, by `head`.
    fn join(&self, view: &StepView, layer: usize, after_attention: bool) -> Result<(), DeviceError> {
        let (hidden, eps, offset) = (self.config.hidden as u32, self.config.norm_eps, self.weights.norm_offset);
        let (w, b, tokens) = (&self.weights, &self.buffers, view.layout.num_tokens);
        let weights = &w.layers[layer];
        let (post, next) = match after_attention {
            true => (weights.post_norms.map(|(attention, _)| attention), Some(weights.ffn_norm)),
            false => {
                let next = w.layers.get(layer + 1).map(|next| next.attention_norm);
                (weights.post_norms.map(|(_, ffn)| ffn), next)
            }
        };
        let norms = &self.kernels.rms_norm;
        match (post, next) {
            (Some(post), next) => {
                let next = next.unwrap_or(w.final_norm);
                norms.post_add_rms_norm(
                    &self.stream,
                    b.normed,
                    b.residual,
                    b.block,
                    post,
                    next,
                    tokens,
                    hidden,
                    eps,
                    offset,
                )
            }
            (None, Some(next)) => {
                norms.rms_norm(&self.stream, b.normed, b.residual, next, None, tokens, hidden, eps, offset)
            }
            (None, None) => Ok(()),
        }
    }

    /// Logits of `num` of the step's wanted tokens, from `start` on.
    pub(super) fn head(&mut self, view: &StepView, start: u32, num: u32) -> Result<(), DeviceError> {
        let (hidden, eps, offset) = (self.config.hidden as u32, self.config.norm_eps, self.weights.norm_offset);
        let (w, b) = (&self.weights, &self.buffers);
        let wanted = view.logits_tokens.slice(start as usize, num as usize);
        let norms = &self.kernels.rms_norm;
        norms.rms_norm(&self.stream, b.last, b.residual, w.final_norm, Some(wanted), num, hidden, eps, offset)?;
        let shape = Shape { m: num, n: w.head_rows as u32, k: hidden, accumulates: false };
        self.gemm.run(&self.stream, b.logits, b.last, w.head, shape)
    }
}

fn prefill_row(step: &StepInput<'_>, row: u32) -> Row {
    let at = row as usize;
    Row { row, query_len: step.cu_seqlens[at + 1] - step.cu_seqlens[at], context_len: step.context_lens[at] }
}

/// Whether one work list holds the chunks of decode rows with these lengths and of those that pad
/// them to `rows`: a padding row has one token, hence one chunk.
fn fits_padded(context_lens: &[u32], rows: u32, chunk: u32) -> bool {
    let num_padding = u64::from(rows) - context_lens.len() as u64;
    let num_real: u64 = context_lens.iter().map(|&len| u64::from(num_chunks(len, chunk))).sum();
    num_real + num_padding <= u64::from(DECODE_CHUNKS_MAX)
}

/// Runs of decode rows whose chunks fit the work space.
fn decode_splits(context_lens: &[u32], chunk: u32) -> Vec<(u32, u32)> {
    let mut splits = Vec::new();
    let (mut first, mut chunks) = (0, 0);
    for (row, &len) in (0..).zip(context_lens) {
        let more = num_chunks(len, chunk);
        if row > first && chunks + more > DECODE_CHUNKS_MAX {
            splits.push((first, row - first));
            (first, chunks) = (row, 0);
        }
        chunks += more;
    }
    let num = context_lens.len() as u32;
    if num > first {
        splits.push((first, num - first));
    }
    splits
}

#[cfg(test)]
mod tests {
    use overnight_kernels::attention_decode::reference::cut;

    use super::*;
    use crate::cuda::graphs::BUCKETS;

    #[test]
    fn decode_rows_are_split_where_their_chunks_exceed_the_work_space() {
        assert_eq!(decode_splits(&[], 512), []);
        assert_eq!(decode_splits(&[1, 513, 40_000], 512), [(0, 3)]);
        let long = 512 * (DECODE_CHUNKS_MAX / 2);
        assert_eq!(decode_splits(&[long, long, 1, long], 512), [(0, 2), (2, 2)]);
        assert_eq!(decode_splits(&[2 * long + 512, 1], 512), [(0, 1), (1, 1)], "a row is never cut");
    }

    /// The chunks that the plan lists for a step in the graph that holds it.
    fn num_listed(context_lens: &[u32], rows: u32, chunk: u32) -> usize {
        let padded = context_lens.iter().copied().chain(std::iter::repeat(1)).take(rows as usize);
        padded.map(|len| cut(0, len, chunk, 0).len()).sum()
    }

    fn bucket(num_rows: u32) -> u32 {
        BUCKETS.into_iter().find(|&rows| rows >= num_rows).expect("a recorded size")
    }

    #[test]
    fn a_step_takes_a_graph_only_when_its_padding_fits_the_work_list_too() {
        let (chunk, fits) =
            (768, |num_rows: usize| fits_padded(&vec![9 * 768; num_rows], bucket(num_rows as u32), 768));
        // Nine chunks each: the rows alone fit in every case but the last two, the padding does not.
        assert!([1, 64, 256, 768, 832, 896].into_iter().all(fits));
        assert!(![897, 898, 909, 910, 911, 1023, 1024].into_iter().any(fits));
        assert_eq!(num_listed(&vec![9 * chunk; 910], 1024, chunk), 8190 + 114);
        let exact = vec![8 * chunk; 1024];
        assert!(fits_padded(&exact, 1024, chunk), "8,192 chunks fill the list");
        assert!(!fits_padded(&[&exact[1..], &[9 * chunk]].concat(), 1024, chunk));
        assert!(
            fits_padded(&[&exact[1..], &[8 * chunk + chunk / 2 - 1]].concat(), 1024, chunk),
            "a short tail is no chunk"
        );
        assert!(!fits_padded(&[u32::MAX; 1024], 1024, 64), "no sum wraps round");
    }

    #[test]
    fn steps_that_fit_list_no_more_chunks_than_there_is_room_for() {
        let room = DECODE_CHUNKS_MAX as usize;
        let mut num_at_the_edge = 0;
        for chunk in [512, 640, 768, 1024] {
            for tail in [0, 1, chunk / 2 - 1, chunk / 2] {
                let listed_by_row: Vec<usize> =
                    (0..=64).map(|num| cut(0, num * chunk + tail, chunk, 0).len()).collect();
                for num_rows in 1..=1024u32 {
                    let rows = bucket(num_rows);
                    // As many chunks a row as fill the list, one fewer and one more.
                    let full = (DECODE_CHUNKS_MAX / num_rows).clamp(2, 63);
                    for num in full - 1..=full + 1 {
                        let context_lens = vec![num * chunk + tail; num_rows as usize];
                        let listed_real = num_rows as usize * listed_by_row[num as usize];
                        let listed = listed_real + (rows - num_rows) as usize;
                        let fits = fits_padded(&context_lens, rows, chunk);
                        assert_eq!(fits, listed <= room, "{num_rows} rows of {num} chunks of {chunk} and {tail}");
                        num_at_the_edge += usize::from(listed_real <= room && listed > room);
                    }
                }
            }
        }
        assert!(num_at_the_edge > 100, "{num_at_the_edge} steps of which the padding alone is too much");
    }
}
