-- A hash of each shard's item lines, so that an input which changed after intake is noticed when it is fed.
-- Written by intake with the shard's row; null in rows of a release that took none, whose lines go unchecked.
alter table shards add column lines_hash bytea -- big-endian
    constraint lines_hash_is_8_bytes check (length(lines_hash) = 8);
