//! Properties of the nouns: words read back, ids keep their order and kind, bitmaps
//! are sets, moves of states are closed.

use overnight_types::{
    BatchRequestId, Bitmap, EventId, FileId, ItemIndex, ItemState, JobId, JobState, OutcomeCounts, OutcomeKind,
    ShardState, Timestamp, WorkerId, chain,
};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

#[test]
fn every_word_of_every_enum_reads_back_and_is_its_json() {
    fn check<T>(all: &[T], word: impl Fn(&T) -> &'static str)
    where
        T: std::str::FromStr + PartialEq + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
    {
        let words: BTreeSet<_> = all.iter().map(&word).collect();
        assert_eq!(words.len(), all.len(), "two values share a word");
        for value in all {
            assert_eq!(word(value).parse::<T>().ok().as_ref(), Some(value));
            let json = serde_json::to_string(value).unwrap();
            assert_eq!(json, format!("{:?}", word(value)));
            assert_eq!(&serde_json::from_str::<T>(&json).unwrap(), value);
        }
        assert!("no such word".parse::<T>().is_err());
    }
    check(JobState::ALL, JobState::as_str);
    check(ShardState::ALL, ShardState::as_str);
    check(ItemState::ALL, ItemState::as_str);
    check(OutcomeKind::ALL, OutcomeKind::as_str);
    check(overnight_types::ErrorCode::ALL, overnight_types::ErrorCode::as_str);
}

/// From every state of a job that runs, some legal way leads to an end, and no move
/// leads from a state to itself.
#[test]
fn every_job_can_come_to_an_end() {
    for start in JobState::ALL {
        let mut reached = BTreeSet::from([*start]);
        loop {
            let next: Vec<_> = reached
                .iter()
                .filter(|state| !state.is_terminal())
                .flat_map(|state| JobState::ALL.iter().filter(|next| state.can_become(**next)))
                .copied()
                .collect();
            let before = reached.len();
            reached.extend(next);
            if reached.len() == before {
                break;
            }
        }
        assert!(reached.iter().any(|state| state.is_terminal()), "{start} never ends");
        assert!(!start.can_become(*start));
    }
}

#[test]
fn failed_validation_is_never_left() {
    assert!(JobState::ALL.iter().all(|next| !JobState::Failed.can_become(*next)));
    let to_failed: Vec<_> = JobState::ALL.iter().filter(|state| state.can_become(JobState::Failed)).collect();
    assert_eq!(to_failed, [&JobState::Validating], "failed means that validation failed and nothing else");
}

#[test]
fn done_shard_is_only_reopened() {
    let next: Vec<_> = ShardState::ALL.iter().filter(|next| ShardState::Done.can_become(**next)).collect();
    assert_eq!(next, [&ShardState::Ready]);
    assert!(!ShardState::Ready.can_become(ShardState::Done), "only a lease ends a shard");
}

#[test]
fn ids_made_later_sort_later() {
    let jobs: Vec<_> = (0..1_000).map(|_| JobId::new()).collect();
    assert!(jobs.is_sorted_by(|a, b| a < b));
    let texts: Vec<_> = jobs.iter().map(JobId::to_string).collect();
    assert!(texts.is_sorted(), "their texts sort alike");
}

#[test]
fn id_of_one_kind_is_no_id_of_another() {
    let text =
        [JobId::new().to_string(), FileId::new().to_string(), WorkerId::new().to_string(), EventId::new().to_string()];
    for (kind, text) in text.iter().enumerate() {
        let read = [
            text.parse::<JobId>().is_ok(),
            text.parse::<FileId>().is_ok(),
            text.parse::<WorkerId>().is_ok(),
            text.parse::<EventId>().is_ok(),
        ];
        assert!(read.iter().enumerate().all(|(other, ok)| *ok == (other == kind)), "{text}: {read:?}");
    }
}

#[test]
fn error_chain_says_each_cause_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("could not lease")]
    struct Outer(#[source] Inner);
    #[derive(Debug, thiserror::Error)]
    #[error("disk full")]
    struct Inner;
    assert_eq!(chain(&Outer(Inner)), "could not lease: disk full");
}

proptest! {
    #[test]
    fn bitmap_is_a_set_of_its_ones(
        (num_bits, a, b) in (1..200u32).prop_flat_map(|bits| (
            Just(bits),
            prop::collection::btree_set(0..bits, 0..50),
            prop::collection::btree_set(0..bits, 0..50),
        ))
    ) {
        let of = |ones: &BTreeSet<u32>| {
            let mut bitmap = Bitmap::new(num_bits);
            ones.iter().for_each(|&bit| bitmap.set(bit));
            bitmap
        };
        let (left, right) = (of(&a), of(&b));
        prop_assert_eq!(left.ones().collect::<BTreeSet<_>>(), a.clone());
        prop_assert_eq!(left.ones().count() + left.zeros().count(), num_bits as usize);
        prop_assert_eq!(left.count_ones() as usize, a.len());
        prop_assert_eq!(left.intersects(&right), !a.is_disjoint(&b));
        let mut union = left.clone();
        union.union(&right);
        prop_assert_eq!(union.ones().collect::<BTreeSet<_>>(), a.union(&b).copied().collect::<BTreeSet<_>>());
        let mut rest = left.clone();
        rest.subtract(&right);
        prop_assert_eq!(rest.ones().collect::<BTreeSet<_>>(), a.difference(&b).copied().collect::<BTreeSet<_>>());
        prop_assert_eq!(union.is_full(), union.count_ones() == num_bits);
        prop_assert_eq!(Bitmap::from_bytes(left.as_bytes(), num_bits), Some(left));
    }

    #[test]
    fn bitmap_reads_no_bytes_that_it_would_not_write(bytes in prop::collection::vec(any::<u8>(), 0..8), num_bits in 0..64u32) {
        if let Some(bitmap) = Bitmap::from_bytes(&bytes, num_bits) {
            prop_assert_eq!(bitmap.as_bytes(), &bytes[..]);
            prop_assert!(bitmap.count_ones() <= num_bits);
        } else {
            let fits = bytes.len() == num_bits.div_ceil(8) as usize;
            prop_assert!(!fits || !num_bits.is_multiple_of(8), "only a wrong length or a stray bit is refused");
        }
    }

    #[test]
    fn request_id_reads_back(item in any::<u64>()) {
        let id = BatchRequestId { job: JobId::new(), item: ItemIndex(item) };
        prop_assert_eq!(id.to_string().parse::<BatchRequestId>(), Ok(id));
    }

    #[test]
    fn no_text_panics_an_id(text in ".{0,60}") {
        let _ = text.parse::<JobId>();
        let _ = text.parse::<BatchRequestId>();
        let _ = format!("batch_req_{text}").parse::<BatchRequestId>();
        let _ = format!("batch_{text}").parse::<JobId>();
    }

    #[test]
    fn moments_move_and_compare_in_microseconds(micros in 0..4_000_000_000_000_000i64, by in 0..1_000_000_000u64) {
        let at = Timestamp::from_micros(micros);
        let later = at.plus(Duration::from_micros(by));
        prop_assert_eq!(later.since(at), Duration::from_micros(by));
        prop_assert_eq!(at.since(later), Duration::ZERO);
        prop_assert_eq!((at.micros(), at.unix_seconds()), (micros, micros / 1_000_000));
        let json = serde_json::to_string(&at).unwrap();
        prop_assert_eq!(serde_json::from_str::<Timestamp>(&json).unwrap(), at);
    }

    #[test]
    fn unfinished_items_are_what_no_outcome_counts(
        completed in 0..1_000u64, failed in 0..1_000u64, cancelled in 0..1_000u64, expired in 0..1_000u64, rest in 0..1_000u64
    ) {
        let total = completed + failed + cancelled + expired + rest;
        let counts = OutcomeCounts { total, completed, failed, cancelled, expired };
        prop_assert_eq!(counts.unfinished(), rest);
    }
}
