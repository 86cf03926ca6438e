//! A move that is asked of one batch: its id in the path, parameters in an optional body.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};

use crate::body::Fields;
use crate::error::Result;
use crate::state::{Inner, Shared};

/// What `POST /v1/batches/{batch_id}/<verb>` brings.
#[derive(Debug)]
pub(crate) struct Call {
    /// As the caller wrote it.
    pub(super) id: String,
    headers: HeaderMap,
    body: Body,
}

impl Call {
    /// The id and the body's parameters, of which only `known` ones may be there.
    pub(super) async fn read(self, state: &Inner, known: &[&str]) -> Result<(String, Fields)> {
        let fields = Fields::read_optional(state, &self.headers, self.body, known).await?;
        Ok((self.id, fields))
    }
}

impl FromRequest<Shared> for Call {
    type Rejection = Response;

    async fn from_request(request: Request, state: &Shared) -> Result<Self, Response> {
        let (mut parts, body) = request.into_parts();
        let id = Path::<String>::from_request_parts(&mut parts, state).await;
        let Path(id) = id.map_err(IntoResponse::into_response)?;
        Ok(Self { id, headers: parts.headers, body })
    }
}
