//! From a shard's bytes to items ready to run: split into lines, read the
//! envelope, map the body. Pure work on the processor, run on blocking threads.

use bytes::Bytes;
use overnight_blobs::envelope::Envelope;
use overnight_blobs::lines;
use overnight_blobs::lines_hash::LinesHash;
use overnight_engine::request::Class;
use overnight_store::NewShard;
use overnight_types::{Bitmap, Endpoint, JobId, Timestamp};
use uuid::Uuid;

use crate::generate::{Input, Request};
use crate::mapper::{Answer, Mapper, PrepareOptions, Prepared, Refusal};
use crate::planner::{self, Chain, Offer};

/// One input line of a shard, by the item's bit.
#[derive(Debug, Clone)]
pub(crate) struct InputLine {
    pub(crate) bit: u32,
    pub(crate) content: Bytes,
}

/// Cuts a shard's bytes into the lines of its undone items.
///
/// Errors in words when there are not as many lines as items, or their bytes are
/// others: the input is not what intake read.
pub(crate) fn split(bytes: &Bytes, cut: &NewShard, done: &Bitmap) -> Result<Vec<InputLine>, String> {
    let mut found = 0u32;
    let mut hash = LinesHash::default();
    let mut undone = Vec::with_capacity((cut.num_items - done.count_ones().min(cut.num_items)) as usize);
    for line in lines::items(bytes, cut.byte_offset, cut.first_line) {
        let bit = found;
        found += 1;
        // Lines over the limit never passed intake, so every line has its content here.
        let Some(content) = line.content else { return Err(format!("line {} is too long", line.number)) };
        hash.push(LinesHash::of_line(content));
        if bit >= cut.num_items || done.get(bit) {
            continue;
        }
        undone.push(InputLine { bit, content: bytes.slice_ref(content) });
    }
    if found != cut.num_items {
        return Err(format!("{found} lines where validation found {}", cut.num_items));
    }
    if cut.lines_hash.is_some_and(|validated| validated != hash.value()) {
        return Err(format!("{found} lines from line {} on are not those that were validated", cut.first_line));
    }
    Ok(undone)
}

/// What every item of a shard is prepared with.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    pub(crate) mapper: Mapper,
    pub(crate) endpoint: Endpoint,
    pub(crate) job: JobId,
    pub(crate) first_item: u64,
    pub(crate) round: u32,
    /// Unique to the lease; with the item's index it names the answer.
    pub(crate) lease: Uuid,
}

/// An item after preparation.
#[derive(Debug)]
pub(crate) struct ReadyItem {
    pub(crate) bit: u32,
    /// The JSON string token as it stands in the line.
    pub(crate) custom_id: Bytes,
    pub(crate) work: Work,
}

/// Items prepared in one go.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) items: Vec<ReadyItem>,
    /// Bits of the lines after them, which were too much for this time.
    pub(crate) left: Vec<u32>,
}

/// What is to be done for an item.
#[derive(Debug)]
pub(crate) enum Work {
    /// Run it. Boxed: it is many times larger than the others.
    Run(Box<Run>),
    /// Its answer is a refusal.
    Refused(Refusal),
    /// Its line is not what intake read; in words.
    Changed(String),
}

/// An item to run: what the window takes, and what waits for the answer.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) offer: Offer,
    pub(crate) answer: Answer,
    /// The seed that the samples depend on, when it is known.
    pub(crate) seed: Option<u64>,
}

impl Recipe {
    /// Prepares lines in order, until what has to be kept of them reaches `bytes_max`: a body
    /// of a few bytes may ask for many samples of a long prompt. One item may pass it.
    pub(crate) fn prepare(&self, lines: &[InputLine], bytes_max: u64) -> Piece {
        let created = Timestamp::now().unix_seconds();
        let lease = self.lease.simple().to_string();
        let mut items = Vec::with_capacity(lines.len());
        let mut num_bytes = 0;
        for line in lines {
            if num_bytes >= bytes_max {
                break;
            }
            let item = self.prepare_line(line, &lease, created);
            if let Work::Run(run) = &item.work {
                num_bytes += run.offer.num_bytes();
            }
            items.push(item);
        }
        let left = lines[items.len()..].iter().map(|line| line.bit).collect();
        Piece { items, left }
    }

    fn prepare_line(&self, line: &InputLine, lease: &str, created: i64) -> ReadyItem {
        let (custom_id, body) = match Envelope::parse(&line.content) {
            Ok(Envelope { custom_id: Some(custom_id), body: Some(body), .. }) => {
                (line.content.slice_ref(custom_id.token), body.token)
            }
            Ok(_) => return changed(line.bit, "custom_id or body is missing".to_owned()),
            Err(fault) => return changed(line.bit, fault.to_string()),
        };
        let item = self.first_item + u64::from(line.bit);
        let request_id = format!("{lease}{:06x}", line.bit);
        let options = PrepareOptions {
            class: Class::Job,
            allow_stream: false,
            seed: seed_of(self.job, self.round, item),
            request_id: &request_id,
            created,
        };
        let work = match self.mapper.prepare(self.endpoint, body, options) {
            Ok(prepared) => Work::Run(Box::new(run(line.bit, prepared))),
            Err(refusal) => Work::Refused(refusal),
        };
        ReadyItem { bit: line.bit, custom_id, work }
    }
}

fn changed(bit: u32, why: String) -> ReadyItem {
    ReadyItem { bit, custom_id: Bytes::from_static(b"null"), work: Work::Changed(why) }
}

/// The seed of an item that names none: the same in every try of a round, so that
/// a crash does not change its text; below 2^53, so that any JSON reader keeps it.
fn seed_of(job: JobId, round: u32, item: u64) -> u64 {
    let (high, low) = job.uuid().as_u64_pair();
    let mut seed = 0;
    for word in [high, low, u64::from(round), item] {
        // SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
        seed = (seed ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        seed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        seed = (seed ^ (seed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        seed ^= seed >> 31;
    }
    seed >> 11
}

fn run(bit: u32, prepared: Prepared) -> Run {
    let Prepared { requests, answer, seed_used, .. } = prepared;
    let (chain, length) = place_of(&requests);
    let offer = Offer { bit, merge: planner::merge_key(&requests), chain, length, requests };
    Run { offer, answer, seed: seed_used }
}

/// Where an item stands in the order: by its first prompt and its longest request. A body
/// for a remote engine says nothing of it.
fn place_of(requests: &[Request]) -> (Chain, u32) {
    let tokens = || {
        requests.iter().filter_map(|request| match &request.input {
            Input::Tokens(tokens) => Some(tokens),
            Input::Body { .. } => None,
        })
    };
    let chain = tokens().next().map_or_else(Chain::new, |first| planner::chain_of(&first.prompt));
    let lengths = tokens().map(|tokens| planner::length_of(tokens.prompt.len(), tokens.stop.max_tokens));
    (chain, lengths.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use overnight_types::{ItemIndex, ShardIndex};

    use super::*;

    fn cut(num_items: u32, bytes: &[u8]) -> NewShard {
        NewShard {
            shard: ShardIndex(0),
            first_item: ItemIndex(0),
            num_items,
            first_line: 1,
            byte_offset: 0,
            byte_len: bytes.len() as u64,
            lines_hash: None,
        }
    }

    #[test]
    fn lines_of_done_items_are_left_out_and_blank_ones_do_not_count() {
        let bytes = Bytes::from_static(b"{\"a\":1}\n\n{\"b\":2}\r\n  \n{\"c\":3}");
        let mut done = Bitmap::new(3);
        done.set(1);
        let lines = split(&bytes, &cut(3, &bytes), &done).unwrap();
        let found: Vec<(u32, &[u8])> = lines.iter().map(|line| (line.bit, line.content.as_ref())).collect();
        assert_eq!(found, [(0, b"{\"a\":1}".as_slice()), (2, b"{\"c\":3}".as_slice())]);
    }

    #[test]
    fn another_number_of_lines_is_a_changed_input() {
        let bytes = Bytes::from_static(b"{}\n{}\n");
        assert!(split(&bytes, &cut(3, &bytes), &Bitmap::new(3)).is_err());
        assert!(split(&bytes, &cut(1, &bytes), &Bitmap::new(1)).is_err());
    }

    /// Also in a line whose item is done: nothing of such a shard can be trusted.
    #[test]
    fn another_byte_in_any_line_is_a_changed_input() {
        let bytes = Bytes::from_static(b"{\"a\":1}\n\n{\"a\":2}\n");
        let mut hash = LinesHash::default();
        [b"{\"a\":1}", b"{\"a\":2}"].iter().for_each(|line| hash.push(LinesHash::of_line(*line)));
        let cut = NewShard { lines_hash: Some(hash.value()), ..cut(2, &bytes) };
        let mut done = Bitmap::new(2);
        done.set(0);
        assert_eq!(split(&bytes, &cut, &done).unwrap().len(), 1);
        for at in [5, 14] {
            let mut changed = bytes.to_vec();
            assert!(changed[at].is_ascii_digit());
            changed[at] = b'3';
            let why = split(&changed.into(), &cut, &done).unwrap_err();
            assert!(why.contains("not those that were validated"), "{why}");
        }
    }

    /// A shard of many long bodies must not be in memory as requests all at once.
    #[test]
    fn piece_ends_where_its_requests_are_too_much() {
        let recipe = Recipe {
            mapper: Mapper::remote(None),
            endpoint: Endpoint::ChatCompletions,
            job: JobId::new(),
            first_item: 0,
            round: 1,
            lease: Uuid::nil(),
        };
        let content = |bit: u32| {
            let filler = "x".repeat(1_000);
            Bytes::from(format!(r#"{{"custom_id":"{bit}","body":{{"model":"m","messages":"{filler}"}}}}"#))
        };
        let lines: Vec<InputLine> = (3..8).map(|bit| InputLine { bit, content: content(bit) }).collect();
        let of = |bytes_max| {
            let piece = recipe.prepare(&lines, bytes_max);
            let bits: Vec<u32> = piece.items.iter().map(|item| item.bit).collect();
            assert!(piece.items.iter().all(|item| matches!(item.work, Work::Run(_))), "{piece:?}");
            (bits, piece.left)
        };
        assert_eq!(of(1), (vec![3], vec![4, 5, 6, 7]), "at least one");
        assert_eq!(of(3_500), (vec![3, 4, 5], vec![6, 7]));
        assert_eq!(of(1 << 20), (vec![3, 4, 5, 6, 7], vec![]));
    }

    #[test]
    fn drawn_seeds_differ_between_items_and_rounds_and_stay_exact_in_json() {
        let job = JobId::new();
        let mut seeds: Vec<u64> = (0..1_000).flat_map(|item| [seed_of(job, 1, item), seed_of(job, 2, item)]).collect();
        assert!(seeds.iter().all(|seed| *seed < 1 << 53));
        assert_eq!(seed_of(job, 1, 7), seed_of(job, 1, 7));
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 2_000);
    }
}
