-- What must hold once every job has ended and nobody works: each row is a finding.
-- Bits are numbered from the least significant of the first byte, which is how get_bit counts.
with job as (
    select * from jobs where deleted_at is null
),
item as (
    select s.job_id, s.shard_index, bit, get_bit(s.done, bit) as done, coalesce(get_bit(s.failed, bit), 0) as failed
    from shards s join job using (job_id), generate_series(0, s.num_items - 1) as bit
),
held as (
    select g.job_id, g.shard_index, g.round, bit, count(*) as outcomes, sum(coalesce(get_bit(g.failed, bit), 0)) as failed
    from segments g join shards s using (job_id, shard_index) join job using (job_id),
        generate_series(0, s.num_items - 1) as bit
    where get_bit(g.items, bit) = 1
    group by g.job_id, g.shard_index, g.round, bit
),
newest as (
    select distinct on (job_id, shard_index, bit) * from held order by job_id, shard_index, bit, round desc
),
sums as (
    select s.job_id, sum(s.num_items) as num_items, count(*) as num_shards, sum(s.num_done) as num_done,
        sum(s.num_failed) as num_failed
    from shards s join job using (job_id) group by s.job_id
)
select 'a job has not ended: ' || state || ' ' || job_id from job
    where state not in ('failed', 'completed', 'expired', 'cancelled')
union all
select 'a step is leased or due: ' || job_id from job where step_owner is not null or step_due_at is not null
union all
select 'a shard is leased: ' || shard_index || ' of ' || job_id from shards where state = 'leased'
union all
select 'an attempt is open: epoch ' || epoch || ' of shard ' || shard_index || ' of ' || job_id from attempts
    where ended_at is null
union all
select 'an item of an ended job waits for a retry: ' || item_index || ' of ' || job_id from item_faults
union all
select 'an item has ' || outcomes || ' outcomes in round ' || round || ': ' || bit || ' of shard ' || shard_index || ' of ' || job_id
    from held where outcomes <> 1
union all
select 'an item is done and no segment holds its outcome: ' || bit || ' of shard ' || shard_index || ' of ' || job_id
    from item left join newest using (job_id, shard_index, bit) where done = 1 and outcomes is null
union all
select 'an outcome of the newest round is not in the bitmap: ' || bit || ' of shard ' || shard_index || ' of ' || job_id
    from item join newest using (job_id, shard_index, bit) join job using (job_id)
    where item.done = 0 and newest.round = job.round
union all
select 'bitmap and segment differ on a failure: ' || bit || ' of shard ' || shard_index || ' of ' || job_id
    from item join newest using (job_id, shard_index, bit) where item.done = 1 and item.failed <> newest.failed
union all
select 'a completed job has an undone item: ' || bit || ' of shard ' || shard_index || ' of ' || job_id
    from item join job using (job_id) where done = 0 and state = 'completed'
union all
select 'counts are not those of the bits: shard ' || shard_index || ' of ' || job_id from shards
    where num_done <> bit_count(done) or num_failed <> coalesce(bit_count(failed), 0)
        or (state = 'done') <> (num_done = num_items)
union all
select 'segments are missing or too many: shard ' || s.shard_index || ' of ' || s.job_id from shards s
    where next_seq <> (select count(*) from segments g where g.job_id = s.job_id and g.shard_index = s.shard_index)
union all
select 'segments of one number: ' || seq || ' of shard ' || shard_index || ' of ' || job_id from segments
    group by job_id, shard_index, seq having count(*) > 1
union all
select 'a later segment has a lower epoch: ' || seq || ' of shard ' || shard_index || ' of ' || job_id
    from (select *, lag(epoch) over (partition by job_id, shard_index order by seq) as before from segments) g
    where epoch < before
union all
select 'a segment has an epoch that was never given: ' || g.epoch || ' of shard ' || g.shard_index || ' of ' || g.job_id
    from segments g join shards s using (job_id, shard_index) where g.epoch > s.epoch
union all
select 'final counts do not add up: ' || job_id from job join sums using (job_id)
    where state in ('completed', 'expired', 'cancelled') and in_progress_at is not null and (
        final_completed + final_failed + final_cancelled + final_expired <> sums.num_items
        or final_completed <> sums.num_done - sums.num_failed
        or job.num_items <> sums.num_items or job.num_shards <> sums.num_shards)
union all
select 'a published file has no row: ' || job_id from job
    where state in ('completed', 'expired', 'cancelled') and (
        (final_completed > 0) <> exists (select 1 from files f where f.file_id = job.output_file_id)
        or (final_failed + final_cancelled + final_expired > 0)
            <> exists (select 1 from files f where f.file_id = job.error_file_id))
