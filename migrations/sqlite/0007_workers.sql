-- Workers: who lives, where, and which models each has.
-- Written by each worker for itself; dropped when it stops, or a day after its last report.
create table workers (
    worker_id  blob    not null primary key,
    host       text    not null,
    pid        integer not null,
    models     text    not null,            -- JSON array of names
    started_at integer not null,
    seen_at    integer not null,
    constraint worker_id_is_a_uuid check (length(worker_id) = 16)
) strict, without rowid;
