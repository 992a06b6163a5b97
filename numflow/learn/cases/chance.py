"""Chi-square test of counts against probabilities."""

import numpy as np


def chi_square(counts, p):
    """The chi-square statistic over the possible tokens, and its degrees of freedom."""
    counts, expected = np.asarray(counts, float), np.asarray(p) * np.sum(counts)
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    return float(np.sum((counts[seen] - expected[seen]) ** 2 / expected[seen])), int(seen.sum()) - 1


def limit(freedom):
    """The chi-square value that is exceeded with a probability of about 1 in 10,000 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
