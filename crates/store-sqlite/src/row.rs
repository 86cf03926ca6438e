//! Reading rows and binding ids: the one place where types meet columns.

use std::str::FromStr;
use std::time::Duration;

use overnight_store::Error;
use overnight_types::{Bitmap, FileId, JobId, Timestamp, Usage, WorkerId};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

use crate::error::{damaged, failed};

/// An id as it is stored.
pub(crate) fn key(id: Uuid) -> Vec<u8> {
    id.into_bytes().to_vec()
}

/// A size or count as it is stored; past `i64` it saturates, which no real size reaches.
pub(crate) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A length of time as it is stored.
pub(crate) fn micros(length: Duration) -> i64 {
    i64::try_from(length.as_micros()).unwrap_or(i64::MAX)
}

/// A later moment, saturating.
pub(crate) fn after(now: i64, delay: Duration) -> i64 {
    now.saturating_add(micros(delay))
}

/// A JSON array of hexadecimal ids, for `json_each` with `unhex(value)`.
pub(crate) fn hex_list(ids: impl IntoIterator<Item = Uuid>) -> String {
    let ids: Vec<String> = ids.into_iter().map(|id| id.simple().to_string()).collect();
    serde_json::json!(ids).to_string()
}

/// Bytes as hexadecimal digits, for `unhex`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes every write");
        text
    })
}

/// A bitmap as it is stored where empty ones are null.
pub(crate) fn bits_or_null(bitmap: &Bitmap) -> Option<&[u8]> {
    (bitmap.count_ones() > 0).then(|| bitmap.as_bytes())
}

/// Typed reads by column name.
pub(crate) trait Read {
    fn int(&self, column: &'static str) -> Result<i64, Error>;
    fn int_or_null(&self, column: &'static str) -> Result<Option<i64>, Error>;
    fn text(&self, column: &'static str) -> Result<String, Error>;
    fn text_or_null(&self, column: &'static str) -> Result<Option<String>, Error>;
    fn bytes(&self, column: &'static str) -> Result<Vec<u8>, Error>;
    fn bytes_or_null(&self, column: &'static str) -> Result<Option<Vec<u8>>, Error>;

    fn u64(&self, column: &'static str) -> Result<u64, Error> {
        let value = self.int(column)?;
        u64::try_from(value).map_err(|_| damaged(column, value))
    }

    fn u32(&self, column: &'static str) -> Result<u32, Error> {
        let value = self.int(column)?;
        u32::try_from(value).map_err(|_| damaged(column, value))
    }

    fn u32_or_null(&self, column: &'static str) -> Result<Option<u32>, Error> {
        let value = self.int_or_null(column)?;
        value.map(|value| u32::try_from(value).map_err(|_| damaged(column, value))).transpose()
    }

    fn at(&self, column: &'static str) -> Result<Timestamp, Error> {
        self.int(column).map(Timestamp::from_micros)
    }

    fn at_or_null(&self, column: &'static str) -> Result<Option<Timestamp>, Error> {
        Ok(self.int_or_null(column)?.map(Timestamp::from_micros))
    }

    fn length(&self, column: &'static str) -> Result<Duration, Error> {
        self.u64(column).map(Duration::from_micros)
    }

    fn uuid(&self, column: &'static str) -> Result<Uuid, Error> {
        let bytes = self.bytes(column)?;
        Uuid::from_slice(&bytes).map_err(|_| damaged(column, bytes))
    }

    fn uuid_or_null(&self, column: &'static str) -> Result<Option<Uuid>, Error> {
        let bytes = self.bytes_or_null(column)?;
        bytes.map(|bytes| Uuid::from_slice(&bytes).map_err(|_| damaged(column, bytes))).transpose()
    }

    fn job_id(&self) -> Result<JobId, Error> {
        self.uuid("job_id").map(JobId::from_uuid)
    }

    fn file_id(&self, column: &'static str) -> Result<FileId, Error> {
        self.uuid(column).map(FileId::from_uuid)
    }

    fn worker_id(&self, column: &'static str) -> Result<WorkerId, Error> {
        self.uuid(column).map(WorkerId::from_uuid)
    }

    fn hash(&self, column: &'static str) -> Result<[u8; 32], Error> {
        self.bytes(column)?.try_into().map_err(|bytes: Vec<u8>| damaged(column, bytes))
    }

    fn u64_of_bytes_or_null(&self, column: &'static str) -> Result<Option<u64>, Error> {
        let bytes = self.bytes_or_null(column)?;
        let number = |bytes: Vec<u8>| bytes.try_into().map_err(|bytes: Vec<u8>| damaged(column, bytes));
        Ok(bytes.map(number).transpose()?.map(u64::from_be_bytes))
    }

    fn word<T: FromStr>(&self, column: &'static str) -> Result<T, Error> {
        let text = self.text(column)?;
        text.parse().map_err(|_| damaged(column, text))
    }

    fn bitmap(&self, column: &'static str, num_bits: u32) -> Result<Bitmap, Error> {
        let Some(bytes) = self.bytes_or_null(column)? else { return Ok(Bitmap::new(num_bits)) };
        Bitmap::from_bytes(&bytes, num_bits).ok_or_else(|| damaged(column, bytes))
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage {
            input_tokens: self.u64("input_tokens")?,
            cached_tokens: self.u64("cached_tokens")?,
            output_tokens: self.u64("output_tokens")?,
            reasoning_tokens: self.u64("reasoning_tokens")?,
        })
    }
}

impl Read for SqliteRow {
    fn int(&self, column: &'static str) -> Result<i64, Error> {
        self.try_get(column).map_err(failed("read a number"))
    }

    fn int_or_null(&self, column: &'static str) -> Result<Option<i64>, Error> {
        self.try_get(column).map_err(failed("read a number"))
    }

    fn text(&self, column: &'static str) -> Result<String, Error> {
        self.try_get(column).map_err(failed("read a text"))
    }

    fn text_or_null(&self, column: &'static str) -> Result<Option<String>, Error> {
        self.try_get(column).map_err(failed("read a text"))
    }

    fn bytes(&self, column: &'static str) -> Result<Vec<u8>, Error> {
        self.try_get(column).map_err(failed("read bytes"))
    }

    fn bytes_or_null(&self, column: &'static str) -> Result<Option<Vec<u8>>, Error> {
        self.try_get(column).map_err(failed("read bytes"))
    }
}
