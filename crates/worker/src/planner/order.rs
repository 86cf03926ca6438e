//! The order in which prepared items run: prompts that share a beginning together,
//! and among those that share the same the longest first.
//!
//! A prompt's place in the tree of all prompts is its [`Chain`]: a hash for each granule
//! of tokens and everything before it. Two prompts share as many granules as their
//! chains have in common. A branch counts as long as its longest item, so that long work
//! starts early without tearing a shared beginning apart.
//! Pure: it sees chains and lengths, never text, jobs or time.

use std::cmp::Reverse;

/// Tokens of a granule: the smallest usual KV block, so that whatever an engine can share is seen.
const GRANULE_TOKENS: usize = 16;
/// Granules of a chain. Prompts that agree on this many count as sharing everything; it
/// bounds the depth of the tree and the size of a chain.
const GRANULES_MAX: usize = 256;
/// Output tokens that are expected of a request that may generate more: what comes of
/// a large limit is seldom known and seldom all of it.
const EXPECTED_OUTPUT_MAX: u32 = 256;

/// A prompt's path from the root of the tree.
pub(crate) type Chain = Vec<u64>;

/// The chain of a prompt. Equal hashes of different prompts cost order, nothing else.
pub(crate) fn chain_of(prompt: &[u32]) -> Chain {
    let mut hash: u64 = 0;
    let granules = prompt.chunks_exact(GRANULE_TOKENS).take(GRANULES_MAX);
    let step = |granule: &[u32]| {
        for &token in granule {
            // SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
            hash = (hash ^ u64::from(token)).wrapping_add(0x9e37_79b9_7f4a_7c15);
            hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            hash ^= hash >> 31;
        }
        hash
    };
    granules.map(step).collect()
}

/// Tokens that a request is expected to take.
pub(crate) fn length_of(num_prompt_tokens: usize, max_tokens: u32) -> u32 {
    u32::try_from(num_prompt_tokens).unwrap_or(u32::MAX).saturating_add(max_tokens.min(EXPECTED_OUTPUT_MAX))
}

/// What the order of an item depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sortable<'a, T> {
    /// Its job's; lower goes first, whatever the prompts.
    pub(crate) priority: i32,
    /// Empty where nothing is known of the prompt.
    pub(crate) chain: &'a [u64],
    /// Tokens expected.
    pub(crate) length: u32,
    /// Decides among equals; unique.
    pub(crate) item: T,
}

/// The items in order. `last` is the chain of the item that ran last: its branch goes on
/// before others begin.
pub(crate) fn arrange<T: Ord + Copy>(mut items: Vec<Sortable<'_, T>>, last: &[u64]) -> Vec<T> {
    items.sort_unstable_by(|a, b| (a.priority, a.chain, a.item).cmp(&(b.priority, b.chain, b.item)));
    let mut order = Vec::with_capacity(items.len());
    for equals in items.chunk_by(|a, b| a.priority == b.priority) {
        arrange_branch(equals, 0, last, &mut order);
    }
    order
}

/// Appends a branch, whose items share `depth` granules and are sorted by chain.
fn arrange_branch<T: Ord + Copy>(items: &[Sortable<'_, T>], depth: usize, last: &[u64], order: &mut Vec<T>) {
    let (Some(first), Some(end)) = (items.first(), items.last()) else { return };
    // Granules that all have in common are passed in one stride.
    let depth = depth + common(&first.chain[depth..], &end.chain[depth..]);
    let mut branches: Vec<&[Sortable<'_, T>]> = items
        .chunk_by(|a, b| a.chain.len() > depth && b.chain.len() > depth && a.chain[depth] == b.chain[depth])
        .collect();
    let goes_on = |branch: &[Sortable<'_, T>]| {
        let of = branch[0].chain;
        of.len() > depth && last.len() > depth && of[..=depth] == last[..=depth]
    };
    branches.sort_by_cached_key(|branch| {
        let longest = branch.iter().map(|item| (Reverse(item.length), item.item)).min();
        (!goes_on(branch), longest)
    });
    for branch in branches {
        match branch {
            [only] => order.push(only.item),
            _ => arrange_branch(branch, depth, last, order),
        }
    }
}

fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(items: &[(i32, &[u64], u32)], last: &[u64]) -> Vec<usize> {
        let sortable =
            |(item, of): (usize, &(i32, _, u32))| Sortable { priority: of.0, chain: of.1, length: of.2, item };
        arrange(items.iter().enumerate().map(sortable).collect(), last)
    }

    #[test]
    fn chains_agree_as_far_as_whole_granules_do() {
        let prompt: Vec<u32> = (0..50).collect();
        let mut other = prompt.clone();
        other[40] = 7;
        let (a, b) = (chain_of(&prompt), chain_of(&other));
        assert_eq!((a.len(), common(&a, &b)), (3, 2));
        assert!(chain_of(&prompt[..15]).is_empty());
    }

    #[test]
    fn shared_beginnings_stay_together_and_the_longest_goes_first() {
        let items: [(i32, &[u64], u32); 5] =
            [(0, &[1, 5], 10), (0, &[2], 50), (0, &[1, 6], 90), (0, &[2], 60), (0, &[], 95)];
        assert_eq!(order(&items, &[]), [4, 2, 0, 3, 1]);
    }

    #[test]
    fn branch_under_way_goes_on_and_priority_goes_before_all() {
        let items: [(i32, &[u64], u32); 4] = [(0, &[1, 5], 10), (0, &[2], 50), (0, &[1, 6], 9), (-1, &[3], 1)];
        assert_eq!(order(&items, &[1, 7]), [3, 0, 2, 1]);
    }

    #[test]
    fn what_says_nothing_of_its_prompt_keeps_its_order() {
        let items: Vec<(i32, &[u64], u32)> = vec![(0, &[], 0); 20];
        assert_eq!(order(&items, &[1]), (0..20).collect::<Vec<_>>());
    }

    proptest! {
        /// Every branch of the tree is contiguous, and the order of arrival does not matter.
        #[test]
        fn every_branch_is_contiguous_whatever_the_order_of_arrival(
            chains in prop::collection::vec((prop::collection::vec(0u64..3, 0..5), 0u32..9), 0..40),
            seed in any::<u64>(),
        ) {
            let sortable = |item: usize| {
                Sortable { priority: 0, chain: &chains[item].0, length: chains[item].1, item }
            };
            let order = arrange((0..chains.len()).map(sortable).collect(), &[]);
            let mut shuffled: Vec<usize> = (0..chains.len()).collect();
            shuffled.sort_by_key(|&item| chain_of(&[item as u32 ^ seed as u32; 16])[0]);
            prop_assert_eq!(&arrange(shuffled.into_iter().map(sortable).collect(), &[]), &order);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..chains.len()).collect::<Vec<_>>());
            for depth in 1..5 {
                let prefixes: Vec<_> = order.iter().map(|&item| chains[item].0.get(..depth)).collect();
                let mut seen: Vec<&[u64]> = Vec::new();
                for run in prefixes.chunk_by(|a, b| a == b) {
                    let Some(prefix) = run[0] else { continue };
                    prop_assert!(!seen.contains(&prefix), "{:?} is torn apart in {:?}", prefix, order);
                    seen.push(prefix);
                }
            }
        }
    }
}
