//! CUDA families, their launchers and their CPU references.
