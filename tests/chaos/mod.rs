//! The fault harness: Postgres, an S3 server, an API and three workers as processes, and
//! random faults over all of them; after each round nothing is lost, doubled, held or left.
//!
//! `make chaos` runs many rounds, `make test` a few. A round's faults are drawn from its
//! seed, which each failure prints with the whole plan and the folder of all logs;
//! `OVERNIGHT_TEST_SEED` runs one again, `OVERNIGHT_TEST_ROUNDS` sets how many there are.
//! `plan.rs` says what can happen, `world.rs` to whom, `checks.rs` what must hold.

mod checks;
mod engine;
mod network;
mod partition;
mod plan;
mod round;
mod strike;
mod users;
mod world;

use std::time::{Duration, Instant};

use crate::kill::{input, rounds, tiny_model};
use engine::Engine as Server;
use plan::Plan;
use round::Chaos;
use world::{Engine, World};

/// Rounds after which every kind of fault must have met running work.
const ROUNDS_FOR_EVERY_KIND: u64 = 100;
/// Rounds in which the negative control must be noticed.
const CONTROL_ROUNDS_MAX: u64 = 10;
/// A job whose outcomes are gone never ends.
const CONTROL_ROUND_MAX: Duration = Duration::from_secs(25);
/// What a worker says whose commit the fence kept out.
const REFUSED: &str = "a late write of outcomes was refused";
const NO_GUARD: (&str, &str) = ("OVERNIGHT_TEST_WITHOUT_EPOCH_GUARD", "1");

/// Runs rounds until one fails, which then tells all that is needed to run it again.
async fn run(chaos: &mut Chaos, seeds: impl Iterator<Item = u64>, test: &str) -> u64 {
    let whole = chaos.undisturbed().await.unwrap_or_else(|why| panic!("without any fault: {why}"));
    assert!(!whole.output.is_empty() && !whole.errors.is_empty(), "both files have lines");
    let mut num_rounds = 0;
    for seed in seeds {
        let (plan, started) = (Plan::draw(seed), Instant::now());
        if let Err(why) = chaos.round(&plan).await {
            let folder = chaos.world.keep().display();
            panic!("{plan}\n{why}\nlogs in {folder}\nagain: OVERNIGHT_TEST_SEED={seed} cargo nextest run {test}");
        }
        eprintln!("seed {seed}: nothing lost, doubled, held or left, {:.1} s", started.elapsed().as_secs_f32());
        num_rounds += 1;
    }
    chaos.sweep().await.unwrap_or_else(|why| panic!("{why}"));
    let left = checks::left(&chaos.world);
    assert!(left.is_empty(), "every job and file is deleted, and there stay {left:?}");
    eprintln!("met running work / were planned, in {num_rounds} rounds:");
    for (kind, (planned, struck)) in &chaos.tally {
        eprintln!("  {struck:>4} / {planned:<4} {kind}");
        assert!(*struck > 0 || num_rounds < ROUNDS_FOR_EVERY_KIND, "{kind} never met running work");
    }
    num_rounds
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn chaos_loses_nothing_and_doubles_nothing() {
    let server = Server::start(Duration::from_millis(120)).await;
    let Some(world) = World::start(Engine::Remote(server.url), &[]).await else { return };
    let mut chaos = Chaos::new(world, input(600, 3));
    run(&mut chaos, rounds(3), "chaos_loses_nothing_and_doubles_nothing").await;
}

/// The same on the engine of the workers' own, whose blocks must all come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn chaos_on_the_local_engine_leaves_no_block_held() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let Some(world) = World::start(Engine::Local(model), &[]).await else { return };
    let mut chaos = Chaos::new(world, input(1_200, 12));
    let seeds = rounds(1);
    // A tenth of the rounds: what differs is the engine alone.
    let seeds = seeds.clone().take((seeds.end - seeds.start).div_ceil(10) as usize);
    run(&mut chaos, seeds, "chaos_on_the_local_engine_leaves_no_block_held").await;
}

/// The negative control: with the epoch taken out of commits the same checks must fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn chaos_without_the_epoch_guard_is_noticed() {
    let server = Server::start(Duration::from_millis(300)).await;
    let Some(world) = World::start(Engine::Remote(server.url), &[NO_GUARD]).await else { return };
    let mut chaos = Chaos::new(world, input(900, 3));
    chaos.undisturbed().await.unwrap_or_else(|why| panic!("without any fault: {why}"));
    for seed in 0..CONTROL_ROUNDS_MAX {
        let plan = Plan::late_commits(seed);
        chaos.round_max = CONTROL_ROUND_MAX;
        if let Err(why) = chaos.round(&plan).await {
            assert!(why.contains("outcome") || why.contains("segment"), "another complaint than wanted: {why}");
            eprintln!("noticed in round {seed}: {why}");
            return;
        }
    }
    panic!("{CONTROL_ROUNDS_MAX} rounds without the guard passed every check: they prove nothing about it");
}

/// The control's control: the very same rounds with the guard in place pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn chaos_of_late_commits_is_fenced() {
    let server = Server::start(Duration::from_millis(300)).await;
    let Some(world) = World::start(Engine::Remote(server.url), &[]).await else { return };
    let mut chaos = Chaos::new(world, input(900, 3));
    chaos.undisturbed().await.unwrap_or_else(|why| panic!("without any fault: {why}"));
    for seed in 0..2 {
        let plan = Plan::late_commits(seed);
        chaos
            .round(&plan)
            .await
            .unwrap_or_else(|why| panic!("{plan}\n{why}\nlogs in {}", chaos.world.keep().display()));
    }
    // Without one the control would pass for want of late commits, not for the guard.
    assert!(chaos.world.logs().contains(REFUSED), "no commit came late: logs in {}", chaos.world.keep().display());
}
