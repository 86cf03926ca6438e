-- What a worker's engine serves once it is loaded, or loaded again; models holds what it serves now.
alter table workers add column may_load text not null default '[]';
