//! Checks a step before it is computed: a wrong index must be an error, not another row's data.

use crate::Error;
use crate::model::StepInput;

/// Errors with [`Error::Step`] and the first fault.
pub(crate) fn check(
    step: &StepInput<'_>,
    num_blocks: usize,
    block_size: usize,
    vocab_rows: usize,
) -> Result<(), Error> {
    let wrong = |what: String| Err(Error::Step(what));
    let tokens = step.token_ids.len();
    let rows = step.context_lens.len();
    if step.positions.len() != tokens || step.slot_mapping.len() != tokens {
        return wrong(format!(
            "{tokens} tokens, {} positions and {} slots",
            step.positions.len(),
            step.slot_mapping.len()
        ));
    }
    let prefix = |starts: &[u32], end: usize| {
        starts.len() == rows + 1
            && starts[0] == 0
            && starts[rows] as usize == end
            && starts.windows(2).all(|pair| pair[0] <= pair[1])
    };
    if !prefix(step.cu_seqlens, tokens) || !prefix(step.block_table_starts, step.block_tables.len()) {
        return wrong("cu_seqlens or block_table_starts do not divide the tokens or blocks into rows".to_owned());
    }
    if let Some(id) = step.token_ids.iter().find(|&&id| id as usize >= vocab_rows) {
        return wrong(format!("token id {id} of a vocabulary of {vocab_rows}"));
    }
    let slots = num_blocks * block_size;
    if let Some(slot) = step.slot_mapping.iter().find(|&&slot| slot as usize >= slots) {
        return wrong(format!("slot {slot} of {slots}"));
    }
    if let Some(block) = step.block_tables.iter().find(|&&block| block as usize >= num_blocks) {
        return wrong(format!("block {block} of {}", num_blocks));
    }
    for row in 0..rows {
        let blocks = (step.block_table_starts[row + 1] - step.block_table_starts[row]) as usize;
        let context = step.context_lens[row] as usize;
        if context > blocks * block_size {
            return wrong(format!("row {row} has {context} tokens in {blocks} blocks of {}", block_size));
        }
        let range = step.cu_seqlens[row] as usize..step.cu_seqlens[row + 1] as usize;
        if let Some(position) = step.positions[range].iter().find(|&&position| position as usize >= context) {
            return wrong(format!("row {row} has position {position} beyond its context of {context}"));
        }
    }
    let rising = step.logits_tokens.windows(2).all(|pair| pair[0] < pair[1]);
    if !rising || step.logits_tokens.last().is_some_and(|&token| token as usize >= tokens) {
        return wrong("logits_tokens are not rising indices of tokens".to_owned());
    }
    Ok(())
}
