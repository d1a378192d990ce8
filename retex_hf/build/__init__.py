"""Building an artifact from a base and experts: plan, merge, solve, write."""
