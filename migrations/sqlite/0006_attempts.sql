-- Attempts: one row per claim of a shard, for people; nothing decides by it.
-- Written by the claim and by whatever ends the lease; pruned a week after the job's end.
create table attempts (
    job_id      blob    not null references jobs (job_id),
    shard_index integer not null,
    epoch       integer not null,
    worker_id   blob    not null,
    started_at  integer not null,
    ended_at    integer,
    end         text,
    primary key (job_id, shard_index, epoch),
    constraint end_is_known check (end in ('done', 'released', 'waiting', 'trouble', 'lost', 'fenced')),
    constraint ended_at_has_its_reason check ((ended_at is null) = (end is null))
) strict, without rowid;
