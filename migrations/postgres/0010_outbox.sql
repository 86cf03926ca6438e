-- Outbox: what is to be told outside, written in the transaction of the change that it tells.
-- Written by finalize and intake; dropped with the job.
create table outbox (
    event_id     uuid    not null primary key,
    job_id       uuid    not null references jobs (job_id),
    kind         text    not null,          -- batch.completed, batch.failed, batch.expired, batch.cancelled
    created_at   bigint  not null,
    due_at       bigint,                    -- null once delivered or given up
    attempts     integer not null default 0,
    delivered_at bigint,
    constraint kind_is_known check (kind in ('batch.completed', 'batch.failed', 'batch.expired', 'batch.cancelled'))
);

-- purge_deleted_jobs drops those of a job.
create index outbox_of_job on outbox (job_id);
