//! `batch bench kernels`: what each kernel reaches on this GPU, in TB/s or TFLOP/s and as a
//! share of what the card can do. No model is needed: shapes are those of Qwen3 0.6B and 8B.

mod card;
mod cases;

use std::path::PathBuf;

use clap::Args;
use overnight_kernels::Error;
use overnight_kernels::bench::{Bench, Case, Measured};
use serde_json::{Value, json};

use crate::App;
use crate::error::{Exit, Failure, Result};
use crate::output::table::Column;
use crate::output::{Field, plain};
use crate::service::engine;
use card::{Ceilings, Watch};
use cases::Family;

/// Arguments of `batch bench kernels`.
#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    /// Only these families; may be given several times [default: all]
    #[arg(long, value_name = "FAMILY", value_enum, num_args = 1..)]
    family: Vec<Family>,
    /// Terabytes a second that the memory gives [default: 4.26 on an H200, else by the card's clock and bus]
    #[arg(long, value_name = "TB/S")]
    peak_tbs: Option<f64>,
    /// Teraflops a second of dense 16-bit products [default: 790 on an H200, else unknown]
    #[arg(long, value_name = "TFLOP/S")]
    peak_tflops: Option<f64>,
    /// Write the figures there as JSON
    #[arg(long, value_name = "PATH")]
    output_json: Option<PathBuf>,
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("KERNEL"), cell: |row, _| plain(&row["kernel"]) },
    Field { column: Column::shrink("SHAPE"), cell: |row, _| plain(&row["shape"]) },
    Field { column: Column::right("US"), cell: |row, _| number(&row["us"], 1) },
    Field { column: Column::right("TB/S"), cell: |row, _| number(&row["tb_per_s"], 2) },
    Field { column: Column::right("TFLOP/S"), cell: |row, _| number(&row["tflop_per_s"], 0) },
    Field { column: Column::right("CEILING"), cell: |row, _| percent(&row["share_of_ceiling"]) },
    Field { column: Column::right("BEST"), cell: |row, _| percent(&row["share_of_best"]) },
    Field { column: Column::right("MHZ"), cell: |row, _| number(&row["sm_mhz"], 0) },
    Field { column: Column::right("W"), cell: |row, _| number(&row["power_w"], 0) },
];

fn number(value: &Value, digits: usize) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn percent(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |value| format!("{:.0}%", 100.0 * value))
}

pub(crate) async fn run(args: KernelsArgs, app: &App) -> Result {
    let ui = app.ui.clone();
    let output_json = args.output_json.clone();
    let measured = tokio::task::spawn_blocking(move || measure(&args, |text| ui.say(text))).await;
    let report = measured.map_err(|err| Failure::from_error("measure the kernels", &err))??;
    if let Some(path) = output_json {
        std::fs::write(path, format!("{report}\n"))?;
    }
    if app.ui.is_json() {
        return app.ui.data(&format!("{report}\n"));
    }
    let rows = report["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    app.ui.rows(rows, COLUMNS)
}

/// The whole report. Blocks for minutes.
fn measure(args: &KernelsArgs, say: impl Fn(&str)) -> Result<Value> {
    let options = engine::device_options();
    let mut bench = Bench::open(options.ordinal, &options.build).map_err(|error| not_usable(&error))?;
    let properties = bench.device().properties().clone();
    let ceilings = Ceilings::of(&properties, args.peak_tbs, args.peak_tflops);
    let (major, minor) = properties.compute_capability;
    say(&format!(
        "{}, compute capability {major}.{minor}, {}, cuBLASLt {}; ceilings: {}",
        properties.name,
        bench.dtype().name(),
        bench.cublaslt_version(),
        ceilings.words()
    ));
    let watch = Watch::start(options.ordinal);
    let cases: Vec<(Family, Case)> =
        cases::all(properties.memory_bytes).filter(|(family, _)| args.wants(*family)).collect();
    let mut results = Vec::with_capacity(cases.len());
    let mut last = None;
    for (family, case) in cases {
        if last.replace(family) != Some(family) {
            say(&format!("measuring {}", family.word()));
        }
        match bench.measure(case) {
            Ok(measured) => results.push(row(family, case, &measured, &ceilings, &watch)),
            Err(Error::OutOfMemory { asked_bytes, free_bytes, .. }) => {
                say(&format!("left out, {asked_bytes} bytes asked and {free_bytes} free: {}", cases::shape(case)));
            }
            Err(error) => return Err(Failure::from_error(&format!("measure {}", cases::shape(case)), &error)),
        }
    }
    Ok(json!({
        "device": properties.name,
        "compute_capability": format!("{major}.{minor}"),
        "driver_version": properties.driver_version,
        "cublaslt_version": bench.cublaslt_version(),
        "dtype": bench.dtype().name(),
        "ceilings": ceilings,
        "seen": watch.end(),
        "results": results,
    }))
}

impl KernelsArgs {
    fn wants(&self, family: Family) -> bool {
        self.family.is_empty() || self.family.contains(&family)
    }
}

/// What `batch doctor` says of a GPU that cannot be used.
fn not_usable(error: &Error) -> Failure {
    let failure = Failure::new(Exit::Failure, overnight_types::chain(error));
    match error {
        Error::Library { .. } => {
            failure.code("gpu_not_usable").hint("this measures a GPU; `batch doctor` says what one needs")
        }
        _ => failure,
    }
}

/// A line of the report. What bounds a case is what takes longer at the ceilings.
fn row(family: Family, case: Case, measured: &Measured, ceilings: &Ceilings, watch: &Watch) -> Value {
    let seconds = f64::from(measured.us) * 1e-6;
    let tbs = measured.bytes as f64 / seconds / 1e12;
    let tflops = (measured.flops > 0).then(|| measured.flops as f64 / seconds / 1e12);
    let share = ceilings.share(measured.bytes, measured.flops, seconds);
    let seen = watch.last();
    let mut row = json!({
        "kernel": cases::name(case),
        "family": family.word(),
        "shape": cases::shape(case),
        "us": measured.us,
        "us_min": measured.us_min,
        "tb_per_s": tbs,
        "tflop_per_s": tflops,
        "bound": share.map(|(_, bound)| bound),
        "share_of_ceiling": share.map(|(share, _)| share),
        "share_of_best": measured.best_us.map(|best| f64::from(best / measured.us)),
        "num_algorithms": measured.num_algorithms,
        "sm_mhz": seen.map(|seen| seen.sm_mhz),
        "power_w": seen.map(|seen| seen.power_w),
    });
    row["case"] = serde_json::to_value(case).expect("a case is numbers and words");
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_tells_the_share_of_what_bounds_it() {
        let ceilings = Ceilings { tb_per_s: Some(4.0), tflop_per_s: Some(800.0) };
        let watch = Watch::none();
        let case = Case::Gemm { m: 8192, n: 8192, k: 8192, accumulates: false };
        let measured = Measured {
            us: 2000.0,
            us_min: 1900.0,
            bytes: 400_000_000,
            flops: 1_100_000_000_000,
            best_us: Some(1900.0),
            num_algorithms: Some(9),
        };
        let row = row(Family::Gemm, case, &measured, &ceilings, &watch);
        assert_eq!((row["bound"].as_str(), row["kernel"].as_str()), (Some("compute"), Some("gemm")));
        assert!((row["share_of_ceiling"].as_f64().unwrap() - 550.0 / 800.0).abs() < 1e-6, "{row}");
        assert!((row["share_of_best"].as_f64().unwrap() - 0.95).abs() < 1e-6, "{row}");
        assert!((row["tb_per_s"].as_f64().unwrap() - 0.2).abs() < 1e-9, "{row}");
        assert!(row["sm_mhz"].is_null(), "nobody watched");
        assert_eq!(row["case"]["m"], 8192);
    }
}
