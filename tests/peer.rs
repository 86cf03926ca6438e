//! A server on loopback for what `batch` asks of others: a remote engine, a webhook's receiver.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Answers every request as its rule says; keeps the bodies that came.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) url: String,
    bodies: Arc<Mutex<Vec<String>>>,
}

/// A status and a body, by the body that came and how often it came before.
pub(crate) type Answer = (u16, String);

impl Peer {
    /// Serves until the test's runtime ends.
    pub(crate) async fn start(rule: impl Fn(&str, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let url = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        let peer = Self { url, bodies: Arc::default() };
        let (bodies, rule) = (peer.bodies.clone(), Arc::new(rule));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A peer that was killed in mid-request is no trouble of this server.
                let (bodies, rule) = (bodies.clone(), rule.clone());
                tokio::spawn(async move { serve(stream, &bodies, rule.as_ref()).await });
            }
        });
        peer
    }

    /// Bodies of the requests so far, in their order.
    pub(crate) fn bodies(&self) -> Vec<String> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One request a connection: everything else is left to the client's next one.
async fn serve(
    mut stream: TcpStream,
    bodies: &Mutex<Vec<String>>,
    rule: &(impl Fn(&str, usize) -> Answer + Send + Sync),
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let body_at = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..body_at]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |text| text.trim().parse().expect("a length is a number"));
    while bytes.len() < body_at + length {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    }
    let body = String::from_utf8_lossy(&bytes[body_at..]).into_owned();
    let num_before = {
        let mut bodies = bodies.lock().unwrap_or_else(PoisonError::into_inner);
        let num_before = bodies.iter().filter(|earlier| **earlier == body).count();
        bodies.push(body.clone());
        num_before
    };
    let (status, answer) = rule(&body, num_before);
    let length = answer.len();
    let head = format!("HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {length}");
    stream.write_all(format!("{head}\r\nconnection: close\r\n\r\n{answer}").as_bytes()).await?;
    stream.shutdown().await
}
