-- Ended jobs go after `worker.jobs_kept_for`, with the files that they published in any round.

-- The job that published it; null for uploads, and for what earlier releases published.
-- No foreign key: a file may outlive its job.
alter table files add column job_id uuid;

-- Of `delete_jobs_ended_for`: what a job published.
create index files_of_job on files (job_id) where job_id is not null;

-- Of `delete_jobs_ended_for` and `prune_attempts`: jobs by their end, the oldest first.
create index jobs_ended on jobs (coalesce(completed_at, failed_at, expired_at, cancelled_at))
    where coalesce(completed_at, failed_at, expired_at, cancelled_at) is not null;

-- Of `delete_jobs_ended_for`: whether another job names the input.
create index jobs_of_input on jobs (input_file_id) where deleted_at is null;
