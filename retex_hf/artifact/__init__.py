"""The artifact, a folder that holds a model: its state, schema, files and card, and transfer to and from the Hub."""
