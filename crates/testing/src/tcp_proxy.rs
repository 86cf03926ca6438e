//! A proxy for TCP that does to connections what a network does: cuts them, refuses new
//! ones, holds them up, slows them down, or loses an answer.
//!
//! Knows nothing of what the bytes mean. Faults are set from outside and hold until
//! they are set otherwise; a proxy passes everything on at first.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Most bytes passed on at a time.
const PIECE: usize = 16 << 10;

/// What happens to traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// It is passed on.
    Pass,
    /// New connections are closed at once; old ones live on.
    Refuse,
    /// Nothing is passed on, and nobody is told: both sides think the other is there.
    Stall,
    /// Each piece waits so long.
    Delay(Duration),
    /// At most so many bytes a second in each direction of a connection.
    Throttle(u64),
}

#[derive(Debug)]
struct Shared {
    traffic: watch::Sender<Traffic>,
    /// Rises when all connections are to be cut.
    cuts: watch::Sender<u64>,
    answers_to_lose: AtomicU32,
    num_open: AtomicU64,
    num_met: AtomicU64,
}

/// A proxy in front of one address. Clones are the same proxy; it serves until the
/// runtime that started it ends.
#[derive(Debug, Clone)]
pub struct TcpProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl TcpProxy {
    /// Listens on loopback.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        Self::start_on(IpAddr::V4(Ipv4Addr::LOCALHOST), target).await
    }

    /// Listens on another address of this machine.
    pub async fn start_on(host: IpAddr, target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((host, 0)).await?;
        let shared = Arc::new(Shared {
            traffic: watch::Sender::new(Traffic::Pass),
            cuts: watch::Sender::new(0),
            answers_to_lose: AtomicU32::new(0),
            num_open: AtomicU64::new(0),
            num_met: AtomicU64::new(0),
        });
        let proxy = Self { address: listener.local_addr()?, shared };
        let serving = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *serving.shared.traffic.borrow() == Traffic::Refuse {
                    serving.shared.met();
                    continue;
                }
                let shared = serving.shared.clone();
                tokio::spawn(async move {
                    shared.num_open.fetch_add(1, Ordering::SeqCst);
                    // However it ends, both sides are closed with it.
                    let _ = shared.connect(client, target).await;
                    shared.num_open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Ok(proxy)
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on.
    pub fn set(&self, traffic: Traffic) {
        self.shared.traffic.send_replace(traffic);
    }

    /// Closes every connection; says how many there were.
    pub fn cut(&self) -> u64 {
        let num_open = self.shared.num_open.load(Ordering::SeqCst);
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
        self.shared.num_met.fetch_add(num_open, Ordering::SeqCst);
        num_open
    }

    /// Lets the next so many questions through and closes their connections instead of
    /// passing the answer on: whoever asked does not know whether it was done.
    pub fn lose_answers(&self, count: u32) {
        self.shared.answers_to_lose.store(count, Ordering::SeqCst);
    }

    /// Connections and pieces that met a fault so far.
    pub fn num_met(&self) -> u64 {
        self.shared.num_met.load(Ordering::SeqCst)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Question,
    Answer,
}

impl Shared {
    fn met(&self) {
        self.num_met.fetch_add(1, Ordering::SeqCst);
    }

    async fn connect(&self, client: TcpStream, target: SocketAddr) -> io::Result<()> {
        let mut cuts = self.cuts.subscribe();
        cuts.mark_unchanged();
        let server = TcpStream::connect(target).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::select! {
            ended = self.pass(from_client, to_server, Direction::Question) => ended,
            ended = self.pass(from_server, to_client, Direction::Answer) => ended,
            _ = cuts.changed() => Ok(()),
        }
    }

    async fn pass(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, direction: Direction) -> io::Result<()> {
        let mut traffic = self.traffic.subscribe();
        let mut piece = vec![0; PIECE];
        loop {
            let len = from.read(&mut piece).await?;
            if len == 0 {
                return Ok(());
            }
            let lose = |left: u32| left.checked_sub(1);
            if direction == Direction::Answer
                && self.answers_to_lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_ok()
            {
                self.met();
                return Ok(());
            }
            if *traffic.borrow_and_update() == Traffic::Stall {
                self.met();
                let goes_on = traffic.wait_for(|traffic| *traffic != Traffic::Stall).await;
                drop(goes_on.map_err(io::Error::other)?);
            }
            let wait = match *traffic.borrow_and_update() {
                Traffic::Delay(delay) => Some(delay),
                Traffic::Throttle(rate) => Some(Duration::from_secs_f64(len as f64 / rate as f64)),
                Traffic::Pass | Traffic::Refuse | Traffic::Stall => None,
            };
            if let Some(wait) = wait {
                self.met();
                tokio::time::sleep(wait).await;
            }
            to.write_all(&piece[..len]).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers each line with itself.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut piece = [0; 64];
                    while let Ok(len @ 1..) = stream.read(&mut piece).await {
                        stream.write_all(&piece[..len]).await.unwrap();
                    }
                });
            }
        });
        address
    }

    async fn ask(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
        let mut answer = vec![0; 64];
        stream.write_all(b"word").await?;
        let len = stream.read(&mut answer).await?;
        answer.truncate(len);
        Ok(answer)
    }

    #[tokio::test]
    async fn connections_are_cut_refused_and_healed() {
        let proxy = TcpProxy::start(echo().await).await.unwrap();
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut stream).await.unwrap(), b"word");
        assert_eq!(proxy.cut(), 1);
        assert!(ask(&mut stream).await.is_ok_and(|answer| answer.is_empty()) || ask(&mut stream).await.is_err());
        proxy.set(Traffic::Refuse);
        let mut refused = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(!ask(&mut refused).await.is_ok_and(|answer| !answer.is_empty()));
        proxy.set(Traffic::Pass);
        let mut healed = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut healed).await.unwrap(), b"word");
        assert_eq!(proxy.num_met(), 2);
    }

    #[tokio::test]
    async fn stalled_bytes_arrive_once_it_is_over_and_a_lost_answer_does_not() {
        let proxy = TcpProxy::start(echo().await).await.unwrap();
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut stream).await.unwrap(), b"word");
        proxy.set(Traffic::Stall);
        let waiting = tokio::time::timeout(Duration::from_millis(100), ask(&mut stream)).await;
        assert!(waiting.is_err(), "nothing comes through");
        proxy.set(Traffic::Pass);
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"word");
        proxy.lose_answers(1);
        assert!(!ask(&mut stream).await.is_ok_and(|answer| !answer.is_empty()), "asked, and cut off");
    }

    #[tokio::test]
    async fn delay_and_throttle_hold_each_piece_up() {
        let proxy = TcpProxy::start(echo().await).await.unwrap();
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        for slow in [Traffic::Delay(Duration::from_millis(30)), Traffic::Throttle(130)] {
            proxy.set(slow);
            let started = std::time::Instant::now();
            assert_eq!(ask(&mut stream).await.unwrap(), b"word");
            assert!(started.elapsed() >= Duration::from_millis(60), "{slow:?}: {:?}", started.elapsed());
        }
    }
}
