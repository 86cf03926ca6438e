//! What the card can do, and what `nvidia-smi` sees of it while it works.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use overnight_engine::cuda::DeviceProperties;
use serde::Serialize;

/// Cards whose ceilings were measured: a copy between buffers, reads and writes counted, and a
/// large product of random numbers.
const MEASURED: &[(&str, f64, f64)] = &[("NVIDIA H200", 4.26, 790.0)];

/// Rates that shares are told of; unknown ones give none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Ceilings {
    pub(super) tb_per_s: Option<f64>,
    pub(super) tflop_per_s: Option<f64>,
}

impl Ceilings {
    /// Those given; else those measured on such a card; else the memory's by clock and bus.
    pub(super) fn of(card: &DeviceProperties, tbs: Option<f64>, tflops: Option<f64>) -> Self {
        let measured = MEASURED.iter().find(|(name, ..)| *name == card.name);
        let by_clock = card.memory_bytes_per_s().map(|bytes| bytes as f64 / 1e12);
        Self {
            tb_per_s: tbs.or(measured.map(|&(_, tbs, _)| tbs)).or(by_clock),
            tflop_per_s: tflops.or(measured.map(|&(.., tflops)| tflops)),
        }
    }

    pub(super) fn words(&self) -> String {
        let word = |value: Option<f64>, unit: &str, flag: &str| match value {
            Some(value) => format!("{value:.2} {unit}"),
            None => format!("{unit} unknown (give {flag})"),
        };
        let tbs = word(self.tb_per_s, "TB/s", "--peak-tbs");
        format!("{tbs}, {}", word(self.tflop_per_s, "TFLOP/s", "--peak-tflops"))
    }

    /// The share of the ceiling that bounds the work, and which one that is. `None` when the one
    /// that may bound it is unknown.
    pub(super) fn share(&self, bytes: u64, flops: u64, seconds: f64) -> Option<(f64, &'static str)> {
        let memory = self.tb_per_s.map(|tbs| bytes as f64 / (tbs * 1e12));
        if flops == 0 {
            return memory.map(|floor| (floor / seconds, "memory"));
        }
        let compute = flops as f64 / (self.tflop_per_s? * 1e12);
        let memory = memory?;
        Some(if compute >= memory { (compute / seconds, "compute") } else { (memory / seconds, "memory") })
    }
}

/// One look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Seen {
    pub(super) sm_mhz: f64,
    pub(super) memory_mhz: f64,
    pub(super) power_w: f64,
    pub(super) celsius: f64,
}

/// The extremes of all looks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Extremes {
    sm_mhz_min: f64,
    sm_mhz_max: f64,
    memory_mhz: f64,
    power_w_max: f64,
    celsius_max: f64,
    num_looks: u32,
}

#[derive(Debug, Default)]
struct Looks {
    last: Option<Seen>,
    extremes: Option<Extremes>,
}

/// `nvidia-smi` in the background, where there is one.
#[derive(Debug)]
pub(super) struct Watch {
    looks: Arc<Mutex<Looks>>,
    child: Option<(Child, JoinHandle<()>)>,
}

impl Watch {
    /// Looks every half second until the end.
    pub(super) fn start(ordinal: u32) -> Self {
        let fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu";
        let child = Command::new("nvidia-smi")
            .args([&format!("--query-gpu={fields}"), "--format=csv,noheader,nounits", "-lms", "500"])
            .args(["-i", &ordinal.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut watch = Self::none();
        // Without the tool there are figures without clocks.
        let Ok(mut child) = child else { return watch };
        let Some(stdout) = child.stdout.take() else { return watch };
        let looks = watch.looks.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(seen) = parse(&line) {
                    looks.lock().unwrap_or_else(PoisonError::into_inner).add(seen);
                }
            }
        });
        watch.child = Some((child, reader));
        watch
    }

    /// Sees nothing.
    pub(super) fn none() -> Self {
        Self { looks: Arc::default(), child: None }
    }

    /// The latest look.
    pub(super) fn last(&self) -> Option<Seen> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Ends it.
    pub(super) fn end(mut self) -> Option<Extremes> {
        self.stop();
        self.looks.lock().unwrap_or_else(PoisonError::into_inner).extremes
    }

    fn stop(&mut self) {
        if let Some((mut child, reader)) = self.child.take() {
            // One that is gone already is what is wanted; its end closes the pipe.
            let _ = child.kill();
            let _ = child.wait();
            let _ = reader.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Looks {
    fn add(&mut self, seen: Seen) {
        self.last = Some(seen);
        let before = self.extremes.unwrap_or(Extremes {
            sm_mhz_min: seen.sm_mhz,
            sm_mhz_max: seen.sm_mhz,
            memory_mhz: seen.memory_mhz,
            power_w_max: seen.power_w,
            celsius_max: seen.celsius,
            num_looks: 0,
        });
        self.extremes = Some(Extremes {
            sm_mhz_min: before.sm_mhz_min.min(seen.sm_mhz),
            sm_mhz_max: before.sm_mhz_max.max(seen.sm_mhz),
            memory_mhz: seen.memory_mhz,
            power_w_max: before.power_w_max.max(seen.power_w),
            celsius_max: before.celsius_max.max(seen.celsius),
            num_looks: before.num_looks + 1,
        });
    }
}

/// A line of `nvidia-smi`; `None` when a number is missing (`[N/A]`).
fn parse(line: &str) -> Option<Seen> {
    let mut numbers = line.split(',').map(|field| field.trim().parse::<f64>().ok());
    let mut next = || numbers.next().flatten();
    Some(Seen { sm_mhz: next()?, memory_mhz: next()?, power_w: next()?, celsius: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_read_and_their_extremes_kept() {
        let mut looks = Looks::default();
        for line in ["1980, 3201, 118.40, 31", "1755, 3201, 690.12, 62", "[N/A], 3201, 1.0, 1", ""] {
            if let Some(seen) = parse(line) {
                looks.add(seen);
            }
        }
        assert_eq!(looks.last.unwrap().sm_mhz, 1755.0);
        let extremes = looks.extremes.unwrap();
        assert_eq!((extremes.sm_mhz_min, extremes.sm_mhz_max, extremes.num_looks), (1755.0, 1980.0, 2));
        assert_eq!((extremes.power_w_max, extremes.celsius_max), (690.12, 62.0));
    }

    #[test]
    fn share_is_of_the_ceiling_that_bounds() {
        let both = Ceilings { tb_per_s: Some(4.0), tflop_per_s: Some(800.0) };
        assert_eq!(both.share(4_000_000_000, 0, 0.002), Some((0.5, "memory")));
        assert_eq!(both.share(4_000_000_000, 1_600_000_000_000, 0.004), Some((0.5, "compute")));
        assert_eq!(both.share(4_000_000_000, 1_000, 0.002), Some((0.5, "memory")));
        let unknown = Ceilings { tb_per_s: Some(4.0), tflop_per_s: None };
        assert_eq!(unknown.share(1, 1, 1.0), None, "either may bound it");
        assert!(unknown.share(1, 0, 1.0).is_some());
        assert!(unknown.words().contains("--peak-tflops"));
    }
}
