//! Names, reads and writes immutable objects.
