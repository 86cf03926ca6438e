-- Files: uploads and published outputs; the bytes are objects named by file_id.
-- Written by the doors (upload, delete) and by finalize. A row lives until its object is gone.
create table files (
    file_id    uuid    not null primary key,
    filename   text    not null,
    purpose    text    not null,
    bytes      bigint  not null,
    sha256     bytea   not null,
    created_at bigint  not null,            -- microseconds since 1970, as every time here
    expires_at bigint,                      -- null keeps it until deleted
    deleted_at bigint,                      -- hidden from then on; the bytes stay while an unfinished job reads them
    constraint sha256_is_32_bytes check (length(sha256) = 32),
    constraint bytes_are_not_negative check (bytes >= 0),
    constraint purpose_is_known check (purpose in
        ('assistants', 'batch', 'batch_output', 'fine-tune', 'vision', 'user_data', 'evals'))
);

-- list_files, by keyset.
create index files_by_creation on files (created_at, file_id);

-- list_removable_files, oldest first.
create index files_going on files (coalesce(deleted_at, expires_at)) where coalesce(deleted_at, expires_at) is not null;
