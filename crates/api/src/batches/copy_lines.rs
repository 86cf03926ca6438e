//! A new input file of selected lines of a batch, byte for byte.

use std::collections::BTreeSet;

use bytes::{BufMut, BytesMut};
use overnight_blobs::{BlobWriter, ObjectName, lines};
use overnight_store::{File, FilePurpose, Job, NewFile};
use overnight_types::{FileId, ItemIndex, ItemState, OutcomeKind, ShardIndex, chain};
use overnight_worker::items::{self, ItemQuery, ItemRef, ItemView, RetryFilter};

use super::retry::unknown_custom_id;
use crate::error::{ApiError, Result};
use crate::state::Inner;

const ITEMS_PER_READ: u32 = 1_000;
const SHARDS_PER_READ: u32 = 200;

/// Indices of the items that match every list that is not empty. None of them completed.
pub(super) async fn select(state: &Inner, job: &Job, filter: &RetryFilter) -> Result<BTreeSet<u64>> {
    let (store, blobs) = (state.parts.store.as_ref(), &state.parts.blobs);
    let outcomes = match filter.outcomes.as_slice() {
        [] => &[OutcomeKind::Failed, OutcomeKind::Cancelled, OutcomeKind::Expired],
        given => given,
    };
    let states: Vec<ItemState> = outcomes.iter().filter_map(|outcome| state_of(*outcome)).collect();
    let has_code = |item: &ItemView| {
        filter.error_codes.is_empty() || item.error_code.as_ref().is_some_and(|code| filter.error_codes.contains(code))
    };
    let mut selected = BTreeSet::new();
    if !filter.custom_ids.is_empty() {
        for custom_id in &filter.custom_ids {
            let found = items::find(store, blobs, job, &ItemRef::CustomId(custom_id.clone())).await?;
            let item = found.ok_or_else(|| unknown_custom_id(custom_id))?.view;
            if states.contains(&item.state) && has_code(&item) {
                selected.insert(item.index);
            }
        }
        return Ok(selected);
    }
    for item_state in states {
        let mut after = None;
        loop {
            let query = ItemQuery { state: Some(item_state), code: None, after, limit: ITEMS_PER_READ };
            let page = items::list(store, blobs, job, &query).await?;
            after = page.items.last().map(|item| ItemIndex(item.index));
            selected.extend(page.items.iter().filter(|item| has_code(item)).map(|item| item.index));
            if !page.has_more {
                break;
            }
        }
    }
    Ok(selected)
}

fn state_of(outcome: OutcomeKind) -> Option<ItemState> {
    match outcome {
        OutcomeKind::Completed => None,
        OutcomeKind::Failed => Some(ItemState::Failed),
        OutcomeKind::Cancelled => Some(ItemState::Cancelled),
        OutcomeKind::Expired => Some(ItemState::Expired),
    }
}

/// Writes the lines and records them as a batch input file.
pub(super) async fn copy(state: &Inner, job: &Job, selected: &BTreeSet<u64>) -> Result<File> {
    let id = FileId::new();
    let mut writer = state.parts.blobs.writer(&ObjectName::file(id)).await?;
    if let Err(error) = copy_shards(state, job, selected, &mut writer).await {
        if let Err(abort) = writer.abort().await {
            tracing::warn!(file.id = %id, cause = chain(&abort), "leftover of a copy stays for the sweep");
        }
        return Err(error);
    }
    let written = writer.finish().await?;
    let seconds = state.parts.config.batch_file_expires_after.as_secs();
    let new = NewFile {
        id,
        filename: format!("{}_retry.jsonl", job.id),
        purpose: FilePurpose::Batch,
        bytes: written.bytes,
        sha256: written.sha256,
        expires_after_s: (seconds > 0).then_some(seconds),
    };
    Ok(state.parts.store.insert_file(new).await?)
}

/// Reads only shards that hold a selected item, one at a time.
async fn copy_shards(state: &Inner, job: &Job, selected: &BTreeSet<u64>, writer: &mut BlobWriter) -> Result<()> {
    let mut next = 0;
    while next < job.num_shards {
        let shards = state.parts.store.list_shards(job.id, ShardIndex(next), SHARDS_PER_READ).await?;
        let Some(last) = shards.last() else { break };
        next = last.cut.shard.0 + 1;
        for cut in shards.iter().map(|shard| shard.cut) {
            let first = cut.first_item.0;
            let wanted: BTreeSet<u64> = selected.range(first..first + u64::from(cut.num_items)).copied().collect();
            if wanted.is_empty() {
                continue;
            }
            let range = cut.byte_offset..cut.byte_offset + cut.byte_len;
            let bytes = state.parts.blobs.read_range(&ObjectName::file(job.input_file_id), range).await?;
            let mut copied = BytesMut::new();
            for (index, line) in (first..).zip(lines::items(&bytes, cut.byte_offset, cut.first_line)) {
                if wanted.contains(&index) {
                    let content =
                        line.content.ok_or_else(|| ApiError::internal("a validated line is over the limit"))?;
                    copied.put_slice(content);
                    copied.put_u8(b'\n');
                }
            }
            writer.write(copied.freeze()).await?;
        }
    }
    Ok(())
}
