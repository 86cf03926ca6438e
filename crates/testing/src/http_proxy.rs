//! A proxy for HTTP/1.1 that meets single requests with what an object store does on a bad
//! day: errors, slow answers, connections that break in the middle of a body, and answers
//! that are lost after the work was done.
//!
//! Passes bytes on as they are but for the `connection` header (each request has a
//! connection of its own), so signed requests stay valid. Takes requests with a
//! `content-length` or without a body; object stores' clients send no others.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Longest request head.
const HEAD_BYTES_MAX: usize = 64 << 10;
const PIECE: usize = 16 << 10;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// It is answered with this status and S3's error for it, and not passed on.
    Refused(u16),
    /// It is passed on after a while.
    Slow(Duration),
    /// The connection breaks after so many bytes of its body, or after its head when it has fewer.
    CutRequest(u64),
    /// The connection breaks after so many bytes of the answer.
    CutAnswer(u64),
    /// It is passed on and done, and the connection breaks before the answer.
    LostAnswer,
}

/// A share of requests and what may happen to them.
#[derive(Debug, Clone, Default)]
pub struct Weather {
    /// Of a hundred requests.
    pub percent: u32,
    /// One of them is drawn.
    pub fates: Vec<Fate>,
}

#[derive(Debug)]
struct State {
    weather: Weather,
    random: StdRng,
    met: BTreeMap<Fate, u64>,
    num_server_errors: u64,
}

/// A proxy in front of one server. Clones are the same proxy; it serves until the
/// runtime that started it ends.
#[derive(Debug, Clone)]
pub struct HttpProxy {
    address: SocketAddr,
    target: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl HttpProxy {
    /// Listens on loopback; draws by `seed`.
    pub async fn start(target: SocketAddr, seed: u64) -> io::Result<Self> {
        Self::start_on(IpAddr::V4(Ipv4Addr::LOCALHOST), target, seed).await
    }

    /// Listens on another address of this machine.
    pub async fn start_on(host: IpAddr, target: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((host, 0)).await?;
        let random = StdRng::seed_from_u64(seed);
        let state = State { weather: Weather::default(), random, met: BTreeMap::new(), num_server_errors: 0 };
        let proxy = Self { address: listener.local_addr()?, target, state: Arc::new(Mutex::new(state)) };
        let serving = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let proxy = serving.clone();
                // However it ends, both sides are closed with it.
                tokio::spawn(async move { proxy.serve(client).await });
            }
        });
        Ok(proxy)
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on; draws are those of `seed`.
    pub fn set(&self, weather: Weather, seed: u64) {
        let mut state = self.lock();
        state.weather = weather;
        state.random = StdRng::seed_from_u64(seed);
    }

    /// Requests that met each fate so far.
    pub fn met(&self) -> BTreeMap<Fate, u64> {
        self.lock().met.clone()
    }

    /// Answers of the server itself that said 5xx, and requests that it was not there for.
    pub fn num_server_errors(&self) -> u64 {
        self.lock().num_server_errors
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self) -> Option<Fate> {
        let mut state = self.lock();
        let State { weather, random, met, .. } = &mut *state;
        if weather.fates.is_empty() || random.random_range(0..100) >= weather.percent {
            return None;
        }
        let fate = weather.fates[random.random_range(0..weather.fates.len())];
        *met.entry(fate).or_default() += 1;
        Some(fate)
    }

    async fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        let Some(request) = Request::read(&mut client).await? else { return Ok(()) };
        let fate = self.draw();
        match fate {
            Some(Fate::Refused(status)) => {
                // Read to its end, or the client would see a broken connection instead of the answer.
                request.pass_body(&mut client, &mut tokio::io::sink(), u64::MAX).await?;
                client.write_all(&refusal(status)).await?;
                return client.shutdown().await;
            }
            Some(Fate::Slow(wait)) => tokio::time::sleep(wait).await,
            _ => {}
        }
        let mut server = match TcpStream::connect(self.target).await {
            Ok(server) => server,
            Err(err) => {
                self.lock().num_server_errors += 1;
                return Err(err);
            }
        };
        server.write_all(&request.head).await?;
        if let Some(Fate::CutRequest(bytes)) = fate {
            return request.pass_body(&mut client, &mut server, bytes.min(request.body_bytes / 2)).await;
        }
        request.pass_body(&mut client, &mut server, u64::MAX).await?;
        let most = match fate {
            Some(Fate::CutAnswer(bytes)) => bytes,
            Some(Fate::LostAnswer) => 0,
            _ => u64::MAX,
        };
        self.pass_answer(&mut server, &mut client, most).await?;
        if most == u64::MAX { client.shutdown().await } else { Ok(()) }
    }

    /// Passes an answer on, at most so many bytes of it; waits for its first bytes in any case.
    async fn pass_answer(&self, server: &mut TcpStream, client: &mut TcpStream, most: u64) -> io::Result<()> {
        let mut left = most;
        let mut piece = vec![0; PIECE];
        let mut is_first = true;
        loop {
            let len = server.read(&mut piece).await?;
            if std::mem::take(&mut is_first) && (len == 0 || piece[..len].get(9) == Some(&b'5')) {
                self.lock().num_server_errors += 1;
            }
            let taken = usize::try_from(left).unwrap_or(usize::MAX).min(len);
            client.write_all(&piece[..taken]).await?;
            left -= taken as u64;
            if len == 0 || left == 0 {
                return Ok(());
            }
        }
    }
}

/// A request as far as it is read: its head, for one connection alone.
#[derive(Debug)]
struct Request {
    head: Vec<u8>,
    /// Bytes of the body that came with the head.
    begun: Vec<u8>,
    body_bytes: u64,
}

impl Request {
    /// `None` when the client goes away instead.
    async fn read(client: &mut TcpStream) -> io::Result<Option<Self>> {
        let mut bytes = Vec::new();
        let end = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at;
            }
            if bytes.len() > HEAD_BYTES_MAX || client.read_buf(&mut bytes).await? == 0 {
                return Ok(None);
            }
        };
        let begun = bytes.split_off(end + 4);
        let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let value = |line: &str, name: &str| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        };
        let length = text.lines().find_map(|line| value(line, "content-length"));
        let body_bytes = length.and_then(|length| length.parse().ok()).unwrap_or(0);
        let kept = text.lines().filter(|line| value(line, "connection").is_none());
        let head: String = kept.chain(["connection: close", ""]).map(|line| format!("{line}\r\n")).collect();
        Ok(Some(Self { head: head.into_bytes(), begun, body_bytes }))
    }

    /// Passes the body on, at most so many bytes of it.
    async fn pass_body(
        &self,
        client: &mut TcpStream,
        to: &mut (impl AsyncWriteExt + Unpin),
        most: u64,
    ) -> io::Result<()> {
        let begun = usize::try_from(most).unwrap_or(usize::MAX).min(self.begun.len());
        to.write_all(&self.begun[..begun]).await?;
        let left = self.body_bytes.min(most).saturating_sub(begun as u64);
        let passed = tokio::io::copy(&mut client.take(left), to).await?;
        if passed < left { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

fn refusal(status: u16) -> Vec<u8> {
    let code = match status {
        403 => "AccessDenied",
        503 => "SlowDown",
        _ => "InternalError",
    };
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>a test says so</Message></Error>"
    );
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Said\r\ncontent-type: application/xml\r\ncontent-length: {length}");
    format!("{head}\r\nconnection: close\r\n\r\n{body}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"0123456789";

    /// Answers each request with its body, and says how many bodies came whole.
    async fn echo() -> (SocketAddr, Arc<Mutex<u32>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let whole = Arc::new(Mutex::new(0));
        let counted = whole.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let counted = counted.clone();
                tokio::spawn(async move {
                    let Ok(Some(request)) = Request::read(&mut stream).await else { return };
                    let mut body = Vec::new();
                    if request.pass_body(&mut stream, &mut body, u64::MAX).await.is_ok() {
                        *counted.lock().unwrap() += 1;
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                        stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
                    }
                });
            }
        });
        (address, whole)
    }

    async fn put(proxy: &HttpProxy) -> String {
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        let head =
            format!("PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\nConnection: keep-alive\r\n\r\n", BODY.len());
        stream.write_all(&[head.as_bytes(), BODY].concat()).await.unwrap();
        let mut answer = Vec::new();
        // A connection that breaks ends it as well.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn each_fate_is_met_and_healed() {
        let (target, whole) = echo().await;
        let proxy = HttpProxy::start(target, 1).await.unwrap();
        assert!(put(&proxy).await.ends_with("0123456789"));
        let always = |fate| Weather { percent: 100, fates: vec![fate] };
        proxy.set(always(Fate::Refused(503)), 1);
        let refused = put(&proxy).await;
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("SlowDown"), "{refused}");
        assert_eq!(*whole.lock().unwrap(), 1, "what is refused was not passed on");
        proxy.set(always(Fate::CutRequest(5)), 1);
        assert_eq!(put(&proxy).await, "");
        assert_eq!(*whole.lock().unwrap(), 1, "half a body is no body");
        proxy.set(always(Fate::LostAnswer), 1);
        assert_eq!(put(&proxy).await, "");
        assert_eq!(*whole.lock().unwrap(), 2, "it was done, and nobody knows");
        proxy.set(always(Fate::CutAnswer(12)), 1);
        assert_eq!(put(&proxy).await, "HTTP/1.1 200");
        proxy.set(always(Fate::Slow(Duration::from_millis(50))), 1);
        let started = std::time::Instant::now();
        assert!(put(&proxy).await.ends_with("0123456789"));
        assert!(started.elapsed() >= Duration::from_millis(50));
        proxy.set(Weather::default(), 1);
        assert!(put(&proxy).await.ends_with("0123456789"));
        assert_eq!(proxy.met().values().sum::<u64>(), 5);
    }

    #[tokio::test]
    async fn same_seed_strikes_the_same_requests() {
        let (target, _) = echo().await;
        let proxy = HttpProxy::start(target, 0).await.unwrap();
        let mut runs = Vec::new();
        for _ in 0..2 {
            proxy.set(Weather { percent: 50, fates: vec![Fate::Refused(500), Fate::Refused(403)] }, 7);
            let mut answers = Vec::new();
            for _ in 0..12 {
                answers.push(put(&proxy).await.chars().take(12).collect::<String>());
            }
            runs.push(answers);
        }
        assert_eq!(runs[0], runs[1]);
        assert!(
            runs[0].iter().any(|answer| answer.contains("200")) && runs[0].iter().any(|answer| !answer.contains("200"))
        );
    }
}
