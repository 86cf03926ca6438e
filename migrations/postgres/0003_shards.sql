-- Shards: contiguous ranges of items, the unit of lease; one bit per item.
-- Written by intake (insert), by workers under a lease, by finalize and re-opening. Lives as long as its job.
-- Room is left on each page, so that a checkpoint's new version of a row stays beside the old one.
create table shards (
    job_id           uuid    not null references jobs (job_id),
    first_item       bigint  not null,
    first_line       bigint  not null,      -- physical line of its first byte, from 1
    byte_offset      bigint  not null,
    byte_len         bigint  not null,
    not_before       bigint  not null,
    epoch            bigint  not null default 0, -- rises with every lease; fences late writers
    lease_until      bigint,
    probe_item       bigint,                -- the item that runs alone, in isolation
    probe_epoch      bigint,                -- the lease under which it was named
    input_tokens     bigint  not null default 0,
    cached_tokens    bigint  not null default 0,
    output_tokens    bigint  not null default 0,
    reasoning_tokens bigint  not null default 0,
    shard_index      integer not null,
    num_items        integer not null,
    crashes          integer not null default 0, -- consecutive leases that ran out without a commit
    probe_deaths     integer not null default 0, -- leases that ran out while it ran alone
    next_seq         integer not null default 0,
    num_done         integer not null default 0, -- every outcome
    num_failed       integer not null default 0, -- outcomes in the failed bitmap
    num_cancelled    integer not null default 0, -- of them, left out of a retry of a cancelled job
    num_expired      integer not null default 0, -- of them, left out of a retry of an expired job
    state            text    not null default 'ready',
    owner            uuid,
    done             varbit  not null,      -- bit i, from the left, is that of the shard's item i
    failed           varbit,                -- null when none; a subset of done
    cancelled        varbit,                -- null when none; a subset of failed
    expired          varbit,                -- null when none; a subset of failed, apart from cancelled
    primary key (job_id, shard_index),
    constraint state_is_known check (state in ('ready', 'leased', 'done')),
    constraint shard_has_items check (num_items >= 1),
    constraint leased_iff_owned check
        ((state = 'leased') = (owner is not null) and (state = 'leased') = (lease_until is not null)),
    constraint done_iff_every_item_is check ((state = 'done') = (num_done = num_items)),
    constraint counts_fit check (
        num_done <= num_items and num_failed <= num_done and num_cancelled >= 0 and num_expired >= 0
        and num_cancelled + num_expired <= num_failed),
    constraint bitmaps_have_a_bit_per_item check (
        length(done) = num_items
        and (failed is null or length(failed) = num_items)
        and (cancelled is null or length(cancelled) = num_items)
        and (expired is null or length(expired) = num_items)),
    constraint bitmaps_are_null_when_empty check (
        (failed is null) = (num_failed = 0)
        and (cancelled is null) = (num_cancelled = 0)
        and (expired is null) = (num_expired = 0)),
    constraint probe_names_its_lease check ((probe_item is null) = (probe_epoch is null)),
    constraint probe_is_in_the_shard check (probe_item is null or probe_item - first_item between 0 and num_items - 1)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

-- find_shard_of_item; also proves that no two shards start at one item.
create unique index shards_by_first_item on shards (job_id, first_item);

-- claim_shard: first ready shard of a job that is due, and whether there is one.
create index shards_ready on shards (job_id, shard_index, not_before) where state = 'ready';

-- claim_shard and every way to take leases back: leased rows are few. Without lease_until,
-- so that a renewal changes no index.
create index shards_leased on shards (job_id, shard_index) where state = 'leased';
