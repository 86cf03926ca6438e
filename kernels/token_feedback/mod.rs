//! Chosen tokens of one step as inputs of the next, without a way through the host.

#[cfg(test)]
mod tests;

use crate::sources::Source;
use crate::{DeviceSlice, Error, Function, Launch, Modules, Stream};

/// The family's source.
pub const SOURCE: Source =
    Source::new("token_feedback", "token_feedback/token_feedback.cu", include_str!("token_feedback.cu"));

/// The family's kernels.
#[derive(Debug)]
pub struct TokenFeedback {
    feed: Function,
}

impl TokenFeedback {
    /// From the loaded modules.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        Ok(Self { feed: modules.function("token_feedback", "feed_tokens")? })
    }

    /// Writes `choices[pair[1]]` to `token_ids[pair[0]]` for the first `num` of `pairs`
    /// `[num, 2]`. The caller keeps both within their arrays and names no token twice; zero
    /// pairs do nothing. Errors with `Shape` when `pairs` is too short.
    pub fn feed(
        &self,
        stream: &Stream,
        token_ids: DeviceSlice<u32>,
        pairs: DeviceSlice<u32>,
        choices: DeviceSlice<u32>,
        num: u32,
    ) -> Result<(), Error> {
        if num == 0 {
            return Ok(());
        }
        pairs.expect_len(self.feed.name(), "pairs", 2 * num as usize)?;
        // SAFETY: pairs are long enough (checked above) and lead into both arrays, as the caller
        // has built them.
        unsafe {
            Launch::new(&self.feed)
                .grid(num.div_ceil(256))
                .cta(256)
                .arg(token_ids)
                .arg(pairs)
                .arg(choices)
                .arg(num)
                .run(stream)
        }
    }
}
