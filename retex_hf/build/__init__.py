"""From a base and experts to an artifact: plan, merge, solve, write."""
