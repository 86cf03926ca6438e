-- Attempts: one row per claim of a shard, for people; nothing decides by it.
-- Written by the claim and by whatever ends the lease; pruned a week after the job's end.
-- No foreign key: its check would lock the job's row at every claim.
create table attempts (
    job_id      uuid    not null,
    worker_id   uuid    not null,
    epoch       bigint  not null,
    started_at  bigint  not null,
    ended_at    bigint,
    shard_index integer not null,
    "end"       text,
    primary key (job_id, shard_index, epoch),
    constraint end_is_known check ("end" in ('done', 'released', 'waiting', 'trouble', 'lost', 'fenced')),
    constraint ended_at_has_its_reason check ((ended_at is null) = ("end" is null))
) with (fillfactor = 70);
