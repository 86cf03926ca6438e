//! Tells the ends of jobs to a URL, as Standard Webhooks
//! (<https://github.com/standard-webhooks/standard-webhooks>, spec/standard-webhooks.md).
//!
//! Invariants: every event of the outbox is tried until a 2xx acknowledges it or its tries
//! are used up; all tries carry the same id and body, each its own timestamp and
//! signature. Delivery is at least once: a try whose acknowledgement was not recorded is
//! made again. Neither the URL nor a secret is ever logged: both open doors.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use overnight_store::{Guarded, OutboxEvent, Store};
use overnight_types::{Timestamp, chain};
use rand::Rng;
use reqwest::header::{CONTENT_TYPE, USER_AGENT};
use serde::Serialize;
use sha2_11::Sha256;
use tokio::sync::Semaphore;

use crate::Error;

/// How long the receiver may take to answer.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long a try holds its event: the answer's time, and that of recording it.
pub const HOLD: Duration = Duration::from_secs(15);
/// Tries of an event, the first one included.
pub const TRIES_MAX: u32 = 10;
/// An event that is older tells nobody anything new; it is left from a time without a receiver.
pub const AGE_MAX: Duration = Duration::from_secs(3 * 86_400);
/// The wait before the next try grows by this factor.
const BACKOFF_FACTOR: u32 = 4;
/// Shortest secret, bytes, as Standard Webhooks asks for.
const SECRET_BYTES_MIN: usize = 24;

/// Where events go.
#[derive(Clone, Default)]
pub struct WebhookConfig {
    /// `http://` or `https://`.
    pub url: String,
    /// At least one. `whsec_` and base64, or the text itself. Each signs, so that one can
    /// be replaced by another while both are in use.
    pub secrets: Vec<String>,
    /// Wait before the second try; the third one comes after four times as long.
    pub retry_min: Duration,
    /// Longest wait.
    pub retry_max: Duration,
}

impl std::fmt::Debug for WebhookConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookConfig").field("num_secrets", &self.secrets.len()).finish_non_exhaustive()
    }
}

/// A receiver. Clones share their connections and their one place.
#[derive(Clone)]
pub struct Webhook {
    client: reqwest::Client,
    url: reqwest::Url,
    keys: Arc<[Vec<u8>]>,
    retry_min: Duration,
    retry_max: Duration,
    /// One event at a time: a receiver that hangs must not take the other steps' places.
    pub(crate) place: Arc<Semaphore>,
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").field("num_keys", &self.keys.len()).finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct Body {
    id: String,
    object: &'static str,
    #[serde(rename = "type")]
    kind: String,
    created_at: i64,
    data: Data,
}

#[derive(Serialize)]
struct Data {
    id: String,
}

impl Webhook {
    /// Checks the settings; sends nothing yet. Errors with [`Error::Config`] on a URL that
    /// is not http(s), without a secret, and on a secret that is too short or no base64.
    pub fn new(config: &WebhookConfig) -> Result<Self, Error> {
        let wrong = |key, what: &str| Error::Config { key, what: what.to_owned() };
        let url = reqwest::Url::parse(&config.url)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| wrong("url", "is not an http:// or https:// address"))?;
        if config.secrets.is_empty() {
            return Err(wrong("secrets", "needs at least one, to sign events with"));
        }
        let keys = config.secrets.iter().map(|secret| key_of(secret)).collect::<Result<Vec<_>, _>>()?;
        let client = reqwest::Client::builder()
            .timeout(ANSWER_MAX)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|err| wrong("url", &format!("the HTTP client cannot be built: {err}")))?;
        Ok(Self {
            client,
            url,
            keys: keys.into(),
            retry_min: config.retry_min,
            retry_max: config.retry_max,
            place: Arc::new(Semaphore::new(1)),
        })
    }

    /// `v1,` and base64 for each key, separated by spaces.
    fn signatures(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let sign = |key: &Vec<u8>| {
            let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body);
            format!("v1,{}", BASE64.encode(mac.finalize().into_bytes()))
        };
        self.keys.iter().map(sign).collect::<Vec<_>>().join(" ")
    }

    /// One try. The error says in words why it is none that counts.
    async fn post(&self, event: &OutboxEvent) -> Result<(), String> {
        let id = event.id.to_string();
        let body = Body {
            id: id.clone(),
            object: "event",
            kind: event.kind.clone(),
            created_at: event.created_at.unix_seconds(),
            data: Data { id: event.job.to_string() },
        };
        let body = serde_json::to_vec(&body).map_err(|err| err.to_string())?;
        let timestamp = Timestamp::now().unix_seconds();
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("overnight/", env!("CARGO_PKG_VERSION")))
            .header("webhook-id", &id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", self.signatures(&id, timestamp, &body))
            .body(body);
        match request.send().await {
            Ok(response) if response.status().is_success() => Ok(()),
            Ok(response) => Err(format!("the receiver answered {}", response.status().as_u16())),
            Err(err) if err.is_timeout() => Err(format!("the receiver did not answer within {ANSWER_MAX:?}")),
            Err(err) => Err(format!("the receiver could not be reached: {}", chain(&err.without_url()))),
        }
    }

    /// Wait after the `tries`-th try, with jitter.
    fn backoff(&self, tries: u32) -> Duration {
        let factor = BACKOFF_FACTOR.saturating_pow(tries.saturating_sub(1));
        let wait = self.retry_min.saturating_mul(factor).min(self.retry_max);
        wait.mul_f64(rand::rng().random_range(0.75..1.25))
    }
}

/// `whsec_…` is base64 after the prefix; anything else is the key itself.
fn key_of(secret: &str) -> Result<Vec<u8>, Error> {
    let wrong = |what: &str| Error::Config { key: "secrets", what: what.to_owned() };
    let key = match secret.strip_prefix("whsec_") {
        Some(encoded) => {
            BASE64.decode(encoded).map_err(|_| wrong("one starts with whsec_ and is no base64 after it"))?
        }
        None => secret.as_bytes().to_vec(),
    };
    if key.len() < SECRET_BYTES_MIN {
        return Err(wrong(&format!("one has fewer than {SECRET_BYTES_MIN} bytes and can be guessed")));
    }
    Ok(key)
}

/// Makes one try at a claimed event and records what came of it.
pub async fn deliver(store: &dyn Store, webhook: &Webhook, event: &OutboxEvent) -> Result<(), Error> {
    let (id, tries) = (event.id, event.attempts);
    let recorded = if event.age > AGE_MAX {
        let reason = "nobody was there to be told for three days";
        tracing::warn!(event.id = %id, job.id = %event.job, "gave a webhook event up: {reason}");
        store.give_up_event_if_claimed(event, reason).await
    } else {
        match webhook.post(event).await {
            Ok(()) => {
                fail::fail_point!("webhook::after_send");
                tracing::info!(event.id = %id, job.id = %event.job, tries, "webhook event delivered");
                store.deliver_event_if_undelivered(id).await
            }
            Err(why) if tries >= TRIES_MAX => {
                tracing::error!(event.id = %id, job.id = %event.job, tries, "gave a webhook event up: {why}");
                store.give_up_event_if_claimed(event, &format!("after {tries} tries: {why}")).await
            }
            Err(why) => {
                let delay = webhook.backoff(tries);
                let delay_s = delay.as_secs_f32();
                tracing::warn!(event.id = %id, job.id = %event.job, tries, delay_s, "could not deliver a webhook event, trying again: {why}");
                store.retry_event_if_claimed(event, delay).await
            }
        }
    };
    match recorded.map_err(Error::store("record a webhook's try"))? {
        Guarded::Applied(()) => {}
        Guarded::Lost { now } => tracing::debug!(event.id = %id, ?now, "another try at a webhook event was faster"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhook(secrets: &[&str]) -> Result<Webhook, Error> {
        Webhook::new(&WebhookConfig {
            url: "https://receiver.test/hook".to_owned(),
            secrets: secrets.iter().map(|&secret| secret.to_owned()).collect(),
            retry_min: Duration::from_secs(5),
            retry_max: Duration::from_secs(8 * 3600),
        })
    }

    /// The vector of the Standard Webhooks libraries.
    #[test]
    fn signature_is_that_of_the_standard() {
        let webhook = webhook(&["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]).unwrap();
        let signature = webhook.signatures("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn every_secret_signs_while_one_is_replaced() {
        let (old, new) = ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "a text of more than twenty-four bytes");
        let both = webhook(&[old, new]).unwrap().signatures("evt_1", 7, b"{}");
        let alone = [old, new].map(|secret| webhook(&[secret]).unwrap().signatures("evt_1", 7, b"{}"));
        assert_eq!(both, alone.join(" "));
        assert_ne!(alone[0], alone[1]);
    }

    #[test]
    fn waits_grow_and_the_last_try_comes_within_three_days() {
        let webhook = webhook(&["a text of more than twenty-four bytes"]).unwrap();
        let most: Vec<Duration> = (1..TRIES_MAX).map(|tries| webhook.backoff(tries)).collect();
        assert!(most.len() >= 7, "at least seven retries");
        assert!(most[0] <= Duration::from_secs(7) && most[0] >= Duration::from_secs(3), "{most:?}");
        assert!(most[5] > 100 * most[0], "{most:?}");
        assert!(most.iter().sum::<Duration>() < AGE_MAX, "{most:?}");
    }

    #[test]
    fn settings_that_cannot_work_are_refused_without_showing_a_secret() {
        for (secrets, says) in
            [(&["short"][..], "fewer than 24"), (&["whsec_***not base64***"], "base64"), (&[], "at least one")]
        {
            let error = webhook(secrets).expect_err("refused").to_string();
            assert!(error.contains(says) && !error.contains("short") && !error.contains("***"), "{error}");
        }
        let secrets = vec!["a text of more than twenty-four bytes".to_owned()];
        let config = WebhookConfig { url: "ftp://x/".to_owned(), secrets, ..WebhookConfig::default() };
        assert!(!format!("{config:?}").contains("twenty-four"));
        assert!(matches!(Webhook::new(&config), Err(Error::Config { key: "url", .. })));
    }
}
