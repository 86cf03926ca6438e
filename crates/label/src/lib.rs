//! Job specs: schedules, sources, prompts, label scoring, evaluation, export.
