//! The REST server over a real database, real objects and a scripted engine.

mod auth;
mod clients;
mod connections;
mod content;
mod create;
mod events;
mod items;
mod lifecycle;
mod listing;
mod online;
mod refusals;
mod server;
mod streaming;
mod uploads;
mod validate;
mod words;
