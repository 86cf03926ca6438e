//! The progress line: its numbers, its rate over a window, and how it is drawn.
//!
//! On a terminal one line is redrawn in place; elsewhere a line is written every
//! ten seconds and at every change of status, without carriage returns.

use std::collections::VecDeque;
use std::io::Write;
use std::time::Duration;

use serde_json::Value;

use crate::output::table::shorten;
use crate::output::{Ui, escape, human};

/// The rate looks back this far.
const WINDOW: Duration = Duration::from_secs(60);
/// No estimate before there is this much to go by.
const ESTIMATE_AFTER: Duration = Duration::from_secs(30);
/// Pause between lines where nothing can be redrawn.
const LINE_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Duration,
    done: u64,
    tokens: u64,
}

/// Rates over a sliding window; time is given by the caller.
#[derive(Debug, Default)]
pub(crate) struct Rate {
    samples: VecDeque<Sample>,
}

impl Rate {
    /// Adds what is done by `at`, a time since any fixed start.
    pub(crate) fn push(&mut self, at: Duration, done: u64, tokens: u64) {
        // A new round starts its counts anew.
        if self.samples.back().is_some_and(|last| last.done > done || last.tokens > tokens) {
            self.samples.clear();
        }
        self.samples.push_back(Sample { at, done, tokens });
        while self.samples.len() > 2 && at.saturating_sub(self.samples[1].at) >= WINDOW {
            self.samples.pop_front();
        }
    }

    /// Requests and tokens per second, once two moments are known.
    pub(crate) fn per_second(&self) -> Option<(f64, f64)> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let seconds = last.at.checked_sub(first.at)?.as_secs_f64();
        (seconds > 0.0)
            .then(|| ((last.done - first.done) as f64 / seconds, (last.tokens - first.tokens) as f64 / seconds))
    }

    /// Time left for `unfinished` requests: their tokens by the average so far, over the
    /// rate of tokens. `None` until there are 30 s of data, and while nothing moves.
    pub(crate) fn time_left(&self, unfinished: u64) -> Option<Duration> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        if last.at.saturating_sub(first.at) < ESTIMATE_AFTER {
            return None;
        }
        let (requests, tokens) = self.per_second()?;
        let seconds = if last.tokens > 0 && last.done > 0 && tokens > 0.0 {
            unfinished as f64 * (last.tokens as f64 / last.done as f64) / tokens
        } else if requests > 0.0 {
            unfinished as f64 / requests
        } else {
            return None;
        };
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// The counts of a batch object that the line shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    pub(crate) id: String,
    pub(crate) status: String,
    pub(crate) paused: bool,
    pub(crate) total: u64,
    /// With an outcome of any kind.
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Cancelled or expired: among the done ones, and yet never run to an end.
    pub(crate) given_up: u64,
    pub(crate) tokens: u64,
}

impl Counts {
    /// Answered or failed.
    pub(crate) fn ran(&self) -> u64 {
        self.done.saturating_sub(self.given_up)
    }

    /// Reads a batch object of the API.
    pub(crate) fn of(batch: &Value) -> Self {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let counts = &batch["request_counts"];
        let (total, completed, failed) =
            (number(&counts["total"]), number(&counts["completed"]), number(&counts["failed"]));
        let outcomes = &batch["outcome_counts"];
        let given_up = number(&outcomes["canceled"]) + number(&outcomes["expired"]);
        Self {
            id: batch["id"].as_str().unwrap_or_default().to_owned(),
            status: batch["status"].as_str().unwrap_or_default().to_owned(),
            paused: !batch["paused_at"].is_null(),
            total,
            done: completed + failed + given_up,
            failed,
            given_up,
            tokens: number(&batch["usage"]["total_tokens"]),
        }
    }

    fn percent(&self) -> u64 {
        // Never 100 before the last one is done.
        (self.done.saturating_mul(100)).checked_div(self.total).unwrap_or(0)
    }
}

/// What the line shows beside counts and rates.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside<'a> {
    /// Why nothing runs; then there is no rate to show.
    pub(crate) waiting_for: Option<&'a str>,
    /// Share of the engine's KV cache in use, 0 to 1, where one is known.
    pub(crate) kv_cache_usage: Option<f64>,
}

/// The line itself, without colour or line end.
pub(crate) fn line(counts: &Counts, rate: &Rate, beside: Beside<'_>) -> String {
    let status = if counts.paused { "paused".to_owned() } else { escape(&counts.status).into_owned() };
    let mut text = format!("{} {status}", short_id(&counts.id));
    if counts.total == 0 {
        return text;
    }
    text.push_str(&format!(
        "  {}/{} {}% · {} failed",
        human::count(counts.done),
        human::count(counts.total),
        counts.percent(),
        human::count(counts.failed)
    ));
    if let Some(reason) = beside.waiting_for {
        text.push_str(&format!(" · waiting: {}", escape(reason)));
        return text;
    }
    if let Some((requests, tokens)) = rate.per_second() {
        text.push_str(&format!(" · {} req/s", human::rough(requests)));
        if counts.tokens > 0 {
            text.push_str(&format!(" · {} tok/s", human::rough(tokens)));
        }
    }
    if let Some(usage) = beside.kv_cache_usage {
        text.push_str(&format!(" · KV {:.0}%", 100.0 * usage));
    }
    let left = rate.time_left(counts.total.saturating_sub(counts.done));
    text.push_str(&format!(" · ETA {}", left.map_or_else(|| "–".to_owned(), human::duration)));
    text
}

/// An id short enough for a line and long enough to be found by.
pub(crate) fn short_id(id: &str) -> String {
    match id.char_indices().nth("batch_".len() + 12) {
        Some((end, _)) => format!("{}…", &id[..end]),
        None => id.to_owned(),
    }
}

/// Draws progress on stderr.
#[derive(Debug)]
pub(crate) struct Display {
    shown: bool,
    redraw: bool,
    width: usize,
    drawn: bool,
    /// When, at which status, and which.
    last_line: Option<(Duration, String, String)>,
}

impl Display {
    pub(crate) fn new(ui: &Ui) -> Self {
        Self { shown: ui.progress, redraw: ui.stderr_is_terminal, width: ui.width, drawn: false, last_line: None }
    }

    /// Whether anybody sees it.
    pub(crate) fn is_shown(&self) -> bool {
        self.shown
    }

    /// Shows `text`; `status` decides whether a line is due where nothing is redrawn.
    pub(crate) fn show(&mut self, at: Duration, status: &str, text: &str) {
        if !self.shown {
            return;
        }
        let mut stderr = std::io::stderr().lock();
        if self.redraw {
            let _ = write!(stderr, "\r\x1b[2K{}", shorten(text, self.width.saturating_sub(1)));
            let _ = stderr.flush();
            self.drawn = true;
            return;
        }
        let due = match &self.last_line {
            None => true,
            Some((last, last_status, last_text)) => {
                last_text != text && (last_status != status || at.saturating_sub(*last) >= LINE_EVERY)
            }
        };
        if due {
            let _ = writeln!(stderr, "{text}");
            self.last_line = Some((at, status.to_owned(), text.to_owned()));
        }
    }

    /// Takes the redrawn line away, so that something else can be written.
    pub(crate) fn clear(&mut self) {
        if self.drawn {
            let mut stderr = std::io::stderr().lock();
            let _ = write!(stderr, "\r\x1b[2K");
            let _ = stderr.flush();
            self.drawn = false;
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        Counts {
            id: "batch_01934567890abcdef0123456789abcde".to_owned(),
            status: "in_progress".to_owned(),
            paused: false,
            total: 100_000,
            done: 41_208,
            failed: 39,
            given_up: 0,
            tokens: 5_000_000,
        }
    }

    #[test]
    fn estimate_is_a_dash_until_thirty_seconds_of_data() {
        let mut rate = Rate::default();
        for second in 0..30 {
            rate.push(Duration::from_secs(second), 1_000 * second, 100_000 * second);
        }
        assert!(line(&counts(), &rate, Beside::default()).ends_with("ETA –"));
        rate.push(Duration::from_secs(30), 30_000, 3_000_000);
        let text = line(&counts(), &rate, Beside::default());
        assert_eq!(
            text,
            "batch_01934567890a… in_progress  41,208/100,000 41% · 39 failed · 1.0k req/s · 100.0k tok/s · ETA 58s"
        );
        let full = Beside { kv_cache_usage: Some(0.716), ..Beside::default() };
        assert!(line(&counts(), &rate, full).ends_with(" · 100.0k tok/s · KV 72% · ETA 58s"));
        let waits = Beside { waiting_for: Some("its turn"), ..full };
        assert!(line(&counts(), &rate, waits).ends_with("39 failed · waiting: its turn"), "no rate of nothing");
    }

    #[test]
    fn estimate_follows_tokens_not_requests() {
        let mut rate = Rate::default();
        rate.push(Duration::ZERO, 0, 0);
        rate.push(Duration::from_secs(40), 100, 4_000);
        // 40 tokens a request, 100 tokens a second: 0.4 s a request.
        assert_eq!(rate.time_left(100), Some(Duration::from_secs(40)));
    }

    #[test]
    fn rate_looks_back_a_minute_and_starts_anew_with_a_round() {
        let mut rate = Rate::default();
        for second in 0..=600 {
            rate.push(Duration::from_secs(second), if second <= 500 { 0 } else { (second - 500) * 10 }, 0);
        }
        let (requests, _) = rate.per_second().expect("many samples");
        assert!((requests - 10.0).abs() < 0.5, "{requests}");
        rate.push(Duration::from_secs(601), 5, 0);
        assert_eq!(rate.per_second(), None);
    }

    #[test]
    fn percent_is_not_hundred_before_the_last_request() {
        let counts = Counts { total: 1_000_000, done: 999_999, ..counts() };
        assert!(line(&counts, &Rate::default(), Beside::default()).contains(" 99% "));
    }
}
