//! The index from custom id to item index: fixed entries of 12 bytes, sorted by a
//! keyed 64-bit hash, in one object per job.
//!
//! It answers with candidates; whoever asks reads the input line to be sure.
