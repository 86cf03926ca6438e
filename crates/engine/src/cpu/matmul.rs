//! Matrix products of a step, cut into tasks for the pool.
//!
//! A task is a block of rows, few enough that their activations stay in the second-level cache,
//! by a run of weight groups. Each output is computed whole by one task, so the cut does not
//! show in the result.

use crate::cpu::packed::{Data, LANES, Packed};
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::simd::quant::{self, Target};
use crate::cpu::simd::{Isa, dense, vector};

/// Bytes of activations that a task keeps at hand.
const ROW_BLOCK_BYTES: usize = 192 * 1024;
/// Tasks per thread and row block, so that a slow thread is not waited for long.
const TASKS_PER_THREAD: usize = 8;

/// Activations of a step in both forms; which is filled depends on the weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) rows: usize,
    /// `[rows, cols]`.
    pub(crate) dense: &'a [f32],
    pub(crate) quantized: quant::Acts<'a>,
}

/// What the feed-forward layer puts between its two products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    Gelu,
    Silu,
}

/// `out[t, column + n] = sum over k of input[t, k] * weights[n, k]` for each matrix and its column;
/// outputs beyond `stride` are left out.
pub(crate) fn matmul(
    pool: &mut Pool,
    isa: Isa,
    inputs: Inputs<'_>,
    matrices: &[(&Packed, usize)],
    out: &mut [f32],
    stride: usize,
) {
    let cuts: Vec<Cut> = matrices
        .iter()
        .map(|(m, column)| Cut::new(m, m.rows.min(stride - column), inputs.rows, pool.threads()))
        .collect();
    let out = Parts::new(out);
    pool.run(cuts.iter().map(Cut::tasks).sum(), &|mut index, _| {
        for ((matrix, column), cut) in matrices.iter().zip(&cuts) {
            if index < cut.tasks() {
                let target = Target { out: &out, stride, column: *column, width: matrix.rows.min(stride - column) };
                let (rows, groups) = cut.task(index);
                // SAFETY: tasks differ in rows or groups, and matrices in columns.
                unsafe { product(isa, matrix, inputs, rows, groups, &target) };
                return;
            }
            index -= cut.tasks();
        }
    });
}

/// `gate = act(input · gate weights) * (input · up weights)`; `gate` and `up` are `[rows, ffn]`.
pub(crate) fn matmul_gated(
    pool: &mut Pool,
    isa: Isa,
    inputs: Inputs<'_>,
    (gate_weights, up_weights): (&Packed, &Packed),
    kind: Gate,
    (gate, up): (&mut [f32], &mut [f32]),
) {
    let width = gate_weights.rows;
    let cut = Cut::new(gate_weights, width, inputs.rows, pool.threads());
    let (gate, up) = (Parts::new(gate), Parts::new(up));
    pool.run(cut.tasks(), &|index, _| {
        let (rows, groups) = cut.task(index);
        let columns = groups.start * LANES..(groups.end * LANES).min(width);
        // SAFETY: tasks differ in rows or groups; within a task the uses follow each other.
        unsafe {
            for (weights, out) in [(gate_weights, &gate), (up_weights, &up)] {
                let target = Target { out, stride: width, column: 0, width };
                product(isa, weights, inputs, rows.clone(), groups.clone(), &target);
            }
            for row in rows {
                let range = row * width + columns.start..row * width + columns.end;
                let (gate, up) = (gate.slice(range.clone()), up.slice(range));
                match kind {
                    Gate::Gelu => vector::gelu_mul(isa, gate, up),
                    Gate::Silu => vector::silu_mul(isa, gate, up),
                }
            }
        }
    });
}

/// # Safety
/// No other task writes these rows and groups of the target.
unsafe fn product(
    isa: Isa,
    matrix: &Packed,
    inputs: Inputs<'_>,
    rows: std::ops::Range<usize>,
    groups: std::ops::Range<usize>,
    target: &Target<'_, '_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match &matrix.data {
            Data::Quant(weights) => quant::run(isa, weights, inputs.quantized, rows, groups, target),
            dense => dense::run(isa, dense, inputs.dense, matrix.cols, rows, groups, target),
        }
    }
}

/// How a product is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    rows: usize,
    row_block: usize,
    groups: usize,
    group_block: usize,
}

impl Cut {
    /// For the first `width` outputs of a matrix.
    fn new(matrix: &Packed, width: usize, rows: usize, threads: usize) -> Self {
        let bytes = if matches!(matrix.data, Data::Quant(_)) { 2 } else { 4 };
        // A multiple of the kernels' six rows.
        let row_block = (ROW_BLOCK_BYTES / (bytes * matrix.cols)).max(6) / 6 * 6;
        let groups = width.div_ceil(LANES);
        // A multiple of the kernels' eight groups for one row.
        let group_block = groups.div_ceil(threads * TASKS_PER_THREAD).next_multiple_of(8).min(groups);
        Self { rows, row_block, groups, group_block }
    }

    fn group_blocks(&self) -> usize {
        self.groups.div_ceil(self.group_block)
    }

    fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_block) * self.group_blocks()
    }

    fn task(&self, index: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (row, group) =
            (index / self.group_blocks() * self.row_block, index % self.group_blocks() * self.group_block);
        (row..(row + self.row_block).min(self.rows), group..(group + self.group_block).min(self.groups))
    }
}
