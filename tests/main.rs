//! Whole-system tests through public doors; one binary.
