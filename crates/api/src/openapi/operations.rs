//! Every operation of the API, as the OpenAPI document tells it.

use axum::http::Method;

/// One method of one path.
pub(super) struct Operation {
    pub(super) id: &'static str,
    pub(super) method: Method,
    pub(super) path: &'static str,
    pub(super) tag: &'static str,
    pub(super) summary: &'static str,
    pub(super) params: &'static [Param],
    /// Content type, schema, and whether it must be there.
    pub(super) body: Option<(&'static str, &'static str, bool)>,
    /// What 200 holds; `None` where the route only refuses.
    pub(super) answer: Option<Answer>,
    pub(super) refusals: &'static [u16],
    /// Answers without a key.
    pub(super) open: bool,
}

/// What a 200 answer holds.
pub(super) enum Answer {
    /// A schema.
    Json(&'static str),
    /// Bytes of this type.
    Bytes(&'static str),
    /// A schema, or events when the body asked for a stream.
    JsonOrEvents(&'static str),
}

/// A query parameter or a header.
pub(super) struct Param {
    pub(super) name: &'static str,
    pub(super) header: bool,
    pub(super) summary: &'static str,
    /// JSON.
    pub(super) schema: &'static str,
}

const fn query(name: &'static str, summary: &'static str, schema: &'static str) -> Param {
    Param { name, header: false, summary, schema }
}

const fn header(name: &'static str, summary: &'static str) -> Param {
    Param { name, header: true, summary, schema: r#"{"type":"string"}"# }
}

const TEXT: &str = r#"{"type":"string"}"#;
const JSON: &str = "application/json";
const READ: &[u16] = &[401, 404, 500, 503];
const LIST: &[u16] = &[400, 401, 500, 503];
const WRITE: &[u16] = &[400, 401, 403, 404, 409, 413, 500, 503];
const ONLINE: &[u16] = &[400, 401, 403, 404, 413, 429, 500, 503, 504];

const AFTER: Param = query("after", "Start after this id.", TEXT);

impl Operation {
    fn new(id: &'static str, method: Method, path: &'static str, summary: &'static str) -> Self {
        let tag = match path {
            _ if path.starts_with("/v1/files") => "Files",
            _ if path.starts_with("/v1/batches") => "Batches",
            "/health" | "/ping" | "/version" | "/metrics" | "/openapi.json" => "Operations",
            _ => "Online",
        };
        let refusals = if method == Method::GET { READ } else { WRITE };
        Self { id, method, path, tag, summary, params: &[], body: None, answer: None, refusals, open: false }
    }

    fn get(id: &'static str, path: &'static str, summary: &'static str, schema: &'static str) -> Self {
        Self { answer: Some(Answer::Json(schema)), ..Self::new(id, Method::GET, path, summary) }
    }

    fn post(id: &'static str, path: &'static str, summary: &'static str, schema: &'static str) -> Self {
        Self { answer: Some(Answer::Json(schema)), ..Self::new(id, Method::POST, path, summary) }
    }

    fn delete(id: &'static str, path: &'static str, summary: &'static str) -> Self {
        Self { answer: Some(Answer::Json("Deleted")), ..Self::new(id, Method::DELETE, path, summary) }
    }

    fn params(self, params: &'static [Param]) -> Self {
        Self { params, ..self }
    }

    fn takes(self, schema: &'static str) -> Self {
        Self { body: Some((JSON, schema, true)), ..self }
    }

    fn may_take(self, schema: &'static str) -> Self {
        Self { body: Some((JSON, schema, false)), ..self }
    }

    fn answers(self, answer: Answer) -> Self {
        Self { answer: Some(answer), ..self }
    }

    fn refuses(self, refusals: &'static [u16]) -> Self {
        Self { refusals, ..self }
    }

    fn not_built(id: &'static str, path: &'static str) -> Self {
        Self::new(id, Method::POST, path, "Not built in this version: always refused, code not_built.")
            .refuses(&[401, 403, 404])
    }
}

/// The whole table.
pub(super) fn operations() -> Vec<Operation> {
    [files(), batches(), batch_details(), online(), other()].into_iter().flatten().collect()
}

fn files() -> Vec<Operation> {
    let list_params = const {
        &[
            AFTER,
            query(
                "limit",
                "Most files of a page.",
                r#"{"type":"integer","minimum":1,"maximum":10000,"default":10000}"#,
            ),
            query("order", "By creation.", r#"{"type":"string","enum":["asc","desc"],"default":"desc"}"#),
            query("purpose", "Only this purpose.", TEXT),
        ]
    };
    vec![
        Operation {
            body: Some(("multipart/form-data", "UploadForm", true)),
            refusals: &[400, 401, 403, 408, 413, 429, 500, 503],
            ..Operation::post("createFile", "/v1/files", "Upload a file. Fields may come in any order; the bytes are streamed.", "File")
        },
        Operation::get("listFiles", "/v1/files", "List files.", "FileList").params(list_params).refuses(LIST),
        Operation::get("retrieveFile", "/v1/files/{file_id}", "One file's row.", "File"),
        Operation::delete("deleteFile", "/v1/files/{file_id}", "Delete a file. A batch that was accepted keeps reading it.")
            .refuses(&[401, 403, 404, 500, 503]),
        Operation::get("downloadFile", "/v1/files/{file_id}/content", "The stored bytes, unchanged.", "File")
            .answers(Answer::Bytes("application/octet-stream"))
            .params(const { &[header("Range", "One range of bytes."), header("If-None-Match", "An ETag that is at hand.")] })
            .refuses(&[401, 404, 416, 500, 503]),
        Operation::post("validateFile", "/v1/files/{file_id}/validate", "Check a file as a batch would, without side effect.", "Validation")
            .takes("ValidateRequest"),
    ]
}

fn batches() -> Vec<Operation> {
    let list_params = const {
        &[
            AFTER,
            query("limit", "Most batches of a page.", r#"{"type":"integer","minimum":1,"maximum":100,"default":20}"#),
            query("status", "Only this status.", TEXT),
            query("model", "Only this model.", TEXT),
        ]
    };
    vec![
        Operation::post("createBatch", "/v1/batches", "Create a batch. Answers at once; validation follows.", "Batch")
            .takes("CreateBatch")
            .params(
                const { &[header("Idempotency-Key", "A repeated create with the same key returns the first batch.")] },
            ),
        Operation::get("listBatches", "/v1/batches", "List batches, newest first.", "BatchList")
            .params(list_params)
            .refuses(LIST),
        Operation::get("retrieveBatch", "/v1/batches/{batch_id}", "One batch as it is now.", "Batch"),
        Operation::delete("deleteBatch", "/v1/batches/{batch_id}", "Delete an ended batch.")
            .refuses(&[401, 403, 404, 409, 500, 503]),
        Operation::post("cancelBatch", "/v1/batches/{batch_id}/cancel", "Stop a batch; what finished stays.", "Batch")
            .may_take("CancelBatch"),
        Operation::post(
            "pauseBatch",
            "/v1/batches/{batch_id}/pause",
            "Start nothing new; what runs finishes.",
            "Batch",
        ),
        Operation::post(
            "resumeBatch",
            "/v1/batches/{batch_id}/resume",
            "Go on with a paused batch, or re-open an ended one for what did not complete.",
            "Batch",
        )
        .may_take("ResumeBatch"),
        Operation::post(
            "retryBatch",
            "/v1/batches/{batch_id}/retry",
            "Run selected requests of an ended batch again.",
            "Batch",
        )
        .may_take("RetryBatch"),
    ]
}

fn batch_details() -> Vec<Operation> {
    let item_params = const {
        &[
            query(
                "state",
                "Only this state.",
                r#"{"type":"string","enum":["pending","running","waiting","completed","failed","cancelled","expired"]}"#,
            ),
            query("code", "Only this error code.", TEXT),
            query("custom_id", "The one request with this id.", TEXT),
            query("after", "Start after this index.", r#"{"type":"integer","minimum":0}"#),
            query(
                "limit",
                "Most requests of a page.",
                r#"{"type":"integer","minimum":1,"maximum":1000,"default":100}"#,
            ),
        ]
    };
    let result_params = const {
        &[
            query("after", "The cursor of the page before.", TEXT),
            query("limit", "Most lines of a page.", r#"{"type":"integer","minimum":1,"maximum":10000,"default":1000}"#),
            query(
                "order",
                "As they were committed, or by input.",
                r#"{"type":"string","enum":["completion","input"],"default":"completion"}"#,
            ),
        ]
    };
    vec![
        Operation::get("listBatchItems", "/v1/batches/{batch_id}/items", "Requests of a batch by index.", "ItemList")
            .params(item_params)
            .refuses(&[400, 401, 404, 500, 503]),
        Operation::get(
            "retrieveBatchItem",
            "/v1/batches/{batch_id}/items/{index}",
            "One request with input, output and attempts.",
            "ItemDetail",
        ),
        Operation::get(
            "watchBatch",
            "/v1/batches/{batch_id}/events",
            "Status changes and counts as server-sent events.",
            "Batch",
        )
        .answers(Answer::Bytes("text/event-stream"))
        .params(const { &[header("Last-Event-ID", "Go on after this event.")] })
        .refuses(&[400, 401, 404, 429, 500, 503]),
        Operation::get(
            "readBatchResults",
            "/v1/batches/{batch_id}/results",
            "Committed output and error lines while the batch runs. X-Next-Cursor and X-Incomplete tell how to go on.",
            "Batch",
        )
        .answers(Answer::Bytes("application/jsonl"))
        .params(result_params)
        .refuses(&[400, 401, 404, 500, 503]),
    ]
}

fn online() -> Vec<Operation> {
    vec![
        Operation::get("listModels", "/v1/models", "Names that something here answers to.", "ModelList").refuses(LIST),
        Operation::get("retrieveModel", "/v1/models/{model}", "One of them.", "Model"),
        Operation::post(
            "createChatCompletion",
            "/v1/chat/completions",
            "One chat completion, whole or streamed.",
            "ChatCompletion",
        )
        .takes("ChatCompletionRequest")
        .answers(Answer::JsonOrEvents("ChatCompletion"))
        .refuses(ONLINE),
        Operation::post("createCompletion", "/v1/completions", "One text completion, whole or streamed.", "Completion")
            .takes("CompletionRequest")
            .answers(Answer::JsonOrEvents("Completion"))
            .refuses(ONLINE),
        Operation::not_built("createEmbedding", "/v1/embeddings"),
        Operation::not_built("rerankV1", "/v1/rerank"),
        Operation::not_built("rerank", "/rerank"),
        Operation::not_built("scoreV1", "/v1/score"),
        Operation::not_built("score", "/score"),
        Operation::not_built("createResponse", "/v1/responses"),
        Operation::post("tokenize", "/tokenize", "Token ids of a prompt or of chat messages.", "Tokens")
            .takes("TokenizeRequest"),
        Operation::post("detokenize", "/detokenize", "The text of token ids.", "DetokenizedText")
            .takes("DetokenizeRequest"),
    ]
}

fn other() -> Vec<Operation> {
    vec![
        Operation {
            open: true,
            refusals: &[503],
            ..Operation::get("health", "/health", "200 only when this process can do its work.", "Health")
        },
        Operation { open: true, refusals: &[503], ..Operation::get("ping", "/ping", "The same as /health.", "Health") },
        Operation::get("version", "/version", "The version of the binary.", "Version").refuses(&[401]),
        Operation::get(
            "metrics",
            "/metrics",
            "Metrics as Prometheus text; api.open_metrics lets it go without a key.",
            "Version",
        )
        .answers(Answer::Bytes("text/plain"))
        .refuses(&[401]),
        Operation::get("openapi", "/openapi.json", "This document.", "OpenApi").refuses(&[401]),
    ]
}
