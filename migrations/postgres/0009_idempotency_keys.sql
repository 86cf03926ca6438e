-- Idempotency keys: make a repeated create return the first answer.
-- Written by insert_job; dropped with the job, or by a later insert once a week old.
create table idempotency_keys (
    key           text    not null primary key,
    params_sha256 bytea   not null,
    job_id        uuid    not null references jobs (job_id),
    created_at    bigint  not null,
    constraint params_sha256_is_32_bytes check (length(params_sha256) = 32)
);

-- insert_job drops the oldest.
create index idempotency_keys_by_age on idempotency_keys (created_at);

-- purge_deleted_jobs drops those of a job.
create index idempotency_keys_of_job on idempotency_keys (job_id);
