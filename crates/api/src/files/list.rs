//! `GET /v1/files`: newest first unless asked otherwise, by keyset.

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use overnight_store::{FileOrder, FilePurpose, FileQuery};
use overnight_types::FileId;

use super::object::FileObject;
use crate::body::Query;
use crate::error::{ApiError, Result};
use crate::list_object::ListObject;
use crate::state::Shared;

const LIMIT_MAX: u32 = 10_000;
/// Words of the API for files that nothing here makes: asked for, there are none.
const PURPOSES_WITHOUT_FILES: [&str; 2] = ["assistants_output", "fine-tune-results"];

/// One page of files.
pub(crate) async fn list(State(state): State<Shared>, uri: Uri) -> Result<Json<ListObject<FileObject>>> {
    let query = Query::of(&uri);
    let limit = query.limit(LIMIT_MAX, LIMIT_MAX)?;
    let unknown_after = |text: &str| {
        let shown: String = text.chars().take(80).collect();
        ApiError::invalid("after", format!("no such file: {shown}")).code("not_found")
    };
    let after_text = query.get("after");
    let after = after_text.map(|text| text.parse::<FileId>().map_err(|_| unknown_after(text))).transpose()?;
    let order = match query.get("order") {
        None | Some("desc") => FileOrder::Desc,
        Some("asc") => FileOrder::Asc,
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            return Err(
                ApiError::invalid("order", format!("order must be asc or desc, it is: {shown}")).code("invalid_value")
            );
        }
    };
    if query.get("purpose").is_some_and(|word| PURPOSES_WITHOUT_FILES.contains(&word)) {
        return Ok(Json(ListObject::new(Vec::new(), None, None, false)));
    }
    let purpose =
        query.get("purpose").map(|word| FilePurpose::parse(word).ok_or_else(|| unknown_purpose(word))).transpose()?;
    let page = match state.parts.store.list_files(FileQuery { after, limit, order, purpose }).await {
        Err(overnight_store::Error::Missing { .. }) => return Err(unknown_after(after_text.unwrap_or(""))),
        page => page?,
    };
    let data: Vec<FileObject> = page.rows.into_iter().map(FileObject::from).collect();
    let (first, last) = (data.first().map(|file| file.id.clone()), data.last().map(|file| file.id.clone()));
    Ok(Json(ListObject::new(data, first, last, page.has_more)))
}

fn unknown_purpose(word: &str) -> ApiError {
    let shown: String = word.chars().take(40).collect();
    let known = FilePurpose::ALL.iter().map(FilePurpose::as_str).chain(PURPOSES_WITHOUT_FILES);
    let known = known.collect::<Vec<_>>().join(", ");
    ApiError::invalid("purpose", format!("purpose must be one of {known}; it is: {shown}")).code("invalid_value")
}
