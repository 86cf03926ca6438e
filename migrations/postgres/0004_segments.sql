-- Segments: rows that name immutable objects of outcomes; without its row an object does not count.
-- Written once, by commit_segment_if_leased or by a re-opening; never changed. Lives as long as its job.
-- No foreign key: its check would lock the job's row at every checkpoint. A row is only written
-- under the lock of its shard's, which has one.
create table segments (
    job_id           uuid    not null,
    committed        bigint  not null,      -- transaction number, moved by segments_committed_base; the cursor of readers
    epoch            bigint  not null,      -- in its object's name
    input_tokens     bigint  not null,
    cached_tokens    bigint  not null,
    output_tokens    bigint  not null,
    reasoning_tokens bigint  not null,
    byte_len         bigint  not null,
    shard_index      integer not null,
    seq              integer not null,      -- within the shard
    round            integer not null,
    num_items        integer not null,      -- outcomes that it holds
    items            varbit  not null,      -- bit per item of the shard
    failed           varbit,                -- null when none
    code_counts      text    not null,      -- JSON object: outcomes by error code, or ok
    sha256           bytea   not null,
    -- list_segments in input order; also proves that a sequence number is used once.
    constraint segments_in_order primary key (job_id, shard_index, seq),
    constraint segment_holds_outcomes check (num_items >= 1),
    constraint sha256_is_32_bytes check (length(sha256) = 32),
    constraint bitmaps_have_one_length check (failed is null or length(failed) = length(items))
);

-- list_segments_committed.
create index segments_of_job on segments (job_id, committed, shard_index);

-- Added to the transaction's number, so that the order of commits goes on in a server to
-- which the database was moved and whose own numbers are lower. Raised when that is noticed.
create sequence segments_committed_base minvalue 0 start 0;
