"""`RetexModel`: built from experts, used, changed, saved and shared."""
