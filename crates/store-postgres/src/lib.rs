//! The contract of `store` on Postgres; owns `migrations/postgres`.
