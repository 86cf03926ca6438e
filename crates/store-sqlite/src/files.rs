//! Rows of files.

use async_trait::async_trait;
use overnight_store::{Error, File, FileOrder, FilePurpose, FileQuery, Files, Guarded, NewFile, Page};
use overnight_types::FileId;
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::error::{damaged, failed};
use crate::row::{Read, hex_list, int, key};
use crate::statement::Statement;
use crate::transaction::Write;

/// Most rows of one page.
pub(crate) const PAGE_MAX: u32 = 10_000;

#[async_trait]
impl Files for SqliteStore {
    async fn insert_file(&self, file: NewFile) -> Result<File, Error> {
        let mut write = self.write("record a file").await?;
        let file = insert(&mut write, &file).await?;
        self.commit(write).await?;
        Ok(file)
    }

    async fn find_file(&self, id: FileId) -> Result<Option<File>, Error> {
        let doing = "find a file";
        let now = self.read_now(doing).await?;
        sqlx::query(
            "select * from files where file_id = ?1 and deleted_at is null and (expires_at is null or expires_at > ?2)",
        )
        .bind(key(id.uuid()))
        .bind(now)
        .find(&self.readers, doing, read)
        .await
    }

    async fn list_files(&self, query: FileQuery) -> Result<Page<File>, Error> {
        let doing = "list files";
        let now = self.read_now(doing).await?;
        let after = match query.after {
            None => None,
            Some(id) => Some(self.created_at_of_file(id).await?),
        };
        let limit = query.limit.clamp(1, PAGE_MAX);
        let statement = match query.order {
            FileOrder::Asc => {
                "select * from files where deleted_at is null and (expires_at is null or expires_at > ?1)
                    and (?2 is null or purpose = ?2)
                    and (?3 is null or (created_at, file_id) > (?3, ?4))
                order by created_at, file_id limit ?5"
            }
            FileOrder::Desc => {
                "select * from files where deleted_at is null and (expires_at is null or expires_at > ?1)
                    and (?2 is null or purpose = ?2)
                    and (?3 is null or (created_at, file_id) < (?3, ?4))
                order by created_at desc, file_id desc limit ?5"
            }
        };
        let rows = sqlx::query(statement)
            .bind(now)
            .bind(query.purpose.map(|purpose| purpose.as_str()))
            .bind(after)
            .bind(query.after.map(|id| key(id.uuid())))
            .bind(i64::from(limit) + 1)
            .rows_of(&self.readers, doing)
            .await?;
        page(rows, limit, read)
    }

    async fn delete_file_if_present(&self, id: FileId) -> Result<Guarded<(), ()>, Error> {
        let mut write = self.write("delete a file").await?;
        let hidden = sqlx::query(
            "update files set deleted_at = ?2
            where file_id = ?1 and deleted_at is null and (expires_at is null or expires_at > ?2)",
        )
        .bind(key(id.uuid()))
        .bind(write.now)
        .change(&mut write)
        .await?;
        self.commit(write).await?;
        Ok(if hidden == 1 { Guarded::Applied(()) } else { Guarded::Lost { now: None } })
    }

    async fn list_removable_files(&self, limit: u32) -> Result<Vec<FileId>, Error> {
        let doing = "list removable files";
        let now = self.read_now(doing).await?;
        sqlx::query(
            "select f.file_id from files f
            where coalesce(f.deleted_at, f.expires_at) is not null and coalesce(f.deleted_at, f.expires_at) <= ?1
                and not exists (select 1 from jobs j where j.input_file_id = f.file_id
                    and j.state in ('validating', 'in_progress', 'finalizing', 'cancelling'))
            order by coalesce(f.deleted_at, f.expires_at) limit ?2",
        )
        .bind(now)
        .bind(limit)
        .list(&self.readers, doing, |row| row.file_id("file_id"))
        .await
    }

    async fn forget_file(&self, id: FileId) -> Result<(), Error> {
        let mut write = self.write("forget a file").await?;
        sqlx::query("delete from files where file_id = ?1").bind(key(id.uuid())).change(&mut write).await?;
        self.commit(write).await
    }

    async fn known_files(&self, ids: &[FileId]) -> Result<Vec<FileId>, Error> {
        sqlx::query(
            "with asked as materialized (select unhex(value) as id from json_each(?1))
            select file_id from files where file_id in (select id from asked)
            union select output_file_id from jobs
                where state in ('finalizing', 'cancelling') and output_file_id in (select id from asked)
            union select error_file_id from jobs
                where state in ('finalizing', 'cancelling') and error_file_id in (select id from asked)
            order by 1",
        )
        .bind(hex_list(ids.iter().map(FileId::uuid)))
        .list(&self.readers, "tell known files", |row| row.file_id("file_id"))
        .await
    }
}

impl SqliteStore {
    async fn created_at_of_file(&self, id: FileId) -> Result<i64, Error> {
        sqlx::query_scalar("select created_at from files where file_id = ?1")
            .bind(key(id.uuid()))
            .fetch_optional(&self.readers)
            .await
            .map_err(failed("list files"))?
            .ok_or_else(|| Error::Missing { what: "file", id: id.to_string() })
    }
}

/// Inserts the row in a running transaction; also for published files.
pub(crate) async fn insert(write: &mut Write, file: &NewFile) -> Result<File, Error> {
    let now = write.now;
    let row = sqlx::query(
        "insert into files (file_id, filename, purpose, bytes, sha256, created_at, expires_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7) returning *",
    )
    .bind(key(file.id.uuid()))
    .bind(&file.filename)
    .bind(file.purpose.as_str())
    .bind(int(file.bytes))
    .bind(&file.sha256[..])
    .bind(now)
    .bind(file.expires_after_s.map(|seconds| now.saturating_add(int(seconds).saturating_mul(1_000_000))))
    .row(write)
    .await?;
    read(&row)
}

/// Cuts one row more than asked for down to a page.
pub(crate) fn page<T>(
    mut rows: Vec<SqliteRow>,
    limit: u32,
    read: impl Fn(&SqliteRow) -> Result<T, Error>,
) -> Result<Page<T>, Error> {
    let has_more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    Ok(Page { rows: rows.iter().map(read).collect::<Result<_, _>>()?, has_more })
}

fn read(row: &SqliteRow) -> Result<File, Error> {
    let purpose = row.text("purpose")?;
    Ok(File {
        id: row.file_id("file_id")?,
        filename: row.text("filename")?,
        purpose: FilePurpose::parse(&purpose).ok_or_else(|| damaged("files.purpose", &purpose))?,
        bytes: row.u64("bytes")?,
        sha256: row.hash("sha256")?,
        created_at: row.at("created_at")?,
        expires_at: row.at_or_null("expires_at")?,
    })
}
