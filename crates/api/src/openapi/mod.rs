//! `GET /openapi.json`: the document is put together from the operation table here and
//! the schemas beside it; a test holds the table against the router's own routes.

mod operations;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use operations::{Answer, Operation, Param, operations};

const SCHEMAS: &str = include_str!("schemas.json");

/// The document.
pub(crate) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document().to_string()).into_response()
}

fn document() -> Value {
    let mut paths = Map::new();
    for operation in operations() {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method.as_str().to_ascii_lowercase()] = render(&operation);
    }
    let schemas: Value = serde_json::from_str(SCHEMAS).expect("the embedded schemas are JSON, a test reads them");
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "overnight",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Durable batch inference. The routes of OpenAI's Files and Batches API, our additions to them, and online requests.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": {"RequestId": {"description": "Names this request in the server's log.", "schema": {"type": "string"}}},
        },
    })
}

fn render(operation: &Operation) -> Value {
    let mut rendered = json!({
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": responses(operation),
    });
    let mut parameters: Vec<Value> = path_params(operation.path)
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    parameters.extend(operation.params.iter().map(param));
    if !parameters.is_empty() {
        rendered["parameters"] = parameters.into();
    }
    if let Some((content_type, schema, required)) = operation.body {
        rendered["requestBody"] =
            json!({"required": required, "content": {content_type: {"schema": reference(schema)}}});
    }
    if operation.open {
        rendered["security"] = json!([]);
    }
    rendered
}

fn responses(operation: &Operation) -> Value {
    let request_id = json!({"X-Request-Id": {"$ref": "#/components/headers/RequestId"}});
    let mut responses = Map::new();
    if let Some(answer) = &operation.answer {
        let content = match answer {
            Answer::Json(schema) => json!({"application/json": {"schema": reference(schema)}}),
            Answer::Bytes(content_type) => json!({*content_type: {"schema": {"type": "string", "format": "binary"}}}),
            Answer::JsonOrEvents(schema) => json!({
                "application/json": {"schema": reference(schema)},
                "text/event-stream": {"schema": {"type": "string"}},
            }),
        };
        responses.insert("200".to_owned(), json!({"description": "OK", "headers": request_id, "content": content}));
    }
    let (content_type, schema) = match operation.path.starts_with("/v1/") {
        true => ("application/json", "Error"),
        false => ("application/problem+json", "Problem"),
    };
    for status in operation.refusals {
        let description = axum::http::StatusCode::from_u16(*status).ok().and_then(|status| status.canonical_reason());
        let answer = json!({"description": description.unwrap_or("refused"), "headers": request_id,
            "content": {content_type: {"schema": reference(schema)}}});
        responses.insert(status.to_string(), answer);
    }
    responses.into()
}

fn param(param: &Param) -> Value {
    let place = if param.header { "header" } else { "query" };
    let schema: Value =
        serde_json::from_str(param.schema).expect("schemas of the table are JSON, a test reads them all");
    json!({"name": param.name, "in": place, "required": false, "description": param.summary, "schema": schema})
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

/// The names between braces.
fn path_params(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|piece| piece.strip_prefix('{')?.strip_suffix('}'))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use axum::http::Method;

    use super::*;

    #[test]
    fn document_names_exactly_the_routes_of_the_router() {
        let routed: BTreeSet<(String, String)> = crate::router::routes(Duration::from_secs(1))
            .listed
            .iter()
            .map(|(method, path)| (method.to_string(), path.replace("{*", "{")))
            .collect();
        let listed: Vec<(String, String)> =
            operations().iter().map(|operation| (operation.method.to_string(), operation.path.to_owned())).collect();
        assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), routed);
        assert_eq!(listed.len(), routed.len(), "an operation is listed twice");
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_schema_is_used() {
        let document = document();
        let text = document.to_string();
        let mut used = BTreeSet::new();
        for piece in text.split("\"#/components/schemas/").skip(1) {
            used.insert(piece.split('"').next().unwrap().to_owned());
        }
        let known: BTreeSet<String> = document["components"]["schemas"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(used, known);
        let ids: BTreeSet<&str> = operations().iter().map(|operation| operation.id).collect();
        assert_eq!(ids.len(), operations().len());
    }

    #[test]
    fn open_routes_are_those_that_need_no_key() {
        for operation in operations() {
            assert_eq!(operation.open, crate::auth::OPEN.contains(&operation.path), "{}", operation.path);
            assert!(operation.method != Method::GET || operation.body.is_none(), "{}", operation.path);
        }
    }
}
