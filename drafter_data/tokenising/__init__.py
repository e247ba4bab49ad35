"""Text to token ids, conversations to ids with a loss mask."""
