"""Export of a single task: as a plain checkpoint, or as a PEFT adapter."""
