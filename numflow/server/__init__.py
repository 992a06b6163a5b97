"""The HTTP service: Inferflow's own interface and OpenAI's, over the engine."""
