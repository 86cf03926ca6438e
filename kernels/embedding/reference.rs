//! The definition of the gather.

/// out `[token_ids.len(), hidden]` = rows `token_ids` of table `[vocab, hidden]`, times `scale`.
pub fn gather(table: &[f32], token_ids: &[u32], hidden: usize, scale: f32) -> Vec<f32> {
    let row = |&id: &u32| &table[id as usize * hidden..][..hidden];
    token_ids.iter().flat_map(row).map(|x| x * scale).collect()
}
