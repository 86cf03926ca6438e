//! `/v1/files`: one file per verb.

mod content;
mod delete;
mod list;
mod multipart;
mod object;
mod retrieve;
mod upload;
mod validate;

pub(crate) use content::content;
pub(crate) use delete::delete;
pub(crate) use list::list;
pub(crate) use retrieve::retrieve;
pub(crate) use upload::upload;
pub(crate) use validate::validate;

use overnight_store::File;
use overnight_types::FileId;

use crate::error::{ApiError, Result};
use crate::state::Inner;

/// The id of a path, or the same 404 that an unknown id gets.
fn parse_id(text: &str) -> Result<FileId> {
    text.parse().map_err(|_| no_such_file(text))
}

fn no_such_file(id: &str) -> ApiError {
    ApiError::no_such("file", id)
}

/// The file, or 404.
async fn find(state: &Inner, id: &str) -> Result<File> {
    state.parts.store.find_file(parse_id(id)?).await?.ok_or_else(|| no_such_file(id))
}
