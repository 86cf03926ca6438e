//! The binary as people and scripts meet it: help, exit codes, streams, settings, and
//! whole sessions against a real server with the instant engine.

mod bodies;
mod documents;
mod harness;
mod json;
mod logs;
mod offline;
mod outputs;
mod server;
mod terminal;
mod words;
