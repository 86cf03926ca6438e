//! Listings: keyset pages in a stable order.

use overnight_testing::service::numbered_lines;
use serde_json::{Value, json};

use crate::server::Server;

fn ids(page: &Value) -> Vec<String> {
    page["data"].as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap().to_owned()).collect()
}

/// Follows `last_id` to the end.
async fn all_pages(server: &Server, path: &str, limit: u32) -> Vec<String> {
    let mut found = Vec::new();
    let mut after = String::new();
    loop {
        let page = server.get(&format!("{path}limit={limit}{after}")).await.ok();
        let page_ids = ids(&page);
        assert!(page_ids.len() <= limit as usize);
        assert_eq!(page["first_id"].as_str(), page_ids.first().map(String::as_str));
        assert_eq!(page["last_id"].as_str(), page_ids.last().map(String::as_str));
        found.extend(page_ids);
        if page["has_more"] == false {
            return found;
        }
        after = format!("&after={}", page["last_id"].as_str().unwrap());
    }
}

#[tokio::test]
async fn batches_page_newest_first_without_gap_or_repeat() {
    let server = Server::new().await;
    let mut made = Vec::new();
    for _ in 0..7 {
        made.push(server.submit(&numbered_lines(1)).await);
    }
    made.reverse();
    for limit in [1, 2, 3, 7, 100] {
        assert_eq!(all_pages(&server, "/v1/batches?", limit).await, made, "limit {limit}");
    }
    // New batches do not move a page that was begun.
    let after = format!("/v1/batches?limit=100&after={}", made[2]);
    server.submit(&numbered_lines(1)).await;
    assert_eq!(ids(&server.get(&after).await.ok()), made[3..]);
}

#[tokio::test]
async fn batches_list_20_unless_told_otherwise() {
    let server = Server::new().await;
    let input = server.upload(numbered_lines(1).join("\n")).await;
    for _ in 0..21 {
        server.create(&input).await.ok();
    }
    let page = server.get("/v1/batches").await.ok();
    assert_eq!(
        (page["data"].as_array().unwrap().len(), &page["has_more"], &page["object"]),
        (20, &json!(true), &json!("list"))
    );
    assert_eq!(server.get("/v1/batches?status=completed").await.ok()["data"], json!([]));
    assert_eq!(server.get("/v1/batches?status=validating&limit=100").await.ok()["data"].as_array().unwrap().len(), 21);
}

#[tokio::test]
async fn empty_listing_has_null_ids() {
    let server = Server::new().await;
    for path in ["/v1/batches", "/v1/files"] {
        let page = server.get(path).await.ok();
        assert_eq!(page, json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false}));
    }
}

#[tokio::test]
async fn page_parameters_out_of_range_are_400() {
    let server = Server::new().await;
    let batch = format!("batch_{}", "0".repeat(32));
    let file = format!("file-{}", "0".repeat(32));
    for (path, param, code) in [
        ("/v1/batches?limit=0", "limit", "invalid_value"),
        ("/v1/batches?limit=101", "limit", "invalid_value"),
        ("/v1/batches?limit=x", "limit", "invalid_value"),
        ("/v1/batches?status=done", "status", "invalid_value"),
        (&format!("/v1/batches?after={batch}"), "after", "not_found"),
        ("/v1/batches?after=nonsense", "after", "not_found"),
        ("/v1/files?limit=10001", "limit", "invalid_value"),
        ("/v1/files?order=up", "order", "invalid_value"),
        ("/v1/files?purpose=bach", "purpose", "invalid_value"),
        (&format!("/v1/files?after={file}"), "after", "not_found"),
    ] {
        server.get(path).await.refused(400, param, code);
    }
    server.get("/v1/batches?limit=100").await.ok();
    server.get("/v1/files?limit=10000").await.ok();
}

#[tokio::test]
async fn files_page_in_both_orders_and_by_purpose() {
    let server = Server::new().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(server.upload("x").await);
    }
    server.post_form(&[("purpose", None, b"user_data"), ("file", Some("x"), b"x")]).await.ok();
    for limit in [1, 2, 5, 10_000] {
        assert_eq!(all_pages(&server, "/v1/files?order=asc&purpose=batch&", limit).await, made, "limit {limit}");
    }
    made.reverse();
    assert_eq!(all_pages(&server, "/v1/files?purpose=batch&", 2).await, made);
    assert_eq!(all_pages(&server, "/v1/files?", 4).await.len(), 6);
}

#[tokio::test]
async fn purposes_of_the_contract_that_nothing_has_are_an_empty_page() {
    let server = Server::new().await;
    server.upload("{}").await;
    for purpose in ["assistants_output", "fine-tune-results"] {
        let page = server.get(&format!("/v1/files?purpose={purpose}")).await.ok();
        assert_eq!((&page["data"], &page["has_more"]), (&json!([]), &json!(false)), "{purpose}");
    }
    server.get("/v1/files?purpose=other").await.refused(400, "purpose", "invalid_value");
}
