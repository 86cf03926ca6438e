//! The dashboard: pages and fragments.
