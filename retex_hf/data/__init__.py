"""Datasets, labels, and how a model's outputs are read as answers."""
