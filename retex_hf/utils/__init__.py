"""Helpers independent of models: atomic files and folders, strict parsing, locks, terminal output, devices."""
