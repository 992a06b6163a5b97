"""The models that come with numflow: their training texts, their training code, and the trained files."""
