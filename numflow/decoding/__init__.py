"""From logits to tokens: strategies, penalties, constraints, log-probabilities, structured output, speculation.

Arrays of numbers only: this package does not depend on models, tokenizers or batches. `chain` has the strategies.
"""
