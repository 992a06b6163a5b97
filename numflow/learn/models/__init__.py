"""Models of our own: their text, their training, and what came out."""
