//! A TCP proxy for tests: cuts, holds and refuses connections to a store on command.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Everything passes.
const OPEN: i64 = i64::MAX;

/// The proxy; it ends with its last handle's runtime.
#[derive(Clone)]
pub(super) struct Proxy {
    pub(super) endpoint: String,
    /// Bytes of answers that still pass: then each connection breaks once.
    budget: Arc<AtomicI64>,
    /// Nothing passes, and nothing breaks either.
    held: Arc<std::sync::atomic::AtomicBool>,
    num_cuts: Arc<AtomicU64>,
}

impl Proxy {
    /// In front of an endpoint `http://host:port`.
    pub(super) async fn before(endpoint: &str) -> Self {
        let upstream = endpoint.strip_prefix("http://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            budget: Arc::new(AtomicI64::new(OPEN)),
            held: Arc::default(),
            num_cuts: Arc::default(),
        };
        let accepting = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (proxy, upstream) = (accepting.clone(), upstream.clone());
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(upstream).await else { return };
                    proxy.carry(client, server).await;
                });
            }
        });
        proxy
    }

    /// Breaks the connection that carries the answers' next `bytes`, once.
    pub(super) fn cut_after(&self, bytes: i64) {
        self.budget.store(bytes, SeqCst);
    }

    /// Holds every byte until it is let go.
    pub(super) fn hold(&self, held: bool) {
        self.held.store(held, SeqCst);
    }

    pub(super) fn num_cuts(&self) -> u64 {
        self.num_cuts.load(SeqCst)
    }

    async fn carry(&self, client: TcpStream, server: TcpStream) {
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
            (client.into_split(), server.into_split());
        let requests = tokio::io::copy(&mut from_client, &mut to_server);
        let answers = async {
            let mut buffer = vec![0; 16 << 10];
            while let Ok(num_read @ 1..) = from_server.read(&mut buffer).await {
                while self.held.load(SeqCst) {
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
                let left = self.budget.load(SeqCst);
                let passes = usize::try_from(left.max(0)).unwrap_or(usize::MAX).min(num_read);
                if to_client.write_all(&buffer[..passes]).await.is_err() {
                    break;
                }
                if left != OPEN {
                    self.budget.fetch_sub(num_read as i64, SeqCst);
                }
                if passes < num_read {
                    self.budget.store(OPEN, SeqCst);
                    self.num_cuts.fetch_add(1, SeqCst);
                    break;
                }
            }
        };
        tokio::select! { _ = requests => {}, () = answers => {} }
    }
}
