//! `batch bench`: figures, each with what it was measured on.

mod durable;
mod kernels;
mod throughput;

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
    /// The kernels alone, on a GPU: what each reaches, and which share of the card that is
    Kernels(kernels::KernelsArgs),
    /// The engine alone: requests of equal length, all at once
    Throughput(Box<throughput::ThroughputArgs>),
}

pub(crate) async fn run(args: BenchArgs, app: &App) -> Result {
    match args.command {
        BenchCommand::Durable(args) => durable::run(args, app).await,
        BenchCommand::Kernels(args) => kernels::run(args, app).await,
        BenchCommand::Throughput(args) => throughput::run(*args, app).await,
    }
}
