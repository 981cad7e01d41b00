"""Word, position and rotary embeddings."""
