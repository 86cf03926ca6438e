-- The failed tries before the last one, so that an item can tell why each of its tries failed.
-- Written with the fault that replaces an older one; the row goes as before.
alter table item_faults add column earlier text not null default '[]' -- [[number, http_status, code, message], …], oldest first
    constraint earlier_is_a_list check (json_typeof(earlier::json) = 'array');
