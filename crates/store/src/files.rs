//! Files: uploads and published outputs. The bytes are objects; these are rows.

use async_trait::async_trait;
use overnight_types::{FileId, Timestamp};

use crate::{Error, Guarded, Page};

/// What a file is for; the wire's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FilePurpose {
    /// `assistants`.
    Assistants,
    /// `batch`: a job's input.
    Batch,
    /// `batch_output`: published by a job; cannot be uploaded.
    BatchOutput,
    /// `fine-tune`.
    FineTune,
    /// `vision`.
    Vision,
    /// `user_data`.
    UserData,
    /// `evals`.
    Evals,
}

impl FilePurpose {
    /// Every purpose.
    pub const ALL: &'static [Self] =
        &[Self::Assistants, Self::Batch, Self::BatchOutput, Self::FineTune, Self::Vision, Self::UserData, Self::Evals];

    /// The word in the database and on the wire.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Assistants => "assistants",
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
            Self::FineTune => "fine-tune",
            Self::Vision => "vision",
            Self::UserData => "user_data",
            Self::Evals => "evals",
        }
    }

    /// Reads the word; `None` when it is not one.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|purpose| purpose.as_str() == text)
    }
}

/// A file about to be recorded; its bytes are durable already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFile {
    /// The id that names its object.
    pub id: FileId,
    /// As uploaded, last path component.
    pub filename: String,
    /// What it is for.
    pub purpose: FilePurpose,
    /// Exact size.
    pub bytes: u64,
    /// Of the stored bytes.
    pub sha256: [u8; 32],
    /// Seconds after creation at which it expires; `None` keeps it.
    pub expires_after_s: Option<u64>,
}

/// A recorded file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// The id that names its object.
    pub id: FileId,
    /// As uploaded, last path component.
    pub filename: String,
    /// What it is for.
    pub purpose: FilePurpose,
    /// Exact size.
    pub bytes: u64,
    /// Of the stored bytes.
    pub sha256: [u8; 32],
    /// By the database's clock.
    pub created_at: Timestamp,
    /// `None` keeps it until deleted.
    pub expires_at: Option<Timestamp>,
}

/// Order of a listing by creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileOrder {
    /// Oldest first.
    Asc,
    /// Newest first.
    #[default]
    Desc,
}

/// Which files to list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileQuery {
    /// Start after this file in the order.
    pub after: Option<FileId>,
    /// Most rows, 1…10,000.
    pub limit: u32,
    /// By (created_at, id).
    pub order: FileOrder,
    /// Only this purpose.
    pub purpose: Option<FilePurpose>,
}

/// Rows of files.
#[async_trait]
pub trait Files {
    /// Records a file whose bytes are durable. A second insert of the same id is refused.
    async fn insert_file(&self, file: NewFile) -> Result<File, Error>;

    /// A file that is neither deleted nor expired.
    async fn find_file(&self, id: FileId) -> Result<Option<File>, Error>;

    /// Files that are neither deleted nor expired, by keyset. An `after` that is
    /// not known is [`Error::Missing`].
    async fn list_files(&self, query: FileQuery) -> Result<Page<File>, Error>;

    /// Hides a file at once; its bytes stay until nothing reads them.
    async fn delete_file_if_present(&self, id: FileId) -> Result<Guarded<(), ()>, Error>;

    /// Deleted files that no unfinished job reads, and those that expired and nobody can make a job
    /// of any more (a minute later at most), oldest first.
    async fn list_removable_files(&self, limit: u32) -> Result<Vec<FileId>, Error>;

    /// Drops the row of a file whose object is gone.
    async fn forget_file(&self, id: FileId) -> Result<(), Error>;

    /// Of these ids, those that have a row (deleted ones too) or are drawn by a job that publishes,
    /// in the order of ids: the others are unclaimed objects.
    async fn known_files(&self, ids: &[FileId]) -> Result<Vec<FileId>, Error>;
}
