//! A job's states, how it may end, and the endpoints a job can be for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A word that is not one of a closed list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what}: {text:?}")]
pub struct UnknownWord {
    /// What the word should have named.
    pub what: &'static str,
    /// The word as given.
    pub text: String,
}

/// Declares an enum that is stored and shown as a word.
macro_rules! worded_enum {
    ($(#[$doc:meta])* $name:ident, $what:literal, { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $word)] $variant,)+ }

        impl $name {
            /// Every value, in the order of a life.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The word in the database and on the wire.
            pub const fn as_str(&self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $crate::job::UnknownWord;

            fn from_str(text: &str) -> Result<Self, $crate::job::UnknownWord> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text)
                    .ok_or_else(|| $crate::job::UnknownWord { what: $what, text: text.to_owned() })
            }
        }
    };
}
pub(crate) use worded_enum;

worded_enum!(
    /// Where a job stands. The words are those of the wire.
    JobState, "job state", {
    /// Set by create; intake moves it on when the whole input has been read.
    Validating = "validating",
    /// Set by intake when the input is faulty; terminal, nothing ran.
    Failed = "failed",
    /// Set by intake; the last committed shard, expiry or cancel moves it on.
    InProgress = "in_progress",
    /// Set when every item has its outcome or the window closed; finalize moves it on.
    Finalizing = "finalizing",
    /// Set by finalize when every item had its outcome; only a resume re-opens it.
    Completed = "completed",
    /// Set by finalize when the window closed first; only a resume re-opens it.
    Expired = "expired",
    /// Set by cancel; finalize moves it on once running items are done or dropped.
    Cancelling = "cancelling",
    /// Set by finalize after a cancel; only a resume re-opens it.
    Cancelled = "cancelled",
});

impl JobState {
    /// Whether one guarded update may take a job from this state to `next`.
    /// Re-opening by resume is included.
    pub const fn can_become(self, next: JobState) -> bool {
        use JobState::*;
        matches!(
            (self, next),
            (Validating, Failed | InProgress | Cancelling | Finalizing)
                | (InProgress, Finalizing | Cancelling)
                | (Finalizing, Completed | Expired)
                | (Cancelling, Cancelled)
                | (Completed | Expired, InProgress)
                | (Cancelled, InProgress | Validating)
        )
    }

    /// Whether nothing but an explicit resume moves the job from here.
    pub const fn is_terminal(self) -> bool {
        matches!(self, JobState::Failed | JobState::Completed | JobState::Expired | JobState::Cancelled)
    }
}

/// How a job that is being finalized will end; drawn when it enters
/// `finalizing` or `cancelling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Every item has its outcome.
    Completed,
    /// The window closed first: undone items get `batch_expired`.
    Expired,
    /// A cancel was accepted: undone items get `batch_cancelled`.
    Cancelled,
}

impl Ending {
    /// The terminal state that this ending leads to.
    pub const fn state(self) -> JobState {
        match self {
            Ending::Completed => JobState::Completed,
            Ending::Expired => JobState::Expired,
            Ending::Cancelled => JobState::Cancelled,
        }
    }
}

/// The API route that a job's items are for; its text is the wire's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// Every endpoint that is served.
    pub const ALL: &'static [Self] = &[Self::ChatCompletions, Self::Completions];

    /// OpenAI's batch endpoints that are not served; named in the refusal.
    pub const NOT_SERVED: &'static [&'static str] = &[
        "/v1/responses",
        "/v1/embeddings",
        "/v1/moderations",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/videos",
    ];

    /// The path, byte for byte as an item's `url` must be.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Endpoint {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .iter()
            .copied()
            .find(|endpoint| endpoint.as_str() == text)
            .ok_or_else(|| UnknownWord { what: "endpoint", text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_job_moves_only_by_reopening() {
        for state in JobState::ALL.iter().filter(|state| state.is_terminal()) {
            for next in JobState::ALL {
                let reopened = matches!(next, JobState::InProgress | JobState::Validating);
                assert!(!state.can_become(*next) || reopened, "{state} must not become {next}");
            }
        }
        assert!(JobState::ALL.iter().all(|next| !JobState::Failed.can_become(*next)));
    }

    #[test]
    fn every_word_reads_back() {
        for state in JobState::ALL {
            assert_eq!(state.as_str().parse(), Ok(*state));
        }
    }
}
