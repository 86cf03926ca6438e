//! Sums over shards. No bitmap is read: the counts stand beside the bits.

use overnight_store::{Error, JobsAhead, Progress};
use overnight_types::JobId;

use crate::PostgresStore;
use crate::job_row::read_progress;
use crate::row::{Read, uuids};
use crate::statement::Statement;
use crate::transaction::clock;

impl PostgresStore {
    pub(crate) async fn progress_of(&self, ids: &[JobId], ahead: JobsAhead) -> Result<Vec<(JobId, Progress)>, Error> {
        sqlx::query(concat!(
            "with clock as materialized (select ",
            clock!(),
            " as now),
            places as materialized (
                -- As claim_shard goes: the same order, and past jobs with nothing to lease. Once for
                -- all of the ids: a count for each would be quadratic in the runnable jobs.
                select r.job_id, coalesce(sum((exists (
                        select 1 from shards s
                        where s.job_id = r.job_id and s.state = 'ready' and s.not_before <= clock.now
                    ))::integer) over (
                        partition by r.model
                        order by r.priority, r.expires_at, r.created_at, r.job_id
                        rows between unbounded preceding and 1 preceding
                    ), 0)::bigint as jobs_ahead
                from jobs r, clock
                where $3 and r.state = 'in_progress' and r.paused_at is null and r.expires_at > clock.now
                    and r.model in (select m.model from jobs m where m.job_id = any($2))
            ),
            sums as (
                select s.job_id, sum(s.num_done)::bigint as num_done, sum(s.num_failed)::bigint as num_failed,
                    sum(s.num_cancelled)::bigint as num_cancelled, sum(s.num_expired)::bigint as num_expired,
                    sum(s.input_tokens)::bigint as input_tokens, sum(s.cached_tokens)::bigint as cached_tokens,
                    sum(s.output_tokens)::bigint as output_tokens,
                    sum(s.reasoning_tokens)::bigint as reasoning_tokens,
                    count(*) filter (where s.state = 'ready') as shards_ready,
                    count(*) filter (where s.state = 'leased') as shards_leased,
                    count(*) filter (where s.state = 'done') as shards_done
                from shards s where s.job_id = any($2)
                group by s.job_id
            )
            select j.job_id, j.num_items, j.retries_used, j.final_completed, j.final_failed, j.final_cancelled,
                j.final_expired, j.final_input_tokens, j.final_cached_tokens, j.final_output_tokens,
                j.final_reasoning_tokens,
                (select count(*) from item_faults f where f.job_id = j.job_id and f.not_before > clock.now)
                    as num_waiting,
                p.jobs_ahead,
                coalesce(s.num_done, 0) as num_done, coalesce(s.num_failed, 0) as num_failed,
                coalesce(s.num_cancelled, 0) as num_cancelled, coalesce(s.num_expired, 0) as num_expired,
                coalesce(s.input_tokens, 0) as input_tokens, coalesce(s.cached_tokens, 0) as cached_tokens,
                coalesce(s.output_tokens, 0) as output_tokens, coalesce(s.reasoning_tokens, 0) as reasoning_tokens,
                coalesce(s.shards_ready, 0) as shards_ready, coalesce(s.shards_leased, 0) as shards_leased,
                coalesce(s.shards_done, 0) as shards_done
            from clock, jobs j left join places p on p.job_id = j.job_id
                left join sums s on s.job_id = j.job_id and j.in_progress_at is not null
            where j.job_id = any($2) and j.deleted_at is null"
        ))
        .bind(self.clock_offset.micros())
        .bind(uuids(ids.iter().map(JobId::uuid)))
        .bind(ahead == JobsAhead::Count)
        .list(self, "sum up progress", |row| Ok((row.job_id()?, read_progress(row)?)))
        .await
    }
}
