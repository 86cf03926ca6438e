//! Reading rows and binding values: the one place where types meet columns.

use std::borrow::Cow;
use std::str::FromStr;
use std::time::Duration;

use overnight_store::Error;
use overnight_types::{Bitmap, FileId, JobId, Timestamp, Usage, WorkerId};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgRow, PgTypeInfo, PgValueFormat, PgValueRef, Postgres};
use sqlx::{Column, Decode, Encode, Row, Type};
use uuid::Uuid;

use crate::error::{damaged, failed};

/// A size or count as it is stored; past `i64` it saturates, which no real size reaches.
pub(crate) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// An index or count in a column of four bytes; past `i32` it saturates, which no job reaches.
pub(crate) fn short(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// A length of time as it is stored.
pub(crate) fn micros(length: Duration) -> i64 {
    i64::try_from(length.as_micros()).unwrap_or(i64::MAX / 4)
}

/// A later moment, saturating.
pub(crate) fn after(now: i64, delay: Duration) -> i64 {
    now.saturating_add(micros(delay))
}

/// Text that may hold what Postgres keeps in no text: a NUL stands as U+FFFD.
pub(crate) fn text(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// Ids as an array.
pub(crate) fn uuids(ids: impl IntoIterator<Item = Uuid>) -> Vec<Uuid> {
    ids.into_iter().collect()
}

/// A bitmap as `varbit`: bit i from the left is bit i.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bits {
    num_bits: u32,
    bytes: Vec<u8>,
}

impl Bits {
    pub(crate) fn of(bitmap: &Bitmap) -> Self {
        let bytes = bitmap.as_bytes().iter().map(|byte| byte.reverse_bits()).collect();
        Self { num_bits: bitmap.num_bits(), bytes }
    }

    /// As it is stored where empty ones are null.
    pub(crate) fn or_null(bitmap: &Bitmap) -> Option<Self> {
        (bitmap.count_ones() > 0).then(|| Self::of(bitmap))
    }

    pub(crate) fn into_bitmap(self) -> Option<Bitmap> {
        let bytes: Vec<u8> = self.bytes.iter().map(|byte| byte.reverse_bits()).collect();
        Bitmap::from_bytes(&bytes, self.num_bits)
    }
}

const VARBIT: Oid = Oid(1562);
const VARBIT_ARRAY: Oid = Oid(1563);

impl Type<Postgres> for Bits {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(VARBIT)
    }
}

impl PgHasArrayType for Bits {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(VARBIT_ARRAY)
    }
}

impl Encode<'_, Postgres> for Bits {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend(&i32::try_from(self.num_bits)?.to_be_bytes());
        buffer.extend(&self.bytes);
        Ok(IsNull::No)
    }
}

impl Decode<'_, Postgres> for Bits {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        if value.format() == PgValueFormat::Text {
            return Err("bits are read in binary form".into());
        }
        let (length, bytes) = value.as_bytes()?.split_first_chunk::<4>().ok_or("bits have a length")?;
        Ok(Self { num_bits: u32::try_from(i32::from_be_bytes(*length))?, bytes: bytes.to_vec() })
    }
}

/// A number of two, four or eight bytes.
struct Int(i64);

impl Type<Postgres> for Int {
    fn type_info() -> PgTypeInfo {
        <i64 as Type<Postgres>>::type_info()
    }

    fn compatible(info: &PgTypeInfo) -> bool {
        <i64 as Type<Postgres>>::compatible(info) || <i32 as Type<Postgres>>::compatible(info)
    }
}

impl Decode<'_, Postgres> for Int {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        let bytes = value.as_bytes()?;
        match bytes.len() {
            4 => Ok(Self(i32::from_be_bytes(bytes.try_into()?).into())),
            _ => Ok(Self(i64::from_be_bytes(bytes.try_into()?))),
        }
    }
}

/// Typed reads by column name.
pub(crate) trait Read {
    fn get<'r, T: Decode<'r, Postgres> + Type<Postgres>>(&'r self, column: &'static str) -> Result<T, sqlx::Error>;

    fn int(&self, column: &'static str) -> Result<i64, Error> {
        self.get::<Int>(column).map(|int| int.0).map_err(failed("read a number"))
    }

    fn int_or_null(&self, column: &'static str) -> Result<Option<i64>, Error> {
        Ok(self.get::<Option<Int>>(column).map_err(failed("read a number"))?.map(|int| int.0))
    }

    fn flag(&self, column: &'static str) -> Result<bool, Error> {
        self.get(column).map_err(failed("read a truth value"))
    }

    fn text(&self, column: &'static str) -> Result<String, Error> {
        self.get(column).map_err(failed("read a text"))
    }

    fn text_or_null(&self, column: &'static str) -> Result<Option<String>, Error> {
        self.get(column).map_err(failed("read a text"))
    }

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
        self.get(column).map_err(failed("read an id"))
    }

    fn uuid_or_null(&self, column: &'static str) -> Result<Option<Uuid>, Error> {
        self.get(column).map_err(failed("read an id"))
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

    fn bytes_or_null(&self, column: &'static str) -> Result<Option<Vec<u8>>, Error> {
        self.get(column).map_err(failed("read bytes"))
    }

    fn hash(&self, column: &'static str) -> Result<[u8; 32], Error> {
        let bytes = self.bytes_or_null(column)?.unwrap_or_default();
        bytes.try_into().map_err(|bytes: Vec<u8>| damaged(column, bytes))
    }

    fn u64_of_bytes_or_null(&self, column: &'static str) -> Result<Option<u64>, Error> {
        let number = |bytes: Vec<u8>| bytes.try_into().map_err(|bytes: Vec<u8>| damaged(column, bytes));
        Ok(self.bytes_or_null(column)?.map(number).transpose()?.map(u64::from_be_bytes))
    }

    fn word<T: FromStr>(&self, column: &'static str) -> Result<T, Error> {
        let text = self.text(column)?;
        text.parse().map_err(|_| damaged(column, text))
    }

    /// All clear where it is null.
    fn bitmap(&self, column: &'static str, num_bits: u32) -> Result<Bitmap, Error> {
        let bits: Option<Bits> = self.get(column).map_err(failed("read bits"))?;
        let Some(bits) = bits else { return Ok(Bitmap::new(num_bits)) };
        if bits.num_bits != num_bits {
            return Err(damaged(column, bits.num_bits));
        }
        bits.into_bitmap().ok_or_else(|| damaged(column, num_bits))
    }

    /// As it is stored, whatever its length.
    fn bits_or_null(&self, column: &'static str) -> Result<Option<Bitmap>, Error> {
        let bits: Option<Bits> = self.get(column).map_err(failed("read bits"))?;
        bits.map(|bits| bits.into_bitmap().ok_or_else(|| damaged(column, "bits"))).transpose()
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

impl Read for PgRow {
    fn get<'r, T: Decode<'r, Postgres> + Type<Postgres>>(&'r self, column: &'static str) -> Result<T, sqlx::Error> {
        self.try_get(column)
    }
}

/// The columns of a row before or after one that is called `then`: two rows in one.
pub(crate) struct Part<'a> {
    row: &'a PgRow,
    columns: std::ops::Range<usize>,
}

impl<'a> Part<'a> {
    pub(crate) fn both(row: &'a PgRow) -> (Self, Self) {
        let cut = row.columns().iter().position(|column| column.name() == "then").unwrap_or(row.len());
        (Self { row, columns: 0..cut }, Self { row, columns: cut.saturating_add(1).min(row.len())..row.len() })
    }
}

impl Read for Part<'_> {
    fn get<'r, T: Decode<'r, Postgres> + Type<Postgres>>(&'r self, column: &'static str) -> Result<T, sqlx::Error> {
        let found = self.columns.clone().find(|&index| self.row.columns()[index].name() == column);
        self.row.try_get(found.ok_or_else(|| sqlx::Error::ColumnNotFound(column.to_owned()))?)
    }
}

#[cfg(test)]
mod tests {
    use overnight_types::Bitmap;

    use super::Bits;

    #[test]
    fn bits_are_those_of_the_bitmap_from_the_left() {
        for num_bits in [1, 7, 8, 9, 64, 1_023, 1_024] {
            let mut bitmap = Bitmap::new(num_bits);
            (0..num_bits).step_by(3).for_each(|bit| bitmap.set(bit));
            let bits = Bits::of(&bitmap);
            assert_eq!(bits.bytes[0] >> 7, 1, "item 0 is the first bit of a varbit");
            assert_eq!(bits.into_bitmap(), Some(bitmap));
        }
    }
}
