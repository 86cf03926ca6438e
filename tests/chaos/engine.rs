//! The engine of a chaos run: a server on loopback that answers each completion after a
//! while, so that jobs last long enough to be struck. It never fails: what an item
//! becomes depends on its prompt alone.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A running server; it serves until the test's runtime ends.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) url: String,
}

impl Engine {
    pub(crate) async fn start(wait: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let url = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A client that was killed in mid-request is no trouble of this server.
                tokio::spawn(async move { serve(stream, wait).await });
            }
        });
        Self { url }
    }
}

async fn serve(mut stream: TcpStream, wait: Duration) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let head_len = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&bytes[..head_len]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |text| text.trim().parse().expect("a length is a number"));
        while bytes.len() < head_len + length {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        }
        let body: Value = serde_json::from_slice(&bytes[head_len..head_len + length]).unwrap_or_default();
        bytes.drain(..head_len + length);
        tokio::time::sleep(wait).await;
        let (status, answer) = answer(&body);
        let length = answer.len();
        let head = format!("HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {length}");
        stream.write_all(format!("{head}\r\n\r\n{answer}").as_bytes()).await?;
    }
}

fn answer(body: &Value) -> (u16, String) {
    let prompt = body["prompt"].as_str().unwrap_or_default();
    if prompt.is_empty() {
        let error = json!({"message": "the prompt is empty", "type": "invalid_request_error", "code": "empty_prompt"});
        return (400, json!({ "error": error }).to_string());
    }
    let text = format!("echo {prompt}");
    let choice = json!({"index": 0, "text": text, "finish_reason": "stop", "logprobs": null});
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5});
    let completion = json!({"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice],
        "usage": usage});
    (200, completion.to_string())
}
