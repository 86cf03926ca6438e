//! `POST /tokenize` and `POST /detokenize`: what the engine would see of a text.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use overnight_types::{Endpoint, Timestamp, chain};
use overnight_worker::generate::Class;
use overnight_worker::mapper::{Mapper, PrepareOptions};
use serde_json::{Value, json};

use crate::body::{Fields, wrong_type};
use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared};

/// `{"prompt"}` or `{"messages"}` into token ids.
pub(crate) async fn tokenize(State(state): State<Shared>, headers: HeaderMap, body: Body) -> Result<Json<Value>> {
    let known = [
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "return_token_strs",
    ];
    let fields = Fields::read(&state, &headers, body, &known).await?;
    let mapper = local_mapper(&state, &fields)?;
    let names = fields.flag("return_token_strs")?;
    let ids = blocking(move || match (fields.text("prompt")?.map(str::to_owned), fields.get("messages").is_some()) {
        (Some(prompt), false) => {
            let text = mapper.text().ok_or_else(no_tokenizer)?;
            let add_special = !matches!(fields.get("add_special_tokens"), Some(Value::Bool(false)));
            let ids = text.encode(&prompt, add_special).map_err(|error| {
                ApiError::invalid("prompt", format!("the prompt cannot be tokenized: {}", chain(&error)))
            })?;
            Ok((ids, mapper))
        }
        (None, true) => Ok((chat_tokens(&mapper, &fields)?, mapper)),
        _ => Err(ApiError::invalid("prompt", "give either prompt or messages").code("missing_required_parameter")),
    })
    .await?;
    let (ids, mapper) = ids;
    let strings: Option<Vec<Option<String>>> =
        mapper.text().filter(|_| names).map(|text| ids.iter().map(|id| text.token_text(*id)).collect());
    let max_model_len = mapper.limits().map(|limits| limits.max_model_len);
    Ok(Json(json!({"count": ids.len(), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings})))
}

/// `{"tokens"}` into a text, special tokens included.
pub(crate) async fn detokenize(State(state): State<Shared>, headers: HeaderMap, body: Body) -> Result<Json<Value>> {
    let fields = Fields::read(&state, &headers, body, &["model", "tokens"]).await?;
    let mapper = local_mapper(&state, &fields)?;
    let ids = token_ids(&fields)?;
    let prompt = blocking(move || {
        let text = mapper.text().ok_or_else(no_tokenizer)?;
        if let Some(id) = ids.iter().find(|id| **id >= text.vocab_size()) {
            let message = format!("token {id} is outside the vocabulary of {} tokens", text.vocab_size());
            return Err(ApiError::invalid("tokens", message).code("invalid_value"));
        }
        text.decode(&ids, false)
            .map_err(|error| ApiError::invalid("tokens", format!("the tokens cannot be decoded: {}", chain(&error))))
    })
    .await?;
    Ok(Json(json!({"prompt": prompt})))
}

/// The ids that a chat body with these messages would start from.
fn chat_tokens(mapper: &Mapper, fields: &Fields) -> Result<Vec<u32>> {
    let mut body = serde_json::Map::new();
    for key in ["messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"] {
        if let Some(value) = fields.get(key) {
            body.insert(key.to_owned(), value.clone());
        }
    }
    let name = mapper.names().and_then(|names| names.first()).cloned().unwrap_or_default();
    body.insert("model".to_owned(), Value::String(fields.text("model")?.map_or(name, str::to_owned)));
    let options = PrepareOptions {
        class: Class::Online,
        allow_stream: false,
        seed: 0,
        request_id: "tokenize",
        created: Timestamp::now().unix_seconds(),
    };
    let body = Value::Object(body).to_string();
    let prepared = mapper.prepare(Endpoint::ChatCompletions, body.as_bytes(), options).map_err(|refusal| {
        let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_REQUEST);
        let mut error = ApiError::new(status, refusal.error.message);
        (error.param, error.code) = (refusal.error.param.map(Into::into), refusal.error.code.map(Into::into));
        error
    })?;
    Ok(prepared.order_key().to_vec())
}

fn token_ids(fields: &Fields) -> Result<Vec<u32>> {
    let Some(value) = fields.get("tokens") else {
        return Err(
            ApiError::invalid("tokens", "missing required parameter: tokens").code("missing_required_parameter")
        );
    };
    let ids = value
        .as_array()
        .map(|values| values.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect());
    ids.flatten().ok_or_else(|| wrong_type("tokens", "a list of token ids", value))
}

/// The local engine's mapper, when the body's model (if it names one) is its own.
fn local_mapper(state: &Arc<Inner>, fields: &Fields) -> Result<Mapper> {
    let mapper = state.parts.mapper.get().cloned().filter(|mapper| mapper.text().is_some()).ok_or_else(no_tokenizer)?;
    match (fields.text("model")?, mapper.names()) {
        (Some(model), Some(names)) if !names.iter().any(|name| name == model) => {
            let shown: String = model.chars().take(120).collect();
            let message = format!("no such model: {shown}; served: {}", names.join(", "));
            Err(ApiError::new(StatusCode::NOT_FOUND, message).param("model").code("model_not_found"))
        }
        _ => Ok(mapper),
    }
}

fn no_tokenizer() -> ApiError {
    let message = "this process has no tokenizer: it has no engine, or a remote one";
    ApiError::new(StatusCode::NOT_FOUND, message).code("no_engine")
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(format!("tokenizing panicked: {error}")))?
}
