"""Serving of an artifact over HTTP, in OpenAI's shapes."""
