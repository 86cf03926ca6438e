//! What an answer means for its item: an outcome, another try, or trouble that is
//! not the item's. Decides; writes nothing.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use overnight_blobs::{error_line, response_line};
use overnight_types::{BatchRequestId, ErrorCode, JobId, OutcomeKind, Usage};
use rand::Rng;

use crate::WorkerConfig;
use crate::generate::Failure;
use crate::mapper::{AnswerState, ErrorBody, Response, failure_response};

/// No server's `Retry-After` delays an item by more than this.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// A fault's message as kept in the database.
const MESSAGE_CHARS_MAX: usize = 1_000;

/// How an item ended, before its record is written.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) outcome: OutcomeKind,
    pub(crate) http_status: Option<u16>,
    pub(crate) error_code: Option<String>,
    pub(crate) usage: Usage,
    pub(crate) finish_reason: Option<String>,
    answer: AnswerBody,
}

#[derive(Debug, Clone)]
enum AnswerBody {
    Response(u16, Bytes),
    None(ErrorCode, &'static str),
}

impl Ended {
    /// The finished output line.
    pub(crate) fn line(&self, id: BatchRequestId, custom_id: &[u8], request_id: &str) -> Bytes {
        match &self.answer {
            AnswerBody::Response(status, body) => response_line(id, custom_id, *status, request_id, body),
            AnswerBody::None(code, message) => error_line(id, custom_id, *code, message),
        }
    }

    /// An HTTP answer that stands.
    pub(crate) fn response(response: Response) -> Self {
        let success = (200..300).contains(&response.status);
        let code = response.error_code.unwrap_or_else(|| format!("http_{}", response.status));
        Self {
            outcome: if success { OutcomeKind::Completed } else { OutcomeKind::Failed },
            http_status: Some(response.status),
            error_code: (!success).then_some(code),
            usage: response.usage,
            finish_reason: response.finish_reason,
            answer: AnswerBody::Response(response.status, response.body),
        }
    }

    /// An error object as HTTP answer.
    pub(crate) fn error(status: u16, error: &ErrorBody) -> Self {
        Self::response(Response {
            status,
            body: error.to_bytes(),
            usage: Usage::default(),
            finish_reason: None,
            error_code: error.code.clone(),
            retryable: false,
        })
    }

    /// The input bytes are gone or not those that were validated.
    pub(crate) fn input_unavailable(why: &str) -> Self {
        let code = ErrorCode::InputUnavailable.as_str();
        let error = ErrorBody {
            message: format!("the input cannot be read as it was validated: {why}"),
            kind: "server_error",
            param: None,
            code: Some(code.to_owned()),
        };
        Self::error(500, &error)
    }

    /// No answer within the time limit.
    pub(crate) fn request_timeout() -> Self {
        Self::without_answer(ErrorCode::RequestTimeout, "the request took longer than its time limit")
    }

    /// Its workers died while it ran alone.
    pub(crate) fn worker_lost() -> Self {
        Self::without_answer(ErrorCode::WorkerLost, "three workers died while this request ran alone")
    }

    fn without_answer(code: ErrorCode, message: &'static str) -> Self {
        Self {
            outcome: OutcomeKind::Failed,
            http_status: None,
            error_code: Some(code.as_str().to_owned()),
            usage: Usage::default(),
            finish_reason: None,
            answer: AnswerBody::None(code, message),
        }
    }
}

/// What to do about an item's answer.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// More outputs will come.
    Pending,
    /// It ended.
    Ended(Ended),
    /// Another try may fare better; without one, `last` stands.
    Retry {
        /// What the last try ended as.
        last: Ended,
        /// In words, for the fault's row.
        message: String,
    },
    /// The engine's trouble: the shard goes back.
    Trouble(String),
    /// Cancelled by us: the item stays undone.
    Dropped,
}

/// Judges an answer.
pub(crate) fn judge(state: AnswerState) -> Verdict {
    match state {
        AnswerState::Pending => Verdict::Pending,
        AnswerState::Done(response) if response.retryable => {
            let message = shortened(&String::from_utf8_lossy(&response.body));
            Verdict::Retry { last: Ended::response(response), message }
        }
        AnswerState::Done(response) => Verdict::Ended(Ended::response(response)),
        AnswerState::Failed(Failure::EngineTrouble { message }) => Verdict::Trouble(message),
        AnswerState::Failed(Failure::Cancelled) => Verdict::Dropped,
        AnswerState::Failed(Failure::Timeout) => {
            Verdict::Retry { last: Ended::request_timeout(), message: "no answer within the time limit".to_owned() }
        }
        AnswerState::Failed(failure @ Failure::Refused { .. }) => {
            Verdict::Ended(Ended::response(failure_response(&failure)))
        }
        AnswerState::Failed(failure) => {
            let Failure::Transient { message, .. } = &failure else { unreachable!("all other failures came before") };
            let message = shortened(message);
            Verdict::Retry { last: Ended::response(failure_response(&failure)), message }
        }
    }
}

fn shortened(message: &str) -> String {
    message.chars().take(MESSAGE_CHARS_MAX).collect()
}

/// How long an item waits after its `attempts`th try: exponential with full jitter
/// (Brooker, Exponential Backoff and Jitter, 2015), never sooner than the server asked.
pub(crate) fn backoff(config: &WorkerConfig, attempts: u32, retry_after: Option<Duration>) -> Duration {
    let doublings = attempts.saturating_sub(1).min(30);
    let most = config.backoff_min.saturating_mul(1 << doublings).min(config.backoff_max);
    let jittered = most.mul_f64(rand::rng().random_range(0.0..=1.0));
    // Items that a server sent away together must not come back together.
    match retry_after.map(|wait| wait.min(RETRY_AFTER_MAX)) {
        Some(wait) => wait + jittered.min(wait.max(config.backoff_min)),
        None => jittered,
    }
}

/// Retries used per running job, as far as this worker knows.
#[derive(Debug, Default)]
pub(crate) struct RetryBudgets {
    used: Mutex<HashMap<JobId, u64>>,
}

impl RetryBudgets {
    /// Takes over what the database knew at a claim.
    pub(crate) fn at_least(&self, job: JobId, used: u64) {
        let mut budgets = self.lock();
        let entry = budgets.entry(job).or_default();
        *entry = used.max(*entry);
    }

    /// Takes one retry of a job's `budget`; `false` when it is used up.
    pub(crate) fn try_take(&self, job: JobId, budget: u64) -> bool {
        let mut budgets = self.lock();
        let used = budgets.entry(job).or_default();
        let left = *used < budget;
        *used += u64::from(left);
        left
    }

    /// Forgets jobs that this worker runs no more.
    pub(crate) fn retain(&self, running: &[JobId]) {
        self.lock().retain(|job, _| running.contains(job));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, u64>> {
        // One map operation per section, whole across a panic.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_and_stays_within_its_bound() {
        let config = WorkerConfig::default();
        let longest = |attempts| (0..200).map(|_| backoff(&config, attempts, None)).max().unwrap();
        assert!(longest(1) <= Duration::from_secs(1));
        assert!(longest(4) > Duration::from_secs(4) && longest(4) <= Duration::from_secs(8));
        assert!(longest(60) <= Duration::from_secs(300));
    }

    // stacks PR#2298, payload PR#16579: retries without jitter come back all at once.
    #[test]
    fn retries_after_a_mass_failure_do_not_come_back_together() {
        let config = WorkerConfig::default();
        for retry_after in [None, Some(Duration::from_secs(2))] {
            let mut buckets = [0u32; 10];
            for _ in 0..1_000 {
                let wait = backoff(&config, 3, retry_after);
                let spread = wait.saturating_sub(retry_after.unwrap_or_default());
                let widest = if retry_after.is_some() { 2.0 } else { 4.0 };
                buckets[((spread.as_secs_f64() / widest * 10.0) as usize).min(9)] += 1;
            }
            let fullest = buckets.iter().max().unwrap();
            assert!(*fullest < 700, "{retry_after:?}: {buckets:?}");
            assert!(buckets.iter().filter(|count| **count > 0).count() >= 8, "{retry_after:?}: {buckets:?}");
        }
    }

    #[test]
    fn retry_after_is_a_floor() {
        let config = WorkerConfig::default();
        let wait = Duration::from_secs(30);
        assert!((0..100).all(|_| backoff(&config, 1, Some(wait)) >= wait));
        assert!(backoff(&config, 1, Some(Duration::from_secs(90_000))) < Duration::from_secs(7_201));
    }

    #[test]
    fn budget_is_shared_by_all_shards_of_a_job() {
        let budgets = RetryBudgets::default();
        let job = JobId::new();
        budgets.at_least(job, 3);
        assert!(budgets.try_take(job, 5) && budgets.try_take(job, 5));
        assert!(!budgets.try_take(job, 5));
        budgets.at_least(job, 1);
        assert!(!budgets.try_take(job, 5), "an older count does not give retries back");
        budgets.retain(&[]);
        assert!(budgets.try_take(job, 5));
    }
}
