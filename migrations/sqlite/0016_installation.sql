-- What this database belongs to: one row.
create table installation (
    one integer primary key check (one = 1),
    -- The id of the objects that the rows name, of the first process that used them together.
    objects_id blob not null
) strict;

-- Of `known_files`: the jobs whose files are being published.
create index jobs_publishing on jobs (job_id) where state in ('finalizing', 'cancelling');
