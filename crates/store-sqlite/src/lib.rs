//! The contract of `store` on SQLite; owns `migrations/sqlite`.
