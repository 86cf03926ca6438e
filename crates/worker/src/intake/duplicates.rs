//! Proves duplicates: custom ids whose hashes are equal are read again from the
//! input and compared as decoded text, before one is reported.

use std::collections::HashMap;

use overnight_blobs::envelope::Envelope;
use overnight_blobs::index::Twins;
use overnight_blobs::lines;
use overnight_blobs::sha::Sha256;
use overnight_store::NewShard;
use overnight_types::Limits;

use super::check::cut;
use super::findings::{Findings, IntakeCode};
use super::source::{Source, SourceError};

/// Items whose custom id an earlier item has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Duplicates {
    /// The first of them, in line order.
    proved: Vec<Duplicate>,
    /// More of them, by their 64-bit hashes alone: only when so many were proved
    /// that no more would be kept.
    num_more: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Duplicate {
    line: u64,
    earlier_line: u64,
    shown: String,
}

impl Duplicates {
    pub(crate) fn add_to(self, findings: &mut Findings) {
        for Duplicate { line, earlier_line, shown } in self.proved {
            findings.add(IntakeCode::DuplicateCustomId, Some(line), Some("custom_id"), || {
                format!("the custom_id {shown:?} was used before, in line {earlier_line}")
            });
        }
        findings.count(IntakeCode::DuplicateCustomId, self.num_more);
    }
}

/// What is remembered of a line that was read again.
struct Seen {
    line: u64,
    sha256: [u8; 32],
    shown: String,
}

/// Reads the lines of twins again, each shard at most once, and keeps those whose
/// ids are really equal. `cuts` are all shards of the input.
pub async fn verify(
    source: &Source,
    cuts: &[NewShard],
    twins: Twins,
    limits: &Limits,
) -> Result<Duplicates, SourceError> {
    let mut items: Vec<u64> = twins.kept.iter().flat_map(|twin| [twin.first, twin.later]).map(u64::from).collect();
    items.sort_unstable();
    items.dedup();
    let seen = read_ids(source, cuts, &items, limits).await?;
    // By id: the first line that has it. Twins come in item order, each after the first of its hash.
    let mut first_lines: HashMap<[u8; 32], u64> = HashMap::new();
    for twin in &twins.kept {
        if let Some(first) = seen.get(&u64::from(twin.first)) {
            first_lines.entry(first.sha256).or_insert(first.line);
        }
    }
    let mut duplicates = Duplicates { proved: Vec::new(), num_more: twins.total - twins.kept.len() as u64 };
    for twin in &twins.kept {
        let Some(later) = seen.get(&u64::from(twin.later)) else { continue };
        let earlier_line = *first_lines.entry(later.sha256).or_insert(later.line);
        if earlier_line < later.line {
            duplicates.proved.push(Duplicate { line: later.line, earlier_line, shown: later.shown.clone() });
        }
    }
    Ok(duplicates)
}

/// Reads the custom ids of some items, given in order.
async fn read_ids(
    source: &Source,
    cuts: &[NewShard],
    items: &[u64],
    limits: &Limits,
) -> Result<HashMap<u64, Seen>, SourceError> {
    let mut seen = HashMap::with_capacity(items.len());
    let mut rest = items;
    while let Some(&item) = rest.first() {
        let index = cuts.partition_point(|cut| cut.first_item.0 + u64::from(cut.num_items) <= item);
        let Some(cut) = cuts.get(index) else { break };
        let end = cut.first_item.0 + u64::from(cut.num_items);
        let (here, after) = rest.split_at(rest.partition_point(|item| *item < end));
        rest = after;
        read_shard(source, cut, here, limits, &mut seen).await?;
    }
    Ok(seen)
}

async fn read_shard(
    source: &Source,
    cut: &NewShard,
    items: &[u64],
    limits: &Limits,
    seen: &mut HashMap<u64, Seen>,
) -> Result<(), SourceError> {
    use futures::StreamExt;
    let mut splitter = lines::LineSplitter::starting_at(cut.byte_offset, cut.first_line, limits.line_bytes_max);
    let mut chunks = source.stream(cut.byte_offset..cut.byte_offset + cut.byte_len);
    let mut item = cut.first_item.0;
    let mut take = |line: lines::Line<'_>| {
        if line.is_blank() {
            return;
        }
        if items.binary_search(&item).is_ok()
            && let Some(one) = line.content.and_then(|content| see(line.number, content))
        {
            seen.insert(item, one);
        }
        item += 1;
    };
    while let Some(chunk) = chunks.next().await {
        splitter.feed(&chunk?, |line| {
            take(line);
            std::ops::ControlFlow::Continue(())
        });
    }
    splitter.finish(take);
    Ok(())
}

fn see(line: u64, content: &[u8]) -> Option<Seen> {
    let id = Envelope::parse(content).ok()?.custom_id?;
    let text = id.text();
    Some(Seen { line, sha256: Sha256::of(&text), shown: cut(&String::from_utf8_lossy(&text)) })
}
