"""What a command does, apart from its arguments and its output."""
