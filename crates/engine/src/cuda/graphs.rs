//! Decode graphs: a step of decode rows, recorded once for each of a few row counts.
//!
//! A step takes the smallest graph that holds its rows; rows beyond them are padding: one token
//! on a block of their own that nobody reads, written nowhere.

use std::collections::BTreeMap;

use overnight_kernels::graph::Graph;

use crate::Error;
use crate::cuda::packing::{Layout, StepView};
use crate::cuda::{CudaModel, during};
use crate::model::StepInput;

/// Row counts that graphs are recorded for: closer together where a product's time follows its rows.
pub(super) const BUCKETS: [u32; 25] =
    [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 1024];

/// The recorded graphs by row count.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    by_rows: BTreeMap<u32, Graph>,
}

impl Graphs {
    /// The smallest recorded row count that holds `num_rows`.
    pub(super) fn bucket(&self, num_rows: u32) -> Option<u32> {
        self.by_rows.range(num_rows..).next().map(|(&rows, _)| rows)
    }

    pub(super) fn len(&self) -> usize {
        self.by_rows.len()
    }
}

/// Row counts to record when a step has at most `num_rows` rows, the largest first; that number
/// is one of them.
pub(super) fn buckets(num_rows: u32, logits_rows: u32) -> Vec<u32> {
    let most = num_rows.min(logits_rows).min(BUCKETS[BUCKETS.len() - 1]);
    let below = BUCKETS.iter().rev().copied().filter(|&rows| rows < most);
    std::iter::once(most).chain(below).collect()
}

fn layout(rows: u32) -> Layout {
    Layout { num_tokens: rows, num_rows: rows, num_decode: rows, num_tiles: 0, num_logits: rows }
}

impl CudaModel {
    /// Records all graphs, the largest first. Nothing of it runs.
    pub(super) fn record_graphs(&mut self) -> Result<(), Error> {
        for rows in buckets(self.limits.num_rows, self.limits.logits_rows) {
            let view = self.packing.view(layout(rows));
            let stream = self.stream.clone();
            // A first run outside finds the layouts of all products; it may allocate, a recording may not.
            let recorded = self.prepare_products(rows).and_then(|()| {
                Graph::record(&stream, || {
                    self.layers(&view, &[(0, rows)])?;
                    self.head(&view, 0, rows)
                })
            });
            let graph =
                recorded.map_err(during("could not record the decode graphs (--enforce-eager does without)"))?;
            graph.upload(&self.stream).map_err(during("could not upload a decode graph"))?;
            self.graphs.by_rows.insert(rows, graph);
        }
        Ok(())
    }

    /// Computes a step of decode rows with the graph of `rows` rows, which was recorded.
    pub(super) fn replay(&mut self, step: &StepInput<'_>, rows: u32, dummy_block: u32) -> Result<StepView, Error> {
        let view = self.packing.pack(&self.stream, step, layout(rows), &[], dummy_block)?;
        self.feed_tokens(&view, step)?;
        self.graphs.by_rows[&rows].launch(&self.stream).map_err(during("could not replay a decode graph"))?;
        Ok(StepView { has_logits: true, ..view })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_recorded_for_what_steps_can_have_largest_first() {
        assert_eq!(buckets(8, 1024), [8, 4, 2, 1]);
        assert_eq!(buckets(10, 1024), [10, 8, 4, 2, 1]);
        assert_eq!(buckets(4096, 1024)[0], 1024);
        assert_eq!(buckets(1024, 512)[0], 512);
        assert!(BUCKETS.is_sorted());
    }
}
