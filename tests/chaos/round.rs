//! One round: a storm of faults while users' jobs run, then calm, then the checks.

use std::time::{Duration, Instant};

use overnight_blobs::Blobs;
use overnight_store_postgres::{Options, PostgresStore};
use overnight_testing::S3Server;
use overnight_testing::objects::BUCKET;
use overnight_worker::lifecycle::sweep::{SweepAges, sweep};

use super::checks::{self, Whole};
use super::plan::{API, Plan, STORM};
use super::strike::{Strikes, Tally};
use super::users::{Ended, Users};
use super::world::{Engine, World};

/// A round that takes longer until its jobs have ended is stuck.
const ROUND_MAX: Duration = Duration::from_secs(100);
/// Longest that processes may take to be ready again, and to give back what they hold.
const CALM_MAX: Duration = Duration::from_secs(30);
/// Between looks of the supervisor.
const LOOK: Duration = Duration::from_millis(10);
/// Sweeps that find nothing to do any more: the first deletes rows, the next what they named.
const SWEEPS: usize = 2;

/// A world, its input, and what that must come to.
#[derive(Debug)]
pub(crate) struct Chaos {
    pub(crate) world: World,
    pub(crate) tally: Tally,
    /// Longest that a round may take until its jobs have ended.
    pub(crate) round_max: Duration,
    input: Vec<u8>,
    whole: Option<Whole>,
}

impl Chaos {
    pub(crate) fn new(world: World, input: Vec<u8>) -> Self {
        Self { world, tally: Tally::new(), round_max: ROUND_MAX, input, whole: None }
    }

    /// A round without faults: what every other one must come to.
    pub(crate) async fn undisturbed(&mut self) -> Result<&Whole, String> {
        let users = Users::new(self.world.url(API), ROUND_MAX);
        let running = tokio::spawn(users.clone().run(self.input.clone(), "undisturbed".to_owned(), Vec::new()));
        let ended = self.wait(running).await?;
        checks::database(&mut self.world, CALM_MAX).await?;
        let whole = Whole::of(&ended[0]);
        users.clear().await?;
        Ok(self.whole.insert(whole))
    }

    /// A round of a plan; errors say what is wrong.
    pub(crate) async fn round(&mut self, plan: &Plan) -> Result<(), String> {
        self.world.set_seed(plan.seed);
        self.world.is_calm = false;
        let users = Users::new(self.world.url(API), self.round_max);
        let begun = Instant::now();
        // Every round has keys of its own, also when a seed is run again on the same database.
        let key = format!("seed-{}-{}", plan.seed, self.tally.values().map(|(planned, _)| planned).sum::<u32>());
        let running = tokio::spawn(users.clone().run(self.input.clone(), key, plan.wishes.clone()));
        let mut strikes = Strikes::new(plan.seed);
        let mut faults = plan.faults.iter().peekable();
        while begun.elapsed() < STORM || strikes.are_under_way(&self.world) {
            while let Some((_, fault)) = faults.next_if(|(at, _)| *at <= begun.elapsed()) {
                strikes.strike(&mut self.world, fault, &mut self.tally).await;
            }
            strikes.end_due(&mut self.world)?;
            self.world.supervise()?;
            tokio::time::sleep(LOOK).await;
        }
        strikes.heal(&mut self.world, &mut self.tally).await?;
        let ended = match self.wait(running).await {
            Ok(ended) => ended,
            Err(why) => return Err(self.explain(why)),
        };
        self.check(&ended).await?;
        self.world.wait_ready(CALM_MAX).await?;
        users.clear().await
    }

    /// What does not end has a reason that the database may know.
    fn explain(&self, why: String) -> String {
        let unsound = tokio::task::block_in_place(|| self.world.unsound()).unwrap_or_default();
        let found = checks::findings(&self.world.database).unwrap_or_else(|why| vec![why]);
        format!("{why}\n{unsound}\nin the database:\n  {}", found.join("\n  "))
    }

    /// Waits for users, with the supervisor at work.
    async fn wait(
        &mut self,
        mut running: tokio::task::JoinHandle<Result<Vec<Ended>, String>>,
    ) -> Result<Vec<Ended>, String> {
        loop {
            tokio::select! {
                ended = &mut running => return ended.expect("users do not panic"),
                () = tokio::time::sleep(LOOK) => self.world.supervise()?,
            }
        }
    }

    async fn check(&mut self, ended: &[Ended]) -> Result<(), String> {
        checks::database(&mut self.world, CALM_MAX).await?;
        if let Some(unsound) = tokio::task::block_in_place(|| self.world.unsound()) {
            return Err(unsound);
        }
        let whole = self.whole.as_ref().ok_or("an undisturbed run comes first")?;
        ended.iter().try_for_each(|ended| checks::files(ended, whole))?;
        self.sweep().await?;
        tokio::task::block_in_place(|| checks::objects(&self.world, ended))?;
        if let Engine::Local(_) = self.world.engine {
            checks::engine(&self.world.url(1)).await?;
        }
        Ok(())
    }

    /// Sweeps as a worker does, without regard to age: nobody writes now.
    pub(crate) async fn sweep(&self) -> Result<(), String> {
        let url = self.world.database.store_url();
        let options = Options { connections: 2, listen: false, migrate: false, ..Options::default() };
        let store = PostgresStore::open(&url, options).await.map_err(|err| failed(&err))?;
        let environment = S3Server::environment_by("127.0.0.1", self.world.objects.port());
        let options = overnight_blobs::Options { environment, ..Default::default() };
        let blobs = Blobs::open(&format!("s3://{BUCKET}"), &options).await.map_err(|err| failed(&err))?;
        let ages = SweepAges { orphans: Duration::ZERO, unclaimed: Duration::ZERO, jobs: None };
        for _ in 0..SWEEPS {
            sweep(&store, &blobs, &ages).await.map_err(|err| failed(&err))?;
        }
        store.close().await;
        Ok(())
    }
}

fn failed(err: &(dyn std::error::Error + 'static)) -> String {
    format!("sweep: {}", overnight_types::chain(err))
}
