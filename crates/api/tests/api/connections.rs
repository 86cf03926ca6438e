//! Peers that open a connection and let it lie: none of them holds a place for ever.

use std::time::Duration;

use overnight_api::{ApiConfig, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::server::Server;

/// Far above what any step needs; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// Serves with one place and a short patience.
async fn one_place(server: &Server) -> (std::net::SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config =
        ApiConfig { connections_max: 1, connection_timeout: Duration::from_millis(200), ..ApiConfig::default() };
    let (router, stop) = (server.router.clone(), CancellationToken::new());
    let told = stop.clone();
    let serving = tokio::spawn(async move { serve(listener, router, &config, told, HANG).await.unwrap() });
    (address, stop, serving)
}

async fn ask(address: std::net::SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

async fn whole(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    tokio::time::timeout(HANG, stream.read_to_end(&mut bytes)).await.expect("it ends").unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn silent_peer_is_cut_and_the_next_one_served() {
    let server = Server::new().await;
    let (address, stop, serving) = one_place(&server).await;
    let silent = TcpStream::connect(address).await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET /version HTTP/1.1\r\nhost:").await.unwrap();
    let next = ask(address, "/version").await;
    assert!(whole(next).await.starts_with("HTTP/1.1 200"), "served once the others are gone");
    assert!(!whole(silent).await.contains("200 OK"));
    assert!(!whole(slow).await.contains("200 OK"));
    stop.cancel();
    tokio::time::timeout(HANG, serving).await.expect("it stops").unwrap();
}

#[tokio::test]
async fn peer_that_takes_nothing_of_its_answer_is_cut() {
    let server = Server::new().await;
    // More than the buffers of both sides hold.
    let id = server.upload(vec![b'x'; 32 << 20]).await;
    let (address, stop, serving) = one_place(&server).await;
    let stalled = ask(address, &format!("/v1/files/{id}/content")).await;
    let next = ask(address, "/version").await;
    assert!(whole(next).await.starts_with("HTTP/1.1 200"), "served once the stalled one is gone");
    drop(stalled);
    stop.cancel();
    tokio::time::timeout(HANG, serving).await.expect("it stops").unwrap();
}
