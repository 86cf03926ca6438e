//! Faults made to happen, and whether each met running work: a fault that strikes idle
//! processes proves nothing, so it is not counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_testing::http_proxy::{Fate, Weather};
use overnight_testing::tcp_proxy::Traffic;
use tokio::task::JoinHandle;

use super::plan::{API, Fault, JUMPING};
use super::world::{Seat, World, has_begun};

/// As an administrator would, or a failover.
const END_SESSIONS: &str = "select count(pg_terminate_backend(pid)) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid()";

/// How often each kind of fault was planned, and how often it met running work.
pub(crate) type Tally = BTreeMap<&'static str, (u32, u32)>;

/// Adds a fault to the tally.
pub(crate) fn count(tally: &mut Tally, kind: &'static str, has_struck: bool) {
    let (planned, struck) = tally.entry(kind).or_default();
    *planned += 1;
    *struck += u32::from(has_struck);
}

/// The end of a fault that lasts.
#[derive(Debug, Clone, Copy)]
enum End {
    GoOn { seat: usize },
    PassDatabase { at: Option<usize> },
    PassObjects { at: Option<usize> },
    StartObjects,
    FreeObjects,
    FreeDisk { seat: usize },
}

/// Faults under way in one round.
#[derive(Debug)]
pub(crate) struct Strikes {
    seed: u64,
    ends: Vec<(Instant, End)>,
    restart: Option<JoinHandle<()>>,
    /// Faults whose effect is counted by those they meet: the count before.
    open: Vec<(&'static str, Counter, u64)>,
}

/// Where the effect of a fault can be read.
#[derive(Debug, Clone, Copy)]
enum Counter {
    Database { at: Option<usize> },
    Objects { at: Option<usize> },
    S3Server,
    Crashes,
    SelfStops,
}

impl Strikes {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, ends: Vec::new(), restart: None, open: Vec::new() }
    }

    /// Makes a fault happen.
    pub(crate) async fn strike(&mut self, world: &mut World, fault: &Fault, tally: &mut Tally) {
        let kind = fault.kind();
        match *fault {
            Fault::Kill { seat } => {
                count(tally, kind, is_at_work(world, seat));
                world.kill(seat);
            }
            Fault::Stop { seat, ms } => {
                count(tally, kind, is_at_work(world, seat));
                if let Some(process) = &world.seats[seat].process {
                    process.stop();
                    self.end_after(ms, End::GoOn { seat });
                }
            }
            Fault::Terminate { seat } => {
                count(tally, kind, is_at_work(world, seat));
                world.seats[seat].may_end = true;
                if let Some(process) = &world.seats[seat].process {
                    process.terminate();
                }
            }
            Fault::CrashAt { seat, place, nth } => {
                self.watch(world, kind, Counter::Crashes);
                world.kill(seat);
                world.seats[seat].next_environment = vec![("OVERNIGHT_TEST_CRASH_AT".into(), format!("{place}={nth}"))];
            }
            Fault::StopAt { seat, place, nth, ms } => {
                self.watch(world, kind, Counter::SelfStops);
                stop_at(world, seat, &format!("{place}={nth}"), ms);
            }
            Fault::CrashDatabase => {
                if self.restart.as_ref().is_none_or(JoinHandle::is_finished) {
                    count(tally, kind, has_unfinished_job(world));
                    let server = Arc::clone(&world.server);
                    self.restart = Some(tokio::task::spawn_blocking(move || {
                        server.stop("immediate");
                        server.start_again();
                    }));
                }
            }
            Fault::EndSessions => {
                count(tally, kind, is_any(world, END_SESSIONS));
            }
            Fault::CutDatabase { at } => {
                let num_cut: u64 = seats(at, world).map(|seat| world.seats[seat].database.cut()).sum();
                count(tally, kind, num_cut > 0);
            }
            Fault::RefuseDatabase { at, ms } => {
                // With no connection cut nobody would ask for a new one.
                seats(at, world).for_each(|seat| _ = world.seats[seat].database.cut());
                self.set_database(world, kind, at, Traffic::Refuse, ms);
            }
            Fault::StallDatabase { at, ms } => self.set_database(world, kind, at, Traffic::Stall, ms),
            Fault::SlowDatabase { at, each_ms, ms } => {
                self.set_database(world, kind, at, Traffic::Delay(Duration::from_millis(each_ms)), ms);
            }
            Fault::LoseDatabaseAnswers { at, count } => {
                self.watch(world, kind, Counter::Database { at });
                seats(at, world).for_each(|seat| world.seats[seat].database.lose_answers(count));
            }
            Fault::RefuseObjects { at, status, percent, ms } => {
                self.set_objects(world, kind, at, percent, vec![Fate::Refused(status)], ms);
            }
            Fault::SlowObjects { at, each_ms, ms } => {
                self.set_objects(world, kind, at, 100, vec![Fate::Slow(Duration::from_millis(each_ms))], ms);
            }
            Fault::TearUploads { at, percent, ms } => {
                self.set_objects(world, kind, at, percent, vec![Fate::CutRequest(1), Fate::CutRequest(u64::MAX)], ms);
            }
            Fault::TearDownloads { at, percent, ms } => {
                self.set_objects(world, kind, at, percent, vec![Fate::CutAnswer(40), Fate::CutAnswer(700)], ms);
            }
            Fault::LoseObjectAnswers { at, percent, ms } => {
                self.set_objects(world, kind, at, percent, vec![Fate::LostAnswer], ms);
            }
            Fault::KillObjects { ms } => {
                self.watch(world, kind, Counter::S3Server);
                world.objects.kill();
                self.end_after(ms, End::StartObjects);
            }
            Fault::FillObjects { ms } => {
                self.watch(world, kind, Counter::S3Server);
                world.objects.set_disk_full(true).expect("a limit can be set on a child");
                self.end_after(ms, End::FreeObjects);
            }
            Fault::FillDisk { seat, ms } => {
                count(tally, kind, is_at_work(world, seat));
                if let Some(process) = world.seats[seat].process.as_ref().filter(|it| has_begun(seat, &it.said())) {
                    // A process that has just ended has no disk.
                    let _ = process.limit_files(Some(0));
                    self.end_after(ms, End::FreeDisk { seat });
                }
            }
            Fault::JumpClock { seconds } => {
                count(tally, kind, is_at_work(world, JUMPING));
                world.set_clock(seconds);
            }
        }
    }

    /// Ends what has lasted for long enough.
    pub(crate) fn end_due(&mut self, world: &mut World) -> Result<(), String> {
        let now = Instant::now();
        let due: Vec<End> = self.ends.extract_if(.., |(at, _)| *at <= now).map(|(_, end)| end).collect();
        due.into_iter().try_for_each(|end| finish(world, end))
    }

    /// Whether some fault has begun and not ended.
    pub(crate) fn are_under_way(&self, world: &World) -> bool {
        let has_stopped = |seat: &Seat| matches!(seat.stop, Some((.., Some(_))));
        !self.ends.is_empty()
            || self.restart.as_ref().is_some_and(|restart| !restart.is_finished())
            || world.seats.iter().any(has_stopped)
    }

    /// Ends everything, and counts what it met.
    pub(crate) async fn heal(mut self, world: &mut World, tally: &mut Tally) -> Result<(), String> {
        for (_, end) in std::mem::take(&mut self.ends) {
            finish(world, end)?;
        }
        for seat in &mut world.seats {
            seat.database.set(Traffic::Pass);
            seat.database.lose_answers(0);
            seat.objects.set(Weather::default(), self.seed);
            // A run that was still to come would wait for a fault that is over.
            seat.next_environment.clear();
            if let Some((_, until, _)) = seat.stop.take() {
                std::fs::write(until, b"").expect("the file can be made");
            }
        }
        world.is_calm = true;
        if let Some(restart) = self.restart.take() {
            restart.await.map_err(|err| format!("the database does not start again: {err}"))?;
        }
        let open = std::mem::take(&mut self.open);
        for (kind, counter, before) in open {
            let now = tokio::task::block_in_place(|| read(world, counter));
            count(tally, kind, now > before);
        }
        Ok(())
    }

    fn end_after(&mut self, ms: u64, end: End) {
        self.ends.push((Instant::now() + Duration::from_millis(ms), end));
    }

    fn watch(&mut self, world: &World, kind: &'static str, counter: Counter) {
        self.open.push((kind, counter, read(world, counter)));
    }

    fn set_database(&mut self, world: &World, kind: &'static str, at: Option<usize>, traffic: Traffic, ms: u64) {
        self.watch(world, kind, Counter::Database { at });
        seats(at, world).for_each(|seat| world.seats[seat].database.set(traffic));
        self.end_after(ms, End::PassDatabase { at });
    }

    fn set_objects(
        &mut self,
        world: &World,
        kind: &'static str,
        at: Option<usize>,
        percent: u32,
        fates: Vec<Fate>,
        ms: u64,
    ) {
        self.watch(world, kind, Counter::Objects { at });
        let weather = Weather { percent, fates };
        for seat in seats(at, world) {
            world.seats[seat].objects.set(weather.clone(), self.seed.wrapping_add(seat as u64));
        }
        self.end_after(ms, End::PassObjects { at });
    }
}

/// The next run stops itself there. What it stops in the middle of, others take over.
fn stop_at(world: &mut World, seat: usize, at: &str, ms: u64) {
    world.kill(seat);
    let until = world.folder.join(format!("go-on-{seat}"));
    let _ = std::fs::remove_file(&until);
    let path = until.to_str().expect("test paths are UTF-8").to_owned();
    let seat = &mut world.seats[seat];
    seat.next_environment =
        vec![("OVERNIGHT_TEST_STOP_AT".into(), at.to_owned()), ("OVERNIGHT_TEST_STOP_UNTIL".into(), path)];
    seat.stop = Some((Duration::from_millis(ms), until, None));
}

fn finish(world: &mut World, end: End) -> Result<(), String> {
    match end {
        End::GoOn { seat } => {
            if let Some(process) = &world.seats[seat].process {
                process.go_on();
            }
        }
        End::PassDatabase { at } => seats(at, world).for_each(|seat| world.seats[seat].database.set(Traffic::Pass)),
        End::PassObjects { at } => {
            seats(at, world).for_each(|seat| world.seats[seat].objects.set(Weather::default(), 0));
        }
        End::StartObjects if world.objects.is_running() => {}
        End::StartObjects => world.objects.start_again()?,
        End::FreeObjects => world.objects.set_disk_full(false).map_err(|err| err.to_string())?,
        End::FreeDisk { seat } => {
            if let Some(process) = &world.seats[seat].process {
                // Another run has no limit, and one that has ended no disk.
                let _ = process.limit_files(None);
            }
        }
    }
    Ok(())
}

fn seats(at: Option<usize>, world: &World) -> impl Iterator<Item = usize> + use<> {
    let all = 0..world.seats.len();
    all.filter(move |seat| at.is_none_or(|at| at == *seat))
}

fn read(world: &World, counter: Counter) -> u64 {
    match counter {
        Counter::Database { at } => seats(at, world).map(|seat| world.seats[seat].database.num_met()).sum(),
        Counter::Objects { at } => {
            seats(at, world).flat_map(|seat| world.seats[seat].objects.met().into_values()).sum()
        }
        Counter::S3Server => world.seats.iter().map(|seat| seat.objects.num_server_errors()).sum(),
        Counter::Crashes => world.num_crashes,
        Counter::SelfStops => world.num_self_stops,
    }
}

/// Whether a process holds a lease of a shard or of a step; for the API, whether a job waits.
fn is_at_work(world: &World, seat: usize) -> bool {
    let Some(process) = &world.seats[seat].process else { return false };
    if seat == API {
        return has_unfinished_job(world);
    }
    let statement = format!(
        "select count(*) from workers w where w.pid = {} and (
            exists (select 1 from shards s where s.state = 'leased' and s.owner = w.worker_id)
            or exists (select 1 from jobs j where j.step_owner = w.worker_id))",
        process.pid()
    );
    is_any(world, &statement)
}

fn has_unfinished_job(world: &World) -> bool {
    is_any(world, "select count(*) from jobs where state not in ('failed', 'completed', 'expired', 'cancelled')")
}

/// False as well while the database does not answer.
fn is_any(world: &World, statement: &str) -> bool {
    let count = tokio::task::block_in_place(|| world.database.try_sql(statement));
    count.is_ok_and(|count| count != "0")
}
