"""Serving of an artifact over HTTP, in OpenAI's shapes. Needs uvicorn: `pip install "retex-hf[serve]"`."""
