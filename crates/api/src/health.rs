//! `/health`, `/ping` and `/version`: for probes and people.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use overnight_types::chain;
use overnight_worker::generate::EngineState;
use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::state::{Inner, Shared, num_ready};

/// Longest that the database may take to answer a probe.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(2);

/// 200 only when this process can do its work: the database answers, and the engine
/// too unless this role has none. Then the answer says so, and how many workers others
/// have: an API is up without any, and its batches wait.
pub(crate) async fn health(State(state): State<Shared>) -> Result<Json<Value>> {
    if state.parts.draining.is_cancelled() {
        return Err(ApiError::unavailable("draining", state.retry_after()));
    }
    let engine = engine_word(&state)?;
    let unavailable = |cause| ApiError::unavailable("database_unavailable", state.retry_after()).cause(cause);
    let mut health = match tokio::time::timeout(DATABASE_TIMEOUT, state.parts.store.now()).await {
        Ok(Ok(_)) => json!({"status": "ok", "engine": engine, "database": state.parts.store.backend(),
            "kv_cache_usage": kv_cache_usage(&state)}),
        Ok(Err(error)) => return Err(unavailable(chain(&error))),
        Err(_) => return Err(unavailable(format!("no answer within {DATABASE_TIMEOUT:?}"))),
    };
    if state.parts.generate.is_none() {
        let workers = tokio::time::timeout(DATABASE_TIMEOUT, state.live_workers()).await;
        let workers = workers.map_err(|_| unavailable(format!("no answer within {DATABASE_TIMEOUT:?}")))??;
        health["workers_live"] = workers.len().into();
        health["workers_ready"] = num_ready(&workers).into();
    }
    Ok(Json(health))
}

/// An engine of another process tells nothing of its KV cache.
fn kv_cache_usage(state: &Inner) -> Option<f32> {
    let usage = state.parts.generate.as_ref()?.status().kv_cache_usage;
    (usage > 0.0).then_some(usage)
}

fn engine_word(state: &Inner) -> Result<&'static str> {
    let Some(generate) = &state.parts.generate else { return Ok("none") };
    let unavailable = |code, cause| Err(ApiError::unavailable(code, state.retry_after()).cause(cause));
    match generate.status().state {
        EngineState::Ready => Ok("ready"),
        EngineState::Starting(stage) => unavailable("engine_starting", format!("engine starting: {stage}")),
        EngineState::Poisoned(reason) => unavailable("engine_poisoned", format!("engine poisoned: {reason}")),
        EngineState::Stalled(reason) => unavailable("engine_stalled", format!("engine stalled: {reason}")),
    }
}

/// The version of this binary.
pub(crate) async fn version(State(state): State<Shared>) -> Json<Value> {
    Json(json!({"version": state.parts.version}))
}
