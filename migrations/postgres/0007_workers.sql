-- Workers: who lives, where, and which models each has.
-- Written by each worker for itself; dropped when it stops, or a day after its last report.
create table workers (
    worker_id  uuid    not null primary key,
    host       text    not null,
    pid        bigint  not null,
    models     text    not null,            -- JSON array of names
    started_at bigint  not null,
    seen_at    bigint  not null
) with (fillfactor = 70);
