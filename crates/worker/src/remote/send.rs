//! One request to one server, and what its answer means for load and retry.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use overnight_types::{Timestamp, chain};
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};

use super::limit::Verdict;
use super::{Queued, RemoteConfig};
use crate::generate::Failure;

/// A server that asks for a longer pause than this is not believed.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

pub(super) enum Answer {
    /// An HTTP answer, whatever its status.
    Response { status: u16, body: Bytes, retry_after: Option<Duration>, verdict: Verdict },
    /// No whole answer; the server may have seen the request.
    Failed(Failure, Verdict),
    /// The server was not reached and never saw the request.
    Unreachable(String),
}

pub(super) async fn send(client: &reqwest::Client, config: &RemoteConfig, base: &str, queued: &Queued) -> Answer {
    let answer = tokio::time::timeout(config.request_timeout, exchange(client, config, base, queued)).await;
    answer.unwrap_or(Answer::Failed(Failure::Timeout, Verdict::Overloaded))
}

async fn exchange(client: &reqwest::Client, config: &RemoteConfig, base: &str, queued: &Queued) -> Answer {
    let url = format!("{base}{}", queued.endpoint);
    let request = client.post(url).header(CONTENT_TYPE, "application/json").body(queued.json.clone());
    let mut response = match request.send().await {
        Ok(response) => response,
        Err(err) => return failed(err),
    };
    let status = response.status().as_u16();
    let retry_after = retry_after(response.headers());
    let mut body = BytesMut::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if (body.len() + chunk.len()) as u64 > config.response_bytes_max => {
                let limit = config.response_bytes_max;
                let message = format!("the remote engine's answer is larger than {limit} bytes");
                return Answer::Failed(transient("response_too_large", message), Verdict::Neutral);
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(err) => return failed(err),
        }
    }
    if status == 401 {
        // Every item would be refused alike: the key is at fault, not the item.
        let message = "the remote engine refuses the API key (HTTP 401); check [engine] api_key".to_owned();
        return Answer::Failed(Failure::EngineTrouble { message }, Verdict::Neutral);
    }
    let overloaded = status == 429 || status >= 500;
    let verdict = if overloaded { Verdict::Overloaded } else { Verdict::Fine };
    Answer::Response { status, body: body.freeze(), retry_after, verdict }
}

fn failed(err: reqwest::Error) -> Answer {
    // The URL may hold a secret and is known from the settings.
    let err = err.without_url();
    if err.is_connect() {
        return Answer::Unreachable(chain(&err));
    }
    if err.is_timeout() {
        return Answer::Failed(Failure::Timeout, Verdict::Overloaded);
    }
    Answer::Failed(transient("connection_lost", chain(&err)), Verdict::Overloaded)
}

fn transient(code: &str, message: String) -> Failure {
    Failure::Transient { code: code.to_owned(), message }
}

/// Seconds or an HTTP date (RFC 9110, section 10.2.3).
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = chrono::DateTime::parse_from_rfc2822(text).ok()?;
            Timestamp::from_micros(at.timestamp_micros()).since(Timestamp::now())
        }
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, text.parse().unwrap());
        retry_after(&headers)
    }

    #[test]
    fn retry_after_is_read_in_both_forms() {
        assert_eq!(parse("7"), Some(Duration::from_secs(7)));
        assert_eq!(parse("999999999"), Some(RETRY_AFTER_MAX));
        assert_eq!(parse("soon"), None);
        assert_eq!(parse("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        let later = (chrono::Utc::now() + chrono::Duration::seconds(90)).to_rfc2822();
        let wait = parse(&later).unwrap();
        assert!((85..=90).contains(&wait.as_secs()), "{wait:?}");
    }
}
