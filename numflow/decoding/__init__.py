"""From logits to tokens: strategies, penalties, constraints, log-probabilities, structured output, speculation.

Numbers only: nothing here knows models, tokenizers or batches. `chain` has the table of strategies.
"""
