"""Helpers that know nothing of models: atomic files and folders, strict parsing, locks, terminal output, devices."""
