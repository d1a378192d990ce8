"""Task data in, answers out: datasets, labels, and how a model's outputs are read."""
