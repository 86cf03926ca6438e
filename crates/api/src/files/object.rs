//! The file object: a stored file in the wire's words, every key always there.

use overnight_store::File;
use serde::Serialize;

/// The wire's file object. The order of the fields is the order on the wire.
#[derive(Debug, Serialize)]
pub(crate) struct FileObject {
    pub(crate) id: String,
    object: &'static str,
    bytes: u64,
    created_at: i64,
    expires_at: Option<i64>,
    filename: String,
    purpose: &'static str,
    status: &'static str,
    status_details: Option<String>,
    sha256: String,
}

impl From<File> for FileObject {
    fn from(file: File) -> Self {
        Self {
            id: file.id.to_string(),
            object: "file",
            bytes: file.bytes,
            created_at: file.created_at.unix_seconds(),
            expires_at: file.expires_at.map(|at| at.unix_seconds()),
            purpose: file.purpose.as_str(),
            // A row exists only once the bytes are durable.
            status: "processed",
            status_details: None,
            sha256: hex(&file.sha256),
            filename: file.filename,
        }
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a String cannot fail");
        text
    })
}
