-- Segments: rows that name immutable objects of outcomes; without its row an object does not count.
-- Written once, by commit_segment_if_leased or by a re-opening; never changed. Lives as long as its job.
create table segments (
    committed        integer primary key autoincrement, -- order of commits over the whole database; the cursor of readers
    job_id           blob    not null references jobs (job_id),
    shard_index      integer not null,
    seq              integer not null,      -- within the shard
    epoch            integer not null,      -- in its object's name
    round            integer not null,
    num_items        integer not null,      -- outcomes that it holds
    items            blob    not null,      -- bit per item of the shard
    failed           blob,                  -- null when none
    code_counts      text    not null,      -- JSON object: outcomes by error code, or ok
    input_tokens     integer not null,
    cached_tokens    integer not null,
    output_tokens    integer not null,
    reasoning_tokens integer not null,
    byte_len         integer not null,
    sha256           blob    not null,
    constraint segment_holds_outcomes check (num_items >= 1),
    constraint sha256_is_32_bytes check (length(sha256) = 32),
    constraint bitmaps_have_one_length check (failed is null or length(failed) = length(items))
) strict;

-- list_segments in input order; also proves that a sequence number is used once.
create unique index segments_in_order on segments (job_id, shard_index, seq);

-- list_segments_committed: the rowid, which is the commit order, follows the key in the index.
create index segments_of_job on segments (job_id);
