//! How many requests one server gets at once: raised by one per round of answers,
//! halved on overload, at most once per round (additive increase, multiplicative
//! decrease; Chiu and Jain, Analysis of the Increase and Decrease Algorithms, 1989).

use std::time::{Duration, Instant};

const SERVER_PAUSE_MAX: Duration = Duration::from_secs(60);

/// What an answer says about the server's load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It copes.
    Fine,
    /// It does not: 429, 5xx or a timeout.
    Overloaded,
    /// Nothing: cancelled by us.
    Neutral,
}

#[derive(Debug)]
pub(super) struct Limit {
    allowed: f64,
    max: f64,
    in_flight: u32,
    cut_at: Option<Instant>,
    down_until: Option<Instant>,
    failures_in_a_row: u32,
}

impl Limit {
    pub(super) fn new(start: u32, max: u32) -> Self {
        let (allowed, max) = (f64::from(start), f64::from(max));
        Self { allowed, max, in_flight: 0, cut_at: None, down_until: None, failures_in_a_row: 0 }
    }

    /// Requests at once now.
    pub(super) fn allowed(&self) -> u32 {
        // Within 1…max, which is a u32.
        self.allowed as u32
    }

    pub(super) fn room(&self) -> u32 {
        self.allowed().saturating_sub(self.in_flight)
    }

    pub(super) fn free_share(&self) -> f64 {
        f64::from(self.room()) / self.allowed
    }

    pub(super) fn is_down(&self, now: Instant) -> bool {
        self.down_until(now).is_some()
    }

    /// Until when the server is left alone; `None` when it may be asked.
    pub(super) fn down_until(&self, now: Instant) -> Option<Instant> {
        self.down_until.filter(|until| *until > now)
    }

    pub(super) fn started(&mut self) {
        self.in_flight += 1;
    }

    /// An answer came, or its request was given up.
    pub(super) fn ended(&mut self, verdict: Verdict, sent_at: Instant, now: Instant) {
        let was_full = self.room() == 0;
        self.in_flight -= 1;
        match verdict {
            Verdict::Fine => {
                self.failures_in_a_row = 0;
                self.down_until = None;
                if was_full {
                    self.allowed = (self.allowed + 1.0 / self.allowed).min(self.max);
                }
            }
            // Requests sent before the last cut tell nothing new about the load.
            Verdict::Overloaded if self.cut_at.is_none_or(|cut_at| sent_at > cut_at) => {
                self.allowed = (self.allowed / 2.0).max(1.0);
                self.cut_at = Some(now);
            }
            Verdict::Overloaded | Verdict::Neutral => {}
        }
    }

    /// No connection; returns how long the server is left alone.
    pub(super) fn unreachable(&mut self, now: Instant, first_pause: Duration) -> Duration {
        self.in_flight -= 1;
        if self.is_down(now) {
            // Another request found it down already in this round.
            return self.down_until.map_or(first_pause, |until| until - now);
        }
        let pause =
            first_pause.saturating_mul(1 << self.failures_in_a_row.min(16)).min(SERVER_PAUSE_MAX.max(first_pause));
        self.failures_in_a_row += 1;
        self.down_until = Some(now + pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(limit: &mut Limit, verdict: Verdict) {
        let sent_at = Instant::now();
        let count = limit.room();
        (0..count).for_each(|_| limit.started());
        // Answers free one place at a time, each refilled as a busy queue would.
        (0..count).for_each(|_| {
            limit.ended(verdict, sent_at, Instant::now());
        });
    }

    #[test]
    fn concurrency_halves_once_per_round_and_comes_back() {
        let mut limit = Limit::new(64, 100);
        round(&mut limit, Verdict::Overloaded);
        assert_eq!(limit.allowed(), 32, "64 failures of one round are one cut");
        round(&mut limit, Verdict::Overloaded);
        assert_eq!(limit.allowed(), 16);
        for _ in 0..10_000 {
            round(&mut limit, Verdict::Fine);
        }
        assert!(limit.allowed() > 90, "{}", limit.allowed());
        for _ in 0..20 {
            round(&mut limit, Verdict::Overloaded);
        }
        assert_eq!(limit.allowed(), 1, "one request always goes through");
    }

    #[test]
    fn unreachable_server_is_left_alone_longer_each_time_up_to_a_minute() {
        let mut limit = Limit::new(4, 4);
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            limit.started();
            let pause = limit.unreachable(now, Duration::from_secs(1));
            assert!(limit.is_down(now));
            now += pause;
            assert!(!limit.is_down(now));
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]);
    }
}
