//! Downloading one file over HTTPS: short connect time, resumed where it stopped,
//! its size and hash compared before it gets its name.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::StreamExt;
use sha2::{Digest, Sha256};

use crate::client::download::hex;
use crate::output::{Ui, human};
use crate::progress::Display;

/// A mirror that cannot be reached is passed over within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// No byte for this long means that the mirror is gone.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Tries of one file at one mirror; each goes on where the last one stopped.
const TRIES_MAX: u32 = 3;

/// What is known of a file before it is fetched.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    pub(crate) bytes: Option<u64>,
    pub(crate) sha256: Option<String>,
}

/// The client for mirrors: no retries of its own.
pub(crate) fn http() -> Result<reqwest::Client, String> {
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .user_agent(concat!("batch/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|err| err.to_string())
}

/// The words of an error and its causes.
pub(crate) fn words(err: &reqwest::Error) -> String {
    if err.is_connect() || err.is_timeout() {
        let mut cause: &dyn std::error::Error = err;
        while let Some(source) = cause.source() {
            cause = source;
        }
        return format!("not reachable: {cause}");
    }
    overnight_types::chain(err)
}

/// Fetches `url` into `folder/wanted.name`. Returns the file's size and hash.
pub(crate) async fn file(
    http: &reqwest::Client,
    ui: &Ui,
    url: &str,
    token: Option<&str>,
    folder: &Path,
    wanted: &Wanted,
) -> Result<(u64, String), String> {
    let path = folder.join(&wanted.name);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|err| format!("could not make {}: {err}", parent.display()))?;
    }
    let partial = PathBuf::from(format!("{}.partial", path.display()));
    let mut tries = 0;
    loop {
        tries += 1;
        match attempt(http, ui, url, token, &partial, wanted).await {
            Ok(()) => break,
            Err((true, reason)) if tries < TRIES_MAX => {
                ui.say(format!("{}: {reason}; going on", wanted.name));
                tokio::time::sleep(Duration::from_millis(500) * tries).await;
            }
            Err((_, reason)) => return Err(reason),
        }
    }
    let found = check(&partial, wanted)?;
    std::fs::rename(&partial, &path).map_err(|err| format!("could not rename {}: {err}", partial.display()))?;
    Ok(found)
}

/// Compares size and hash; a file that does not match is removed.
pub(crate) fn check(path: &Path, wanted: &Wanted) -> Result<(u64, String), String> {
    let (bytes, hash) = hash_file(path).map_err(|err| format!("could not read {}: {err}", path.display()))?;
    let size_ok = wanted.bytes.is_none_or(|wanted| wanted == bytes);
    let hash_ok = wanted.sha256.as_ref().is_none_or(|wanted| wanted.eq_ignore_ascii_case(&hash));
    if size_ok && hash_ok {
        return Ok((bytes, hash));
    }
    let _ = std::fs::remove_file(path);
    let expected = wanted.sha256.clone().unwrap_or_else(|| "any hash".to_owned());
    Err(format!("{} is not what it should be: {bytes} bytes, sha256 {hash}, expected {expected}", wanted.name))
}

fn hash_file(path: &Path) -> std::io::Result<(u64, String)> {
    let mut file = std::fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((bytes, hex(&hash.finalize())));
        }
        bytes += read as u64;
        hash.update(&buffer[..read]);
    }
}

/// One try; the flag says whether another one may help.
async fn attempt(
    http: &reqwest::Client,
    ui: &Ui,
    url: &str,
    token: Option<&str>,
    partial: &Path,
    wanted: &Wanted,
) -> Result<(), (bool, String)> {
    let disk = |err: std::io::Error| (false, format!("could not write {}: {err}", partial.display()));
    let mut have = std::fs::metadata(partial).map_or(0, |meta| meta.len());
    if wanted.bytes.is_some_and(|bytes| have >= bytes && bytes > 0) {
        return Ok(());
    }
    let mut request = http.get(url);
    if have > 0 {
        request = request.header("Range", format!("bytes={have}-"));
    }
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    // A first connection that fails means another mirror, not another try.
    let response = request.send().await.map_err(|err| (have > 0 && !err.is_connect(), words(&err)))?;
    let status = response.status();
    if status == reqwest::StatusCode::RANGE_NOT_SATISFIABLE {
        std::fs::remove_file(partial).map_err(disk)?;
        return Err((true, "the mirror's file is shorter than what is here".to_owned()));
    }
    if !status.is_success() {
        return Err((status.is_server_error(), format!("answered {status} for {url}")));
    }
    let mut file = std::fs::File::options().create(true).append(true).open(partial).map_err(disk)?;
    if have > 0 && status != reqwest::StatusCode::PARTIAL_CONTENT {
        file.set_len(0).map_err(disk)?;
        have = 0;
    }
    let total = response.content_length().map(|length| length + have).or(wanted.bytes);
    let mut display = Display::new(ui);
    let (start, had) = (Instant::now(), have);
    let mut body = response.bytes_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|err| (true, words(&err)))?;
        file.write_all(&piece).map_err(disk)?;
        have += piece.len() as u64;
        if wanted.bytes.is_some_and(|bytes| have > bytes) {
            file.set_len(0).map_err(disk)?;
            return Err((false, format!("sent more than {} bytes of {}", wanted.bytes.unwrap_or(0), wanted.name)));
        }
        display.show(start.elapsed(), &wanted.name, &line(&wanted.name, have, total, have - had, start.elapsed()));
    }
    file.sync_all().map_err(disk)
}

fn line(name: &str, have: u64, total: Option<u64>, fetched: u64, took: Duration) -> String {
    let rate = fetched as f64 / took.as_secs_f64().max(0.001);
    let of = total.map_or(String::new(), |total| format!("/{}", human::bytes(total)));
    let percent = total.filter(|total| *total > 0).map_or(String::new(), |total| format!(" {}%", have * 100 / total));
    format!("{name}  {}{of}{percent} · {}/s", human::bytes(have), human::bytes(rate as u64))
}
