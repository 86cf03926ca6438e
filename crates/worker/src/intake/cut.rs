//! Cuts items into shards while they stream by.
//!
//! A shard ends at so many items or so many bytes, with at least one item. A file
//! with few such shards is cut finer, which is known only when it ends or is long
//! enough; until then both cuts are kept.

use overnight_store::NewShard;
use overnight_types::{ItemIndex, Limits, ShardIndex};
use serde::{Deserialize, Serialize};

/// Cuts in progress; saved between pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cutter {
    coarse: Cut,
    /// `None` once the file is known to be long.
    fine: Option<Cut>,
    /// A file with fewer coarse shards is cut finer.
    coarse_min: u32,
    num_items: u64,
}

/// One way to cut.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Cut {
    items_max: u32,
    bytes_max: u64,
    /// Shards that were cut and not handed out yet.
    closed: Vec<Open>,
    /// How many were handed out.
    num_settled: u32,
    open: Open,
}

/// A shard that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Open {
    first_item: u64,
    num_items: u32,
    first_line: u64,
    offset: u64,
    end: u64,
}

impl Cutter {
    /// From the start of a file.
    pub fn new(limits: &Limits) -> Self {
        let cut = |items_max: u32| Cut {
            items_max: items_max.max(1),
            bytes_max: limits.shard_bytes_max,
            closed: Vec::new(),
            num_settled: 0,
            open: Open { first_item: 0, num_items: 0, first_line: 1, offset: 0, end: 0 },
        };
        let (coarse, fine) = (cut(limits.shard_items_max), Some(cut(limits.small_shard_items_max)));
        Self { coarse, fine, coarse_min: limits.small_file_shards, num_items: 0 }
    }

    /// How many items there were.
    pub fn num_items(&self) -> u64 {
        self.num_items
    }

    /// Takes the next item's line: its number, first byte, and the byte after it.
    /// Blank lines before it were passed over: they go to the shard before.
    #[inline]
    pub fn item(&mut self, line: u64, offset: u64, end: u64) {
        self.coarse.item(self.num_items, line, offset, end);
        if let Some(fine) = &mut self.fine {
            fine.item(self.num_items, line, offset, end);
            // The coarse shard that is open has an item, so it counts.
            if self.coarse.closed.len() + 1 >= self.coarse_min as usize {
                self.fine = None;
            }
        }
        self.num_items += 1;
    }

    /// Shards that are certain now, in order, each once.
    pub fn settled(&mut self) -> Vec<NewShard> {
        match self.fine {
            Some(_) => Vec::new(),
            None => self.coarse.settle(),
        }
    }

    /// The file ends here: the rest of the shards.
    pub fn finish(&mut self, end: u64) -> Vec<NewShard> {
        let cut = self.fine.as_mut().unwrap_or(&mut self.coarse);
        if cut.open.num_items > 0 {
            cut.open.end = end;
            cut.closed.push(cut.open);
            cut.open.num_items = 0;
        } else if let Some(last) = cut.closed.last_mut() {
            last.end = end;
        }
        cut.settle()
    }

    /// Shards in all, once the file has ended.
    pub fn num_shards(&self) -> u32 {
        self.fine.as_ref().unwrap_or(&self.coarse).num_settled
    }
}

impl Cut {
    fn item(&mut self, item: u64, line: u64, offset: u64, end: u64) {
        let open = &mut self.open;
        let full = open.num_items >= self.items_max || (open.num_items > 0 && end - open.offset > self.bytes_max);
        if full {
            open.end = offset;
            self.closed.push(*open);
            *open = Open { first_item: item, num_items: 0, first_line: line, offset, end: offset };
        }
        open.num_items += 1;
        open.end = end;
    }

    fn settle(&mut self) -> Vec<NewShard> {
        let first = self.num_settled;
        self.num_settled += u32::try_from(self.closed.len()).expect("a piece has few shards");
        let shard = |(index, cut): (u32, Open)| NewShard {
            shard: ShardIndex(index),
            first_item: ItemIndex(cut.first_item),
            num_items: cut.num_items,
            first_line: cut.first_line,
            byte_offset: cut.offset,
            byte_len: cut.end - cut.offset,
        };
        (first..).zip(self.closed.drain(..)).map(shard).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts lines of these lengths (0: a blank line of one byte), settling after each `settle_every`.
    fn cut(limits: &Limits, lines: &[u64], settle_every: usize) -> Vec<NewShard> {
        let mut cutter = Cutter::new(limits);
        let (mut offset, mut shards) = (0, Vec::new());
        for (index, &len) in lines.iter().enumerate() {
            let end = offset + len.max(1);
            if len > 0 {
                cutter.item(index as u64 + 1, offset, end);
            }
            offset = end;
            if index % settle_every == 0 {
                shards.extend(cutter.settled());
                let saved = serde_json::to_string(&cutter).unwrap();
                cutter = serde_json::from_str(&saved).unwrap();
            }
        }
        shards.extend(cutter.finish(offset));
        assert_eq!(cutter.num_shards() as usize, shards.len());
        shards
    }

    fn limits() -> Limits {
        Limits {
            shard_items_max: 8,
            shard_bytes_max: 100,
            small_shard_items_max: 2,
            small_file_shards: 3,
            ..Limits::default()
        }
    }

    #[track_caller]
    fn assert_covers(shards: &[NewShard], lines: &[u64]) {
        let (mut item, mut offset) = (0, 0);
        for (index, shard) in shards.iter().enumerate() {
            assert_eq!((shard.shard.0 as usize, shard.first_item.0, shard.byte_offset), (index, item, offset));
            assert!(shard.num_items > 0);
            item += u64::from(shard.num_items);
            offset += shard.byte_len;
        }
        assert_eq!(item, lines.iter().filter(|len| **len > 0).count() as u64);
        assert_eq!(offset, if item == 0 { 0 } else { lines.iter().map(|len| len.max(&1)).sum() });
    }

    #[test]
    fn short_file_is_cut_finer_and_long_file_is_not() {
        for (num_lines, widest) in [(1, 1), (2, 2), (16, 2), (17, 8), (24, 8), (80, 8)] {
            let lines = vec![5; num_lines];
            let shards = cut(&limits(), &lines, 7);
            assert_covers(&shards, &lines);
            assert_eq!(shards.iter().map(|shard| shard.num_items).max(), Some(widest), "{num_lines} lines");
        }
    }

    #[test]
    fn shard_ends_at_its_bytes_but_holds_at_least_one_item() {
        let lines = [50, 50, 1, 300, 99, 1, 1, 50, 51];
        let limits = Limits { small_file_shards: 0, ..limits() };
        let shards = cut(&limits, &lines, 1);
        assert_covers(&shards, &lines);
        assert_eq!(shards.iter().map(|shard| shard.num_items).collect::<Vec<_>>(), [2, 1, 1, 2, 2, 1]);
    }

    #[test]
    fn blank_lines_belong_to_a_shard_and_are_counted_as_lines() {
        let lines = [0, 0, 10, 0, 10, 0, 10, 0];
        let shards = cut(&limits(), &lines, 1);
        assert_covers(&shards, &lines);
        assert_eq!((shards[0].first_line, shards[1].first_line), (1, 7));
        assert!(cut(&limits(), &[0, 0], 1).is_empty());
    }

    #[test]
    fn settling_at_any_time_gives_the_same_shards() {
        let lines: Vec<u64> = (0..200).map(|i| (i * 37) % 60).collect();
        let once = cut(&limits(), &lines, 1_000);
        assert_covers(&once, &lines);
        for every in [1, 2, 3, 17] {
            assert_eq!(cut(&limits(), &lines, every), once);
        }
    }
}
