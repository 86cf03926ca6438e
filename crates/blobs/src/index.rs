//! The index from custom id to item: one object per job, entries of 12 bytes
//! (64-bit keyed hash, item index) sorted by hash after a head of 16 bytes.
//!
//! It is made by an external merge: sorted runs of bounded length are written as
//! objects, then merged with one piece of each in memory. It answers with
//! candidates; whoever asks reads the input line again to be sure.
//! Hash: SipHash-2-4 (Aumasson, Bernstein, 2012) of the id's decoded text, keyed
//! by the job, so that ids which collide in one job do not in another.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bytes::{Buf, Bytes};
use futures::StreamExt;
use futures::stream::BoxStream;
use overnight_types::{ItemIndex, JobId};
use siphasher::sip::SipHasher24;

use crate::layout::ObjectName;
use crate::{Blobs, Error};

/// Size of an entry.
pub const ENTRY_BYTES: u64 = 12;
/// Most items that an index can hold.
pub const ITEMS_MAX: u64 = u32::MAX as u64;
const MAGIC: &[u8; 8] = b"OVNIDX01";
const HEAD_BYTES: u64 = 16;
/// Entries of one read of a lookup.
const WINDOW: u64 = 4_096;
/// Bytes in memory during a merge, over all runs.
const MERGE_BYTES: u64 = 32 << 20;

/// One custom id: its hash and its item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Of the decoded text.
    pub hash: u64,
    /// The item's index.
    pub item: u32,
}

/// The key of one job's hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexKey([u8; 16]);

impl IndexKey {
    /// The key of a job.
    pub fn of(job: JobId) -> Self {
        Self(*job.uuid().as_bytes())
    }

    /// The hash of a custom id's decoded text.
    #[inline]
    pub fn hash(&self, text: &[u8]) -> u64 {
        SipHasher24::new_with_key(&self.0).hash(text)
    }
}

/// Sorts entries and gives the bytes of a run.
pub fn encode_run(entries: &mut [Entry]) -> Bytes {
    entries.sort_unstable();
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES as usize);
    entries.iter().for_each(|entry| push(&mut bytes, *entry));
    Bytes::from(bytes)
}

fn push(bytes: &mut Vec<u8>, entry: Entry) {
    bytes.extend_from_slice(&entry.hash.to_be_bytes());
    bytes.extend_from_slice(&entry.item.to_be_bytes());
}

fn read_entry(mut bytes: &[u8]) -> Entry {
    Entry { hash: bytes.get_u64(), item: bytes.get_u32() }
}

/// Two items whose custom ids have the same hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Twin {
    /// The later item.
    pub later: u32,
    /// The first item of all with this hash.
    pub first: u32,
    /// Their hash.
    pub hash: u64,
}

/// Items whose hash another item before them has too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Twins {
    /// The first of them by item.
    pub kept: Vec<Twin>,
    /// How many there are in all.
    pub total: u64,
}

/// What a merge reads.
#[derive(Debug)]
pub struct Runs<'a> {
    /// Where the runs are.
    pub blobs: &'a Blobs,
    /// Runs written before, each sorted, and the bytes of each.
    pub written: Vec<(ObjectName, u64)>,
    /// The last run, in memory, sorted.
    pub last: &'a [Entry],
}

/// Merges runs; writes the index to `out` when given, and finds twins, keeping at
/// most `twins_max` of them. Memory is bounded whatever the number of entries.
pub async fn merge(runs: Runs<'_>, out: Option<(&Blobs, ObjectName)>, twins_max: usize) -> Result<Twins, Error> {
    let num_entries = runs.last.len() as u64 + runs.written.iter().map(|(_, bytes)| bytes / ENTRY_BYTES).sum::<u64>();
    let mut writer = match out {
        Some((blobs, name)) => Some(blobs.writer(&name).await?),
        None => None,
    };
    let mut pending = [&MAGIC[..], &num_entries.to_be_bytes()].concat();
    let mut finder = TwinFinder { twins_max, heap: BinaryHeap::new(), total: 0, previous: None };
    let mut merged = Merged::start(runs).await?;
    while let Some(entry) = merged.next().await? {
        finder.see(entry);
        if let Some(writer) = &mut writer {
            push(&mut pending, entry);
            if pending.len() >= 64 << 10 {
                writer.append(&pending).await?;
                pending.clear();
            }
        }
    }
    if let Some(mut writer) = writer {
        writer.append(&pending).await?;
        writer.finish().await?;
    }
    Ok(Twins { kept: finder.heap.into_sorted_vec(), total: finder.total })
}

/// Entries of all runs in order.
struct Merged<'a> {
    last: std::slice::Iter<'a, Entry>,
    runs: Vec<RunReader>,
    heads: BinaryHeap<Reverse<(Entry, usize)>>,
}

impl<'a> Merged<'a> {
    async fn start(runs: Runs<'a>) -> Result<Self, Error> {
        // Two pieces of each run are in memory at once.
        let piece_entries = MERGE_BYTES / 2 / ENTRY_BYTES / (runs.written.len() as u64).max(1);
        let piece_bytes = piece_entries.clamp(256, 1 << 16) * ENTRY_BYTES;
        let mut merged = Self { last: runs.last.iter(), runs: Vec::new(), heads: BinaryHeap::new() };
        for (name, bytes) in runs.written {
            let stream = runs.blobs.stream_by(&name, 0..bytes, piece_bytes);
            merged.runs.push(RunReader { stream, piece: Bytes::new() });
        }
        for index in 0..merged.runs.len() {
            merged.refill(index).await?;
        }
        if let Some(&entry) = merged.last.next() {
            merged.heads.push(Reverse((entry, usize::MAX)));
        }
        Ok(merged)
    }

    async fn next(&mut self) -> Result<Option<Entry>, Error> {
        let Some(Reverse((entry, run))) = self.heads.pop() else { return Ok(None) };
        if run != usize::MAX {
            self.refill(run).await?;
        } else if let Some(&next) = self.last.next() {
            self.heads.push(Reverse((next, usize::MAX)));
        }
        Ok(Some(entry))
    }

    async fn refill(&mut self, run: usize) -> Result<(), Error> {
        if let Some(entry) = self.runs[run].next().await? {
            self.heads.push(Reverse((entry, run)));
        }
        Ok(())
    }
}

struct RunReader {
    stream: BoxStream<'static, Result<Bytes, Error>>,
    piece: Bytes,
}

impl RunReader {
    async fn next(&mut self) -> Result<Option<Entry>, Error> {
        if self.piece.is_empty() {
            match self.stream.next().await {
                Some(piece) => self.piece = piece?,
                None => return Ok(None),
            }
        }
        // Pieces and runs are whole entries.
        let entry = read_entry(&self.piece);
        self.piece.advance(ENTRY_BYTES as usize);
        Ok(Some(entry))
    }
}

/// Keeps the first twins by item.
struct TwinFinder {
    twins_max: usize,
    heap: BinaryHeap<Twin>,
    total: u64,
    /// Hash of the last entry, and the first item that has it.
    previous: Option<(u64, u32)>,
}

impl TwinFinder {
    #[inline]
    fn see(&mut self, entry: Entry) {
        match self.previous {
            Some((hash, first)) if hash == entry.hash => {
                self.total += 1;
                self.heap.push(Twin { later: entry.item, first, hash });
                if self.heap.len() > self.twins_max {
                    self.heap.pop();
                }
            }
            _ => self.previous = Some((entry.hash, entry.item)),
        }
    }
}

/// Items whose custom id may be this decoded text: nearly always none or one.
/// [`Error::Missing`] when the job has no index (yet).
pub async fn find(blobs: &Blobs, job: JobId, text: &[u8]) -> Result<Vec<ItemIndex>, Error> {
    let name = ObjectName::index(job);
    let size = blobs.size(&name).await?.ok_or_else(|| Error::Missing { name: name.to_string() })?;
    let num_entries = size.saturating_sub(HEAD_BYTES) / ENTRY_BYTES;
    let head = blobs.read_range(&name, 0..HEAD_BYTES.min(size)).await?;
    if head.get(..8) != Some(MAGIC) || head.get(8..16) != Some(&num_entries.to_be_bytes()[..]) {
        return Err(Error::damaged(&name, "its head does not fit its size"));
    }
    let index = IndexFile { blobs, name, num_entries };
    let hash = IndexKey::of(job).hash(text);
    let mut at = index.lower_bound(hash).await?;
    let mut found = Vec::new();
    loop {
        let entries = index.read(at, at + 64).await?;
        let same = entries.iter().take_while(|entry| entry.hash == hash);
        found.extend(same.map(|entry| ItemIndex(u64::from(entry.item))));
        at += 64;
        if entries.last().is_none_or(|last| last.hash != hash) {
            return Ok(found);
        }
    }
}

struct IndexFile<'a> {
    blobs: &'a Blobs,
    name: ObjectName,
    num_entries: u64,
}

impl IndexFile<'_> {
    /// Position of the first entry whose hash is not below this one.
    async fn lower_bound(&self, hash: u64) -> Result<u64, Error> {
        let (mut low, mut high) = (0, self.num_entries);
        // Hashes are spread evenly, so the first guess nearly always hits.
        let mut guess = ((u128::from(hash) * u128::from(self.num_entries)) >> 64) as u64;
        loop {
            let start = guess.saturating_sub(WINDOW / 2).clamp(low, high);
            let end = (start + WINDOW).min(high);
            let entries = self.read(start, end).await?;
            let inside = entries.partition_point(|entry| entry.hash < hash) as u64;
            if inside == 0 && start > low {
                high = start;
            } else if inside == end - start && end < high {
                low = end;
            } else {
                return Ok(start + inside);
            }
            guess = low + (high - low) / 2;
        }
    }

    async fn read(&self, start: u64, end: u64) -> Result<Vec<Entry>, Error> {
        let end = end.min(self.num_entries);
        let range = HEAD_BYTES + start.min(end) * ENTRY_BYTES..HEAD_BYTES + end * ENTRY_BYTES;
        let bytes = self.blobs.read_range(&self.name, range).await?;
        Ok(bytes.chunks_exact(ENTRY_BYTES as usize).map(read_entry).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(hash: u64, item: u32) -> Entry {
        Entry { hash, item }
    }

    async fn write_runs(blobs: &Blobs, job: JobId, runs: &[Vec<Entry>]) -> Vec<(ObjectName, u64)> {
        let mut written = Vec::new();
        for (number, run) in runs.iter().enumerate() {
            let name = ObjectName::intake_run(job, number as u32);
            let bytes = encode_run(&mut run.clone());
            written.push((name, bytes.len() as u64));
            blobs.put(&name, bytes).await.unwrap();
        }
        written
    }

    #[tokio::test]
    async fn every_custom_id_is_found_again_and_no_other() {
        let (blobs, job) = (Blobs::memory(), JobId::new());
        let key = IndexKey::of(job);
        for num_items in [0u32, 1, 63, 64, 65, 20_000] {
            let all: Vec<Entry> =
                (0..num_items).map(|item| entry(key.hash(format!("id {item}").as_bytes()), item)).collect();
            let (first, rest) = all.split_at(all.len() / 3);
            let (second, last) = rest.split_at(rest.len() / 2);
            let mut last = last.to_vec();
            last.sort_unstable();
            let written = write_runs(&blobs, job, &[first.to_vec(), second.to_vec()]).await;
            let runs = Runs { blobs: &blobs, written, last: &last };
            let twins = merge(runs, Some((&blobs, ObjectName::index(job))), 10).await.unwrap();
            assert_eq!(twins, Twins::default());
            for item in (0..num_items).step_by(97) {
                let found = find(&blobs, job, format!("id {item}").as_bytes()).await.unwrap();
                assert_eq!(found, [ItemIndex(u64::from(item))]);
            }
            assert!(find(&blobs, job, b"another").await.unwrap().is_empty());
        }
    }

    // Field report 10: over the whole file, also across runs.
    #[tokio::test]
    async fn twins_are_found_across_runs_and_the_first_are_kept() {
        let (blobs, job) = (Blobs::memory(), JobId::new());
        let written =
            write_runs(&blobs, job, &[vec![entry(5, 0), entry(9, 1), entry(5, 2)], vec![entry(7, 3), entry(5, 4)]])
                .await;
        let last = [entry(7, 6), entry(8, 5)];
        let twins = merge(Runs { blobs: &blobs, written, last: &last }, None, 2).await.unwrap();
        let kept = [Twin { later: 2, first: 0, hash: 5 }, Twin { later: 4, first: 0, hash: 5 }];
        assert_eq!(twins, Twins { kept: kept.to_vec(), total: 3 });
    }

    #[tokio::test]
    async fn uneven_hashes_are_found_too() {
        let (blobs, job) = (Blobs::memory(), JobId::new());
        let hash = IndexKey::of(job).hash(b"x");
        let mut all: Vec<Entry> = (0..30_000).map(|item| entry(u64::from(item) * 3, item)).collect();
        all.extend((0..200).map(|item| entry(hash, 30_000 + item)));
        all.sort_unstable();
        let runs = Runs { blobs: &blobs, written: Vec::new(), last: &all };
        merge(runs, Some((&blobs, ObjectName::index(job))), 0).await.unwrap();
        let found = find(&blobs, job, b"x").await.unwrap();
        assert_eq!(found, (30_000..30_200).map(ItemIndex).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn cut_index_is_damaged_and_absent_one_is_missing() {
        let (blobs, job) = (Blobs::memory(), JobId::new());
        assert!(find(&blobs, job, b"x").await.unwrap_err().is_missing());
        blobs
            .put(&ObjectName::index(job), Bytes::from_static(b"OVNIDX01\0\0\0\0\0\0\0\x02abcdefghijkl"))
            .await
            .unwrap();
        assert!(matches!(find(&blobs, job, b"x").await, Err(Error::Damaged { .. })));
    }
}
