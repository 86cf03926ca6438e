//! The names of objects: made of ids alone, and read back from a listing.

use std::fmt;
use std::str::FromStr;

use overnight_types::{Epoch, FileId, JobId, ShardIndex};
use uuid::Uuid;

use crate::Error;

/// The name of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectName {
    /// An upload or a published file.
    File(FileId),
    /// One segment of a shard.
    Segment {
        /// Its job.
        job: JobId,
        /// Its shard.
        shard: ShardIndex,
        /// The lease's epoch under which it was written.
        epoch: Epoch,
        /// Its number within the shard.
        seq: u32,
        /// The first six bytes of its sha256.
        sha_prefix: [u8; 6],
    },
    /// A job's index from custom id to item.
    Index(JobId),
    /// A sorted run of the index, written by intake before the merge.
    IntakeRun {
        /// Its job.
        job: JobId,
        /// Its number, from 0.
        run: u32,
    },
    /// A job's manifest of one round.
    Manifest {
        /// Its job.
        job: JobId,
        /// Its round, from 1.
        round: u32,
    },
    /// Written and deleted by a probe of the storage.
    Probe(Uuid),
}

impl ObjectName {
    /// The input or published file.
    pub const fn file(id: FileId) -> Self {
        Self::File(id)
    }

    /// A segment with this content hash.
    pub fn segment(job: JobId, shard: ShardIndex, epoch: Epoch, seq: u32, sha256: &[u8; 32]) -> Self {
        let [a, b, c, d, e, f, ..] = *sha256;
        Self::Segment { job, shard, epoch, seq, sha_prefix: [a, b, c, d, e, f] }
    }

    /// The index of custom ids.
    pub const fn index(job: JobId) -> Self {
        Self::Index(job)
    }

    /// A run of intake.
    pub const fn intake_run(job: JobId, run: u32) -> Self {
        Self::IntakeRun { job, run }
    }

    /// The manifest of a round.
    pub const fn manifest(job: JobId, round: u32) -> Self {
        Self::Manifest { job, round }
    }

    /// The job that owns the object; `None` for files and probes.
    pub const fn job(&self) -> Option<JobId> {
        match self {
            Self::Segment { job, .. } | Self::Index(job) | Self::IntakeRun { job, .. } | Self::Manifest { job, .. } => {
                Some(*job)
            }
            Self::File(_) | Self::Probe(_) => None,
        }
    }

    pub(crate) fn path(&self) -> object_store::path::Path {
        object_store::path::Path::from(self.to_string())
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(id) => write!(f, "files/{id}"),
            Self::Segment { job, shard, epoch, seq, sha_prefix } => {
                write!(f, "jobs/{job}/segments/{:06}/{:08}-{seq:04}-", shard.0, epoch.0)?;
                sha_prefix.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str(".jsonl")
            }
            Self::Index(job) => write!(f, "jobs/{job}/items.idx"),
            Self::IntakeRun { job, run } => write!(f, "jobs/{job}/intake/{run:06}.run"),
            Self::Manifest { job, round } => write!(f, "jobs/{job}/manifests/{round:04}.json"),
            Self::Probe(id) => write!(f, "probes/{}", id.simple()),
        }
    }
}

impl FromStr for ObjectName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text)
            // Only the one spelling that we write is a name.
            .filter(|name| name.to_string() == text)
            .ok_or_else(|| Error::BadName { text: text.chars().take(80).collect() })
    }
}

fn parse(text: &str) -> Option<ObjectName> {
    if let Some(id) = text.strip_prefix("files/") {
        return Some(ObjectName::File(id.parse().ok()?));
    }
    if let Some(id) = text.strip_prefix("probes/") {
        return Some(ObjectName::Probe(Uuid::try_parse(id).ok()?));
    }
    let (job, rest) = text.strip_prefix("jobs/")?.split_once('/')?;
    let job: JobId = job.parse().ok()?;
    if rest == "items.idx" {
        return Some(ObjectName::Index(job));
    }
    if let Some(run) = rest.strip_prefix("intake/") {
        return Some(ObjectName::IntakeRun { job, run: run.strip_suffix(".run")?.parse().ok()? });
    }
    if let Some(round) = rest.strip_prefix("manifests/") {
        return Some(ObjectName::Manifest { job, round: round.strip_suffix(".json")?.parse().ok()? });
    }
    let (shard, file) = rest.strip_prefix("segments/")?.split_once('/')?;
    let mut parts = file.strip_suffix(".jsonl")?.splitn(3, '-');
    let (epoch, seq, hex) = (parts.next()?, parts.next()?, parts.next()?);
    let hex = (hex.len() == 12 && hex.is_ascii()).then_some(hex)?;
    let mut sha_prefix = [0; 6];
    for (index, byte) in sha_prefix.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).ok()?;
    }
    let (shard, epoch) = (ShardIndex(shard.parse().ok()?), Epoch(epoch.parse().ok()?));
    Some(ObjectName::Segment { job, shard, epoch, seq: seq.parse().ok()?, sha_prefix })
}

/// Which objects to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// Every object.
    All,
    /// Uploads and published files.
    Files,
    /// Everything of all jobs.
    Jobs,
    /// Everything of one job.
    Job(JobId),
    /// Segments of one job.
    Segments(JobId),
    /// Intake's runs of one job.
    IntakeRuns(JobId),
    /// What probes left.
    Probes,
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => Ok(()),
            Self::Files => f.write_str("files"),
            Self::Jobs => f.write_str("jobs"),
            Self::Job(job) => write!(f, "jobs/{job}"),
            Self::Segments(job) => write!(f, "jobs/{job}/segments"),
            Self::IntakeRuns(job) => write!(f, "jobs/{job}/intake"),
            Self::Probes => f.write_str("probes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_to_itself() {
        let job = JobId::new();
        let names = [
            ObjectName::file(FileId::new()),
            ObjectName::segment(job, ShardIndex(1_234_567), Epoch(9), 3, &[0xab; 32]),
            ObjectName::index(job),
            ObjectName::intake_run(job, 12),
            ObjectName::manifest(job, 2),
            ObjectName::Probe(Uuid::now_v7()),
        ];
        for name in names {
            assert_eq!(name.to_string().parse::<ObjectName>().unwrap(), name);
            assert_eq!(name.path().as_ref(), name.to_string(), "the driver must not respell the name");
        }
    }

    #[test]
    fn foreign_names_are_refused() {
        let job = JobId::new();
        let foreign = [
            "".into(),
            "files/../x".into(),
            format!("files/{}#1", FileId::new()),
            format!("jobs/{job}/segments/1/2-3-aabbccddeeff.jsonl"),
            format!("jobs/{job}/segments/000001/00000002-0003-aabbccddeeéf.jsonl"),
            format!("jobs/{job}/items.idx/x"),
            format!("jobs/{job}/manifests/1.json"),
        ];
        for text in foreign {
            assert!(text.parse::<ObjectName>().is_err(), "{text}");
        }
    }
}
