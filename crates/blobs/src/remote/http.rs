//! The driver's HTTP client with refusals and silences told apart below its retries.
//!
//! The driver's own errors are opaque: whoever reads them sees a text. So the answer
//! is looked at here, where it is an answer, and travels as the innermost cause.
//! What the driver retries, or reads itself (404 of a name, 409, 412), passes through.

use std::sync::Arc;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use overnight_types::Timestamp;

use super::answer::{Refusal, Silence, is_metadata_service};

/// Makes clients that tell refusals apart.
#[derive(Debug)]
pub(crate) struct Connector {
    pub(crate) inner: Arc<dyn HttpConnector>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client { inner: self.inner.connect(options)? }))
    }
}

#[derive(Debug)]
struct Client {
    inner: HttpClient,
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let uri = request.uri();
        let whom = format!(
            "{}://{}",
            uri.scheme_str().unwrap_or("http"),
            uri.authority().map_or("?", |authority| authority.as_str())
        );
        // Credentials of a machine's role: the driver reads these answers itself.
        let is_metadata = is_metadata_service(&whom);
        let response = match self.inner.execute(request).await {
            Ok(response) => response,
            Err(err) => return Err(HttpError::new(err.kind(), Silence::new(err.kind(), whom, &err))),
        };
        let status = response.status().as_u16();
        if is_metadata || !matches!(status, 301 | 302 | 307 | 308 | 400 | 401 | 403 | 404) {
            return Ok(response);
        }
        let (head, body) = response.into_parts();
        let body = body.bytes().await?;
        let header = |name: &str| Some(head.headers.get(name)?.to_str().ok()?.to_owned());
        let now_s = Timestamp::now().unix_seconds();
        let refusal = Refusal::read(status, header, &String::from_utf8_lossy(&body), now_s);
        match (status, refusal.code.as_str()) {
            // That a name is not there is the driver's to tell; that its bucket is not, is ours.
            (404, _) if !refusal.is_no_bucket() => Ok(HttpResponse::from_parts(head, body.into())),
            // A connection that S3 waited on for too long: sent again as if it had broken.
            (400, "RequestTimeout") => Err(HttpError::new(HttpErrorKind::Interrupted, refusal)),
            _ => Err(HttpError::new(HttpErrorKind::Unknown, refusal)),
        }
    }
}
