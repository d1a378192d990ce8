"""The folder that holds a model: its state, schema, files, card, and the way to the Hub and back."""
