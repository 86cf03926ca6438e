//! Typed ids. Job, file, worker and event ids are UUIDv7; items and shards are
//! indices within their job. On the wire an id carries a fixed prefix.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// A text that is not an id of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid id, expected {prefix} and 32 hexadecimal digits: {text:?}")]
pub struct ParseIdError {
    /// The prefix that this kind of id carries.
    pub prefix: &'static str,
    /// The text as given, cut at 80 characters.
    pub text: String,
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Uuid);

        impl $name {
            /// What the wire form starts with.
            pub const PREFIX: &'static str = $prefix;

            /// A new id whose order is that of its time.
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }

            /// Wraps raw UUID bytes read back from a database.
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The UUID itself, for storage.
            pub const fn uuid(&self) -> Uuid {
                self.0
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{}", $prefix, self.0.simple())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let hex = text.strip_prefix($prefix);
                hex.filter(|hex| hex.len() == 32)
                    .and_then(|hex| Uuid::try_parse(hex).ok())
                    .map(Self)
                    .ok_or_else(|| ParseIdError { prefix: $prefix, text: text.chars().take(80).collect() })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

uuid_id!(
    /// A stored file: an upload or a published output. `file-…` on the wire.
    FileId, "file-");
uuid_id!(
    /// A job. `batch_…` on the wire.
    JobId, "batch_");
uuid_id!(
    /// One start of a worker process; never used again after it.
    WorkerId, "worker_");
uuid_id!(
    /// An audit or webhook event. `evt_…` on the wire.
    EventId, "evt_");

/// Position of an item in its job, from 0, blank lines not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ItemIndex(pub u64);

/// Position of a shard in its job, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShardIndex(pub u32);

/// Rises by one with every lease of a shard or a step, and fences late writers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl fmt::Display for ItemIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
impl fmt::Display for ShardIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The wire id of one item, `batch_req_…`: derived from job and index, so that
/// every finalizer writes the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchRequestId {
    /// The item's job.
    pub job: JobId,
    /// The item's index in it.
    pub item: ItemIndex,
}

impl fmt::Display for BatchRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch_req_{}{:010x}", self.job.uuid().simple(), self.item.0)
    }
}

impl FromStr for BatchRequestId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = || {
            let hex = text.strip_prefix("batch_req_")?;
            let (job, item) = hex.split_at_checked(32)?;
            let item_ok = item.len() >= 10 && item.bytes().all(|b| b.is_ascii_hexdigit());
            let item = u64::from_str_radix(item, 16).ok().filter(|_| item_ok)?;
            Some(Self { job: JobId::from_uuid(Uuid::try_parse(job).ok()?), item: ItemIndex(item) })
        };
        parse().ok_or_else(|| ParseIdError { prefix: "batch_req_", text: text.chars().take(80).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_text_reads_back_to_the_same_id() {
        let job = JobId::new();
        assert_eq!(job.to_string().parse::<JobId>(), Ok(job));
        let request = BatchRequestId { job, item: ItemIndex(7) };
        assert_eq!(request.to_string().parse::<BatchRequestId>(), Ok(request));
    }

    #[test]
    fn id_of_another_kind_is_refused() {
        let file = FileId::new().to_string();
        assert!(file.parse::<JobId>().is_err());
        assert!("batch_123".parse::<JobId>().is_err());
    }
}
