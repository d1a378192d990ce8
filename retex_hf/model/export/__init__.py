"""One task on its own: a plain checkpoint, or a PEFT adapter."""
