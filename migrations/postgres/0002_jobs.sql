-- Jobs: what is asked for and where it stands.
-- Written by the doors and by lifecycle steps, each by guarded updates; its row is locked before any of its shards'. A row lives until its job is deleted and purged.
create table jobs (
    job_id                  uuid    not null primary key,
    endpoint                text    not null,
    model                   text,           -- set when intake ends
    input_file_id           uuid    not null, -- no foreign key: an ended job outlives its input
    input_bytes             bigint  not null,
    input_sha256            bytea   not null,
    completion_window       text    not null, -- as given on the wire
    window_us               bigint  not null,
    metadata                text,           -- a JSON object, opaque here
    name                    text,
    priority                integer not null, -- lower runs first
    output_expires_after_us bigint,
    state                   text    not null,
    ending                  text,           -- how it will end, drawn with the file ids
    cancel_mode             text    not null default 'drain',
    paused_at               bigint,         -- a column, not a state
    round                   integer not null default 1,
    retries_used            bigint  not null default 0, -- of this round's retry budget
    created_at              bigint  not null,
    in_progress_at          bigint,         -- end of intake; null tells that intake is to go on
    expires_at              bigint  not null, -- end of the window
    finalizing_at           bigint,
    completed_at            bigint,
    failed_at               bigint,
    expired_at              bigint,
    cancelling_at           bigint,
    cancelled_at            bigint,
    deleted_at              bigint,         -- hidden; its rows go in bounded pieces
    num_items               bigint  not null default 0, -- 0 until intake ends
    num_shards              integer not null default 0,
    output_file_id          uuid,           -- drawn in the transaction that decides the ending
    error_file_id           uuid,
    final_completed         bigint,         -- the final counts, set with the terminal state
    final_failed            bigint,
    final_cancelled         bigint,
    final_expired           bigint,
    final_input_tokens      bigint,
    final_cached_tokens     bigint,
    final_output_tokens     bigint,
    final_reasoning_tokens  bigint,
    errors                  text,           -- intake's errors as the wire's JSON
    intake_offset           bigint  not null default 0, -- bytes read and settled
    intake_notes            text,           -- intake's own JSON between pieces
    step_due_at             bigint,         -- when intake or finalize is due
    step_epoch              bigint  not null default 0, -- fences a late step
    step_owner              uuid,
    step_until              bigint,
    constraint input_sha256_is_32_bytes check (length(input_sha256) = 32),
    constraint state_is_known check (state in
        ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')),
    constraint ending_is_known check (ending in ('completed', 'expired', 'cancelled')),
    constraint cancel_mode_is_known check (cancel_mode in ('drain', 'now')),
    constraint ending_is_drawn_when_running_ends check
        ((ending is not null) = (state in ('finalizing', 'completed', 'expired', 'cancelling', 'cancelled'))),
    constraint file_ids_are_drawn_with_the_ending check
        ((output_file_id is not null) = (ending is not null) and (error_file_id is not null) = (ending is not null)),
    constraint ended_at_iff_terminal check (
        (completed_at is not null) = (state = 'completed')
        and (failed_at is not null) = (state = 'failed')
        and (expired_at is not null) = (state = 'expired')
        and (cancelled_at is not null) = (state = 'cancelled')),
    constraint counts_are_final_iff_published check
        ((final_completed is not null) = (state in ('completed', 'expired', 'cancelled'))),
    constraint accounting_is_closed_at_the_end check
        (final_completed is null or final_completed + final_failed + final_cancelled + final_expired = num_items),
    constraint errors_iff_failed check ((errors is not null) = (state = 'failed')),
    constraint intake_has_ended_when_running check (state not in ('in_progress', 'finalizing') or in_progress_at is not null),
    constraint model_is_known_when_running check (in_progress_at is null or model is not null),
    constraint paused_only_while_active check (paused_at is null or state in ('validating', 'in_progress')),
    constraint step_is_due_iff_the_state_has_one check
        ((step_due_at is not null) = (state in ('validating', 'finalizing', 'cancelling'))),
    constraint step_lease_has_owner_and_end check ((step_owner is null) = (step_until is null)),
    constraint deleted_only_when_terminal check
        (deleted_at is null or state in ('failed', 'completed', 'expired', 'cancelled')),
    constraint round_starts_at_one check (round >= 1)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

-- list_jobs, by keyset.
create index jobs_by_creation on jobs (created_at, job_id);

-- claim_shard: runnable jobs in the order in which they are served.
create index jobs_runnable on jobs (priority, expires_at, created_at, job_id) where state = 'in_progress' and paused_at is null;

-- expire_due_jobs.
create index jobs_expiring on jobs (expires_at) where state = 'in_progress';

-- claim_step, most overdue first.
create index jobs_step_due on jobs (step_due_at) where step_due_at is not null;

-- find_input_for_run and list_removable_files: does an unfinished job read this input?
create index jobs_reading_input on jobs (input_file_id) where state in ('validating', 'in_progress', 'finalizing', 'cancelling');

-- purge_deleted_jobs.
create index jobs_deleted on jobs (deleted_at) where deleted_at is not null;
