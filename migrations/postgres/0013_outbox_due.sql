-- claim_event finds the next due event by it; what is delivered or given up is not in it.
create index outbox_due on outbox (due_at, event_id) where due_at is not null;
