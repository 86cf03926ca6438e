//! Cuts items into shards while they stream by.
//!
//! A shard ends at so many items or so many bytes, with at least one item. A file
//! with few such shards is cut finer, which is known only when it ends or is long
//! enough; until then both cuts are kept.

use overnight_blobs::lines::Line;
use overnight_blobs::lines_hash::LinesHash;
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
    /// `None` when a release without hashes saved it half grown.
    #[serde(default)]
    lines_hash: Option<LinesHash>,
}

impl Open {
    fn starting_at(first_item: u64, first_line: u64, offset: u64) -> Self {
        let lines_hash = Some(LinesHash::default());
        Self { first_item, num_items: 0, first_line, offset, end: offset, lines_hash }
    }
}

impl Cutter {
    /// From the start of a file.
    pub fn new(limits: &Limits) -> Self {
        let cut = |items_max: u32| Cut {
            items_max: items_max.max(1),
            bytes_max: limits.shard_bytes_max,
            closed: Vec::new(),
            num_settled: 0,
            open: Open::starting_at(0, 1, 0),
        };
        let (coarse, fine) = (cut(limits.shard_items_max), Some(cut(limits.small_shard_items_max)));
        Self { coarse, fine, coarse_min: limits.small_file_shards, num_items: 0 }
    }

    /// How many items there were.
    pub fn num_items(&self) -> u64 {
        self.num_items
    }

    /// Takes the next item's line. Blank lines before it were passed over: between two
    /// shards they belong to none, however many they are.
    #[inline]
    pub fn item(&mut self, line: &Line<'_>) {
        // A line over the limit has no content; its file fails anyway.
        let hash = line.content.map_or(0, LinesHash::of_line);
        self.coarse.item(self.num_items, line, hash);
        if let Some(fine) = &mut self.fine {
            fine.item(self.num_items, line, hash);
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

    /// The file has ended: the rest of the shards.
    pub fn finish(&mut self) -> Vec<NewShard> {
        let cut = self.fine.as_mut().unwrap_or(&mut self.coarse);
        if cut.open.num_items > 0 {
            cut.closed.push(cut.open);
            cut.open.num_items = 0;
        }
        cut.settle()
    }

    /// Shards in all, once the file has ended.
    pub fn num_shards(&self) -> u32 {
        self.fine.as_ref().unwrap_or(&self.coarse).num_settled
    }
}

impl Cut {
    fn item(&mut self, item: u64, line: &Line<'_>, hash: u64) {
        let open = &mut self.open;
        let full = open.num_items >= self.items_max || (open.num_items > 0 && line.end - open.offset > self.bytes_max);
        if full {
            self.closed.push(*open);
        }
        // A shard starts and ends with an item: it is read whole, so what lies around its
        // items (gigabytes of newlines, perhaps) must not be part of it.
        if full || open.num_items == 0 {
            *open = Open::starting_at(item, line.number, line.offset);
        }
        open.num_items += 1;
        open.end = line.end;
        if let Some(lines_hash) = &mut open.lines_hash {
            lines_hash.push(hash);
        }
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
            lines_hash: cut.lines_hash.map(LinesHash::value),
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
                let content = index.to_le_bytes();
                cutter.item(&Line { number: index as u64 + 1, offset, end, content: Some(&content) });
            }
            offset = end;
            if index % settle_every == 0 {
                shards.extend(cutter.settled());
                let saved = serde_json::to_string(&cutter).unwrap();
                cutter = serde_json::from_str(&saved).unwrap();
            }
        }
        shards.extend(cutter.finish());
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
        // Index, line number, first byte and end of each item's line.
        let mut offset = 0;
        let items = lines.iter().enumerate().filter_map(|(index, len)| {
            let start = offset;
            offset += len.max(&1);
            (*len > 0).then_some((index, index as u64 + 1, start, offset))
        });
        let items: Vec<(usize, u64, u64, u64)> = items.collect();
        let mut rest = items.as_slice();
        for (index, shard) in shards.iter().enumerate() {
            assert_eq!(shard.shard.0 as usize, index);
            assert_eq!(shard.first_item.0 as usize, items.len() - rest.len());
            assert!(shard.num_items > 0);
            let (own, after) = rest.split_at(shard.num_items as usize);
            let (_, line, start, _) = own[0];
            let end = own[own.len() - 1].3;
            assert_eq!((shard.first_line, shard.byte_offset, shard.byte_len), (line, start, end - start), "{index}");
            let mut hash = LinesHash::default();
            own.iter().for_each(|(index, ..)| hash.push(LinesHash::of_line(&index.to_le_bytes())));
            assert_eq!(shard.lines_hash, Some(hash.value()), "shard {index}");
            rest = after;
        }
        assert!(rest.is_empty(), "{rest:?}");
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
    fn blank_lines_around_a_shard_are_counted_as_lines_and_not_read() {
        let lines = [0, 0, 10, 0, 10, 0, 10, 0];
        let shards = cut(&limits(), &lines, 1);
        assert_covers(&shards, &lines);
        assert_eq!((shards[0].first_line, shards[1].first_line), (3, 7));
        assert!(cut(&limits(), &[0, 0], 1).is_empty());
    }

    #[test]
    fn cut_that_an_earlier_release_saved_goes_on_without_a_hash() {
        let mut cutter = Cutter::new(&limits());
        let line = |number: u64| Line { number, offset: (number - 1) * 5, end: number * 5, content: Some(b"1234") };
        cutter.item(&line(1));
        let saved = serde_json::to_string(&cutter).unwrap();
        let earlier = saved.replace(&format!(r#","lines_hash":{}"#, hash_of(&saved)), "");
        assert_ne!(saved, earlier);
        let mut cutter: Cutter = serde_json::from_str(&earlier).unwrap();
        (2..=3).for_each(|number| cutter.item(&line(number)));
        let hashed: Vec<bool> = cutter.finish().iter().map(|shard| shard.lines_hash.is_some()).collect();
        assert_eq!(hashed, [false, true], "only the shard that was half grown");
    }

    /// The number that a saved cutter of one line holds twice.
    fn hash_of(saved: &str) -> &str {
        let rest = saved.split_once(r#""lines_hash":"#).unwrap().1;
        rest.split(|byte: char| !byte.is_ascii_digit()).next().unwrap()
    }

    #[test]
    fn no_number_of_blank_lines_makes_a_shard_larger_than_its_bytes() {
        for few in [0, 3] {
            let limits = Limits { small_file_shards: few, ..limits() };
            let mut lines = vec![0; 500];
            for at in [0, 250, 260, 499] {
                lines[at] = 10;
            }
            for every in [1, 1_000] {
                let shards = cut(&limits, &lines, every);
                assert_covers(&shards, &lines);
                assert!(shards.iter().all(|shard| shard.byte_len <= limits.shard_bytes_max), "{shards:?}");
            }
        }
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
