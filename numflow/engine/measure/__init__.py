"""How fast a model is, and how well it predicts."""
