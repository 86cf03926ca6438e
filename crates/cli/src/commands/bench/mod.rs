//! `batch bench`: figures, each with what it was measured on.

mod durable;
mod fleet;
mod kernels;
mod site;
mod throughput;

use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::App;
use crate::error::Result;

/// Arguments of `batch bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// The durable path alone, with an engine that answers at once: a whole job
    /// from upload to published file through a real server
    Durable(durable::DurableArgs),
    /// Several workers with engines of a fixed speed on one database: their speed-up, and
    /// how soon the work of a killed one goes on
    Fleet(fleet::FleetArgs),
    /// The kernels alone, on a GPU: what each reaches, and which share of the card that is
    Kernels(kernels::KernelsArgs),
    /// The engine alone: requests of equal length, all at once
    Throughput(Box<throughput::ThroughputArgs>),
}

pub(crate) async fn run(args: BenchArgs, app: &App) -> Result {
    match args.command {
        BenchCommand::Durable(args) => durable::run(args, app).await,
        BenchCommand::Fleet(args) => fleet::run(args, app).await,
        BenchCommand::Kernels(args) => kernels::run(args, app).await,
        BenchCommand::Throughput(args) => throughput::run(*args, app).await,
    }
}

/// A folder that goes away after the measurement, in `dir` or where the system makes such.
fn temporary(dir: Option<&Path>) -> Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("batch-bench-");
    Ok(match dir {
        Some(dir) => builder.tempdir_in(dir)?,
        None => builder.tempdir()?,
    })
}

/// Seconds to the millisecond.
fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1_000.0).round() / 1_000.0
}
