"""The work of each command, apart from its arguments and its output."""
