"""Lab 12: choosing tokens.

`top_p` (nucleus sampling) keeps the smallest set of most probable candidates whose probabilities sum to at least p.
c.ids are the token ids of the candidates, in rising order; c.probabilities sum to 1. c.keep(indices) returns the kept
candidates, from their indices in c.ids, in any order, or from a mask. Among equally probable candidates the lower id
comes first.

`accept` is a step of Mirostat, which keeps the surprise of a text near `state.tau` bits. Tokens with more than
`state.mu` bits of surprise are not sampled. After each token mu is corrected by the error:

    surprise = -log2 p(token)          mu <- mu - eta * (surprise - tau)

state.drawn are the candidates (as above) that the token was sampled from; their probabilities are p. A token that is
not among them was forced, by a grammar for example, and changes nothing.

`verify` checks a draft token in speculative decoding. `guess` is a token that a small draft model has sampled from q;
the resulting text must have the distribution p of the large model. The guess is accepted with probability
min(1, p(guess) / q(guess)). Otherwise another token is sampled from max(0, p - q), normalised. p and q have `ids` and
`probabilities`; p.of(array of ids) returns the probabilities of any ids. `accept` and `other` are uniform random
numbers between 0 and 1, one for each of the two decisions. `draw(ids, weights, other)` (given) samples an id with a
random number; the weights need not sum to 1.

    numflow learn check 12       numflow learn hint 12       numflow learn bench 12
"""

import math

import numpy as np

from numflow.decoding.select import draw

LAB = {
    "number": 12, "title": "Choosing tokens", "minutes": 60, "functions": ["top_p", "accept", "verify"],
    "grader": "choosing",
    "hints": [
        "Draw p and q as two bar charts on top of each other. Where q is higher, guesses are rejected; where p is "
        "higher, tokens are missing. Both areas are equal.",
        "top_p: the candidate whose sum reaches p is kept too. verify: draw(ids, weights, other) samples, and the "
        "weights need not be normalised.",
        "order = np.argsort(-c.probabilities, kind=\"stable\"); sums = np.cumsum(...); count = np.searchsorted(sums, "
        "p) + 1. verify: if accept * q(guess) < p(guess) return guess; return draw(p.ids, np.maximum(p.probabilities - "
        "q.of(p.ids), 0), other)."],
}


def top_p(c, p):
    """Candidates c, p 0 .. 1 -> the kept candidates."""
    order = np.argsort(-c.probabilities, kind="stable")
    sums = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(sums, p)) + 1])


def accept(state, id):
    """Change state.mu after token `id`. state also has tau, eta and drawn."""
    indices = np.flatnonzero(state.drawn.ids == id)
    if len(indices):
        surprise = -math.log2(state.drawn.probabilities[indices[0]])
        state.mu -= state.eta * (surprise - state.tau)


def verify(p, guess, q, accept, other):
    """Distributions p and q, a guess sampled from q, two uniform numbers -> a token distributed as p."""
    target, drafted = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * drafted < target:
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def top_p__too_few(c, p):
    """a set without the candidate whose sum reaches p: its probabilities sum to less than p"""
    order = np.argsort(-c.probabilities, kind="stable")
    sums = np.cumsum(c.probabilities[order])
    return c.keep(order[: max(int(np.searchsorted(sums, p)), 1)])


def top_p__none(c, p):
    """a set without the candidate whose sum reaches p, which may even be empty"""
    order = np.argsort(-c.probabilities, kind="stable")
    return c.keep(order[: int(np.searchsorted(np.cumsum(c.probabilities[order]), p))])


def top_p__too_many(c, p):
    """a set with one candidate more than necessary for p"""
    order = np.argsort(-c.probabilities, kind="stable")
    sums = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(sums, p)) + 2])


def top_p__rarest(c, p):
    """the least probable candidates first"""
    order = np.argsort(c.probabilities, kind="stable")
    sums = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(sums, p)) + 1])


def top_p__by_id(c, p):
    """candidates in the order of their ids: sort them by probability"""
    sums = np.cumsum(c.probabilities)
    return c.keep(np.arange(min(int(np.searchsorted(sums, p)) + 1, len(c.ids))))


def top_p__threshold(c, p):
    """candidates that are at least p times as probable as the best one, which is min-p"""
    return c.keep(c.probabilities >= p * c.probabilities.max())


def top_p__last_of_equal(c, p):
    """the higher id first among equally probable candidates"""
    order = np.argsort(c.probabilities, kind="stable")[::-1]
    sums = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(sums, p)) + 1])


def accept__wrong_way(state, id):
    """a mu that is corrected in the wrong direction"""
    mu = state.mu
    accept(state, id)
    state.mu = 2 * mu - state.mu


def accept__nats(state, id):
    """a surprise in nats: use log2 for bits"""
    indices = np.flatnonzero(state.drawn.ids == id)
    if len(indices):
        state.mu -= state.eta * (-math.log(state.drawn.probabilities[indices[0]]) - state.tau)


def accept__no_eta(state, id):
    """a step of the whole error, without eta"""
    indices = np.flatnonzero(state.drawn.ids == id)
    if len(indices):
        state.mu -= -math.log2(state.drawn.probabilities[indices[0]]) - state.tau


def accept__from_mu(state, id):
    """an error relative to mu instead of tau"""
    indices = np.flatnonzero(state.drawn.ids == id)
    if len(indices):
        state.mu -= state.eta * (-math.log2(state.drawn.probabilities[indices[0]]) - state.mu)


def accept__id_as_index(state, id):
    """an id that is used as an index of the candidates"""
    if id < len(state.drawn.ids):
        state.mu -= state.eta * (-math.log2(state.drawn.probabilities[id]) - state.tau)


def verify__always(p, guess, q, accept, other):
    """guesses that are always accepted: the text has the distribution q"""
    return guess


def verify__never(p, guess, q, accept, other):
    """guesses that are never accepted: the text is right, but nothing is gained"""
    return draw(p.ids, p.probabilities, other)


def verify__by_p_alone(p, guess, q, accept, other):
    """guesses that are accepted with probability p(guess): q(guess) is left out"""
    if accept < float(p.of(np.array([guess]))[0]):
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def verify__from_p(p, guess, q, accept, other):
    """a replacement that is sampled from p instead of max(0, p - q)"""
    target, drafted = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    return guess if accept * drafted < target else draw(p.ids, p.probabilities, other)


def verify__from_q(p, guess, q, accept, other):
    """a replacement that is sampled from max(0, q - p) instead of max(0, p - q)"""
    target, drafted = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * drafted < target:
        return guess
    weights = np.maximum(q.of(p.ids) - p.probabilities, 0)
    return draw(p.ids, weights, other) if weights.any() else guess


def verify__rest_alone(p, guess, q, accept, other):
    """guesses that are never accepted, and tokens that are sampled from max(0, p - q) only"""
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def verify__distance(p, guess, q, accept, other):
    """a replacement that is sampled from |p - q| instead of max(0, p - q)"""
    target, drafted = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    return guess if accept * drafted < target else draw(p.ids, np.abs(p.probabilities - q.of(p.ids)), other)


def verify__one_number(p, guess, q, accept, other):
    """one random number for both decisions: after a rejection it is always high"""
    return verify(p, guess, q, accept, accept)


def verify__upside_down(p, guess, q, accept, other):
    """guesses that are accepted with probability q / p instead of p / q"""
    target, drafted = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * target < drafted:
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def top_p__first_ids(c, p):
    """the right number of candidates, but the first of c.ids instead of the most probable ones"""
    return c.keep(np.arange(len(top_p(c, p).ids)))


def accept__forced(state, id):
    """a step for a forced token: a token that is not among the candidates changes nothing"""
    if id in state.drawn.ids:
        accept(state, id)
    else:
        state.mu += state.eta * state.tau


def accept__twice(state, id):
    """a step of twice the size"""
    before = state.mu
    accept(state, id)
    state.mu += state.mu - before


def verify__not_normalised(p, guess, q, accept, other):
    """max(0, p - q) without normalisation: its sum is less than 1"""
    ids = np.array([guess])
    if accept * q.of(ids)[0] < p.of(ids)[0]:
        return guess
    rest = np.cumsum(np.maximum(p.probabilities - q.of(p.ids), 0))
    return int(p.ids[min(int(np.searchsorted(rest, other, side="right")), len(p.ids) - 1)])


def accept__anew(state, id):
    """a mu that starts at tau in every step instead of its last value"""
    before = state.mu
    accept(state, id)
    if id in state.drawn.ids:
        state.mu += state.tau - before


def verify__the_other_way(p, guess, q, accept, other):
    """guesses that are rejected instead of accepted, and accepted instead of rejected: accept if accept < p / q"""
    ids = np.array([guess])
    return guess if accept * q.of(ids)[0] > p.of(ids)[0] else draw(
        p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def story(functions, model):
    """Text of a model whose tokens are chosen with `top_p` and `accept`."""
    from numflow.learn.graders.stories import chosen

    return chosen(model, functions)


def bench(functions):
    """Share of accepted guesses, for pairs of distributions."""
    from numflow.learn.graders.choosing import PAIRS, distribution, trial

    bars = []
    for number, (p, q) in enumerate(PAIRS):
        p, q = distribution(p), distribution(q)
        _, stayed = trial(functions["verify"], p, q, 2000)
        most = float(np.minimum(p.of(q.ids), q.probabilities).sum())
        bars += [(f"pair {number}, yours", 100 * stayed), (f"pair {number}, sum of min(p, q)", 100 * most)]
    return {"what": "accepted guesses", "unit": "%", "bars": bars}
