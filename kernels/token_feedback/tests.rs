//! Fed tokens against a plain loop.

use super::*;
use crate::Dtype;
use crate::testing::bed;

#[test]
fn named_tokens_take_their_choices_and_the_others_stay() {
    let Some(bed) = bed("named_tokens_take_their_choices_and_the_others_stay", Dtype::F16) else { return };
    let kernels = TokenFeedback::load(&bed.modules).expect("loaded");
    for num in [0u32, 1, 255, 256, 700] {
        let choices: Vec<u32> = (0..num.max(1)).map(|at| at * 31 + 5).collect();
        let pairs: Vec<u32> = (0..num).flat_map(|at| [2 * at + 1, num - 1 - at]).collect();
        let token_ids = bed.poisoned::<u32>(2 * num as usize + 3);
        let (dpairs, dchoices) = (bed.upload(&[pairs.clone(), vec![0, 0]].concat()), bed.upload(&choices));
        kernels.feed(&bed.stream, token_ids.slice(), dpairs.slice(), dchoices.slice(), num).expect("launched");
        let mut want = vec![u32::MAX; 2 * num as usize + 3];
        pairs.chunks(2).for_each(|pair| want[pair[0] as usize] = choices[pair[1] as usize]);
        assert_eq!(bed.download(&token_ids), want);
    }
    let short = bed.poisoned::<u32>(3);
    let result = kernels.feed(&bed.stream, short.slice(), short.slice(), short.slice(), 2);
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
}
