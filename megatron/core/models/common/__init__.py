"""Parts that language models share."""
