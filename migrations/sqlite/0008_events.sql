-- Events: the audit trail of jobs, written in the transaction of the change. Lives as long as its job.
create table events (
    seq    integer primary key autoincrement, -- order over the whole database; the cursor of readers
    job_id blob    not null references jobs (job_id),
    at     integer not null,
    what   text    not null,
    note   text    not null
) strict;

-- list_events: seq follows the key in the index.
create index events_of_job on events (job_id);
