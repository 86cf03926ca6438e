//! Writes finished outcomes: the segment object first, durable, then the one
//! transaction that names it. Faults go the same way, without an object.

use std::time::{Duration, Instant};

use overnight_blobs::{ItemRecord, SegmentHead, SegmentWriter};
use overnight_store::{Committed, Guarded, NewFault, NewSegment};
use overnight_types::{Class, chain};

use crate::feed::{OpenLease, Stop};
use crate::renewal::Order;

/// Between tries of a commit that the database did not answer.
const COMMIT_RETRY_EVERY: Duration = Duration::from_millis(250);

/// Outcomes and faults that are not in the database yet.
#[derive(Debug)]
pub(crate) struct Unwritten {
    writer: Option<SegmentWriter>,
    pub(crate) faults: Vec<NewFault>,
    /// Since when the oldest of them waits.
    since: Option<Instant>,
}

impl Unwritten {
    pub(crate) fn new() -> Self {
        Self { writer: None, faults: Vec::new(), since: None }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writer.is_none() && self.faults.is_empty()
    }

    /// When the oldest must be written.
    pub(crate) fn due_at(&self, every: Duration) -> Option<Instant> {
        self.since.map(|since| since + every)
    }

    pub(crate) fn is_due(&self, items_max: u32, bytes_max: u64, every: Duration) -> bool {
        let full = |writer: &SegmentWriter| writer.num_records() >= items_max || writer.num_bytes() >= bytes_max;
        self.writer.as_ref().is_some_and(full)
            || self.faults.len() >= items_max as usize
            || self.due_at(every).is_some_and(|due_at| due_at <= Instant::now())
    }

    pub(crate) fn push_fault(&mut self, fault: NewFault) {
        self.since.get_or_insert_with(Instant::now);
        self.faults.push(fault);
    }
}

impl OpenLease {
    /// Adds an outcome to the segment under way.
    pub(crate) fn push_record(&mut self, record: &ItemRecord) {
        let writer = self.unwritten.writer.get_or_insert_with(|| {
            let head = SegmentHead {
                job: self.key.job,
                shard: self.key.shard,
                epoch: self.key.epoch,
                seq: self.next_seq,
                producer: self.shared.producer.clone(),
            };
            SegmentWriter::new(head, self.cut.first_item, self.cut.num_items)
        });
        writer.push(record);
        self.unwritten.since.get_or_insert_with(Instant::now);
    }

    /// Writes what is finished. `Ok(true)` once the shard has no undone item.
    pub(crate) async fn checkpoint(&mut self) -> Result<bool, Stop> {
        self.unwritten.since = None;
        self.record_faults().await?;
        let Some(writer) = self.unwritten.writer.take() else { return Ok(false) };
        let started = Instant::now();
        let (bytes, parts) = writer.finish();
        fail::fail_point!("worker::segment_before_put");
        self.shared.blobs.put(&parts.name, bytes).await.map_err(|err| Stop::trouble("write a segment", &err))?;
        fail::fail_point!("worker::segment_after_put");
        let segment = NewSegment {
            shard: self.key.shard,
            seq: self.next_seq,
            epoch: self.key.epoch,
            items: parts.items,
            failed: parts.failed,
            code_counts: parts.code_counts,
            usage: parts.usage,
            byte_len: parts.byte_len,
            sha256: parts.sha256,
        };
        let written = Instant::now();
        let committed = self.commit(&segment).await?;
        self.shared.metrics.committed(&segment.code_counts, segment.byte_len, started.elapsed(), written.elapsed());
        fail::fail_point!("worker::segment_after_commit");
        self.done.union(&segment.items);
        self.next_seq += 1;
        self.shared.troubles.over();
        Ok(committed.shard_done)
    }

    /// Commits for as long as the lease lasts: a database that is away for a moment
    /// costs a delay. If an unanswered commit did happen, the next one is fenced by
    /// its sequence number and the shard is dropped, with nothing lost.
    async fn commit(&mut self, segment: &NewSegment) -> Result<Committed, Stop> {
        loop {
            if self.guard.order() == Order::Lost {
                return Err(Stop::Lost);
            }
            // A process that stalls here, past its lease, writes late: only the epoch stops it.
            fail::fail_point!("worker::segment_before_commit");
            let call = self.shared.store.commit_segment_if_leased(self.key, segment);
            match self.guard.while_held(self.shared.config.lease_ttl, call).await.ok_or(Stop::Lost)? {
                Ok(Guarded::Applied(committed)) => return Ok(committed),
                Ok(Guarded::Lost { now }) => {
                    self.shared.metrics.lost();
                    tracing::warn!(
                        job.id = %self.key.job, shard.index = self.key.shard.0, epoch = self.key.epoch.0, ?now,
                        "a late write of outcomes was refused"
                    );
                    return Err(Stop::Lost);
                }
                Err(err) if err.class() == Class::Transient => {
                    tracing::warn!(error = %chain(&err), "could not commit outcomes, trying again");
                    tokio::time::sleep(COMMIT_RETRY_EVERY).await;
                }
                Err(err) => return Err(Stop::trouble("commit outcomes", &err)),
            }
        }
    }

    async fn record_faults(&mut self) -> Result<(), Stop> {
        if self.unwritten.faults.is_empty() {
            return Ok(());
        }
        fail::fail_point!("worker::faults_before_record");
        let faults = std::mem::take(&mut self.unwritten.faults);
        let call = self.shared.store.record_faults_if_leased(self.key, &faults);
        match self.guard.while_held(self.shared.config.lease_ttl, call).await.ok_or(Stop::Lost)? {
            // Other workers draw on the same budget.
            Ok(Guarded::Applied(used)) => {
                self.shared.metrics.retried(faults.len());
                self.shared.retries.at_least(self.key.job, used);
            }
            Ok(Guarded::Lost { .. }) => return Err(Stop::Lost),
            Err(err) => return Err(Stop::trouble("record faults", &err)),
        }
        fail::fail_point!("worker::faults_after_record");
        Ok(())
    }
}
