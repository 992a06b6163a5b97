"""State of the engine as JSON, of bounded size and cost, for the page /explore."""
