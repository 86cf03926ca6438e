-- Item faults: items that wait for a retry; an item that never failed has no row.
-- Written by workers under a lease; a row goes when its item's outcome commits or its job ends.
create table item_faults (
    job_id      uuid    not null references jobs (job_id),
    item_index  bigint  not null,
    attempts    integer not null,           -- tries so far
    not_before  bigint  not null,
    http_status integer,                    -- of the last try, when there was an answer
    code        text    not null,
    message     text    not null,
    primary key (job_id, item_index),
    constraint tries_are_counted_from_one check (attempts >= 1),
    constraint message_is_short check (length(message) <= 1000)
);
