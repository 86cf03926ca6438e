//! OpenAI's form of one page of a listing.

use serde::Serialize;

/// A page. `first_id` and `last_id` are null when it is empty.
#[derive(Debug, Serialize)]
pub(crate) struct ListObject<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListObject<T> {
    pub(crate) fn new(data: Vec<T>, first_id: Option<String>, last_id: Option<String>, has_more: bool) -> Self {
        Self { object: "list", data, first_id, last_id, has_more }
    }
}
