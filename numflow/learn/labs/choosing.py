"""Lab 12: choosing tokens.

`top_p` keeps the fewest candidates, most probable first, that together hold at least p of the probability (nucleus
sampling). c.ids are the candidates' numbers, rising; c.probabilities sum to 1. c.keep(places) makes the result of the
places that are kept, in any order, or of a mask. Among equally probable ones the lower id goes first.

`accept` is a step of Mirostat, which keeps the surprise of a text near `state.tau` bits: tokens more surprising than
`state.mu` bits are not drawn, and after each token mu moves against the error,

    surprise = -log2 p(token)          mu <- mu - eta * (surprise - tau)

state.drawn are the candidates (as above) that the token was drawn from, and give p. A token that is not among them was
forced by somebody else and changes nothing.

`verify` makes guesses of a small model safe. A guess was drawn from q; the text must be distributed as p. The guess
stays with the probability min(1, p(guess) / q(guess)); else another token is drawn from what p has more than q,
max(0, p - q), normalised. p and q have `ids` and `probabilities`, and p.of(array of ids) are probabilities of any ids.
`accept` and `other` are random numbers between 0 and 1, one for each of the two decisions. `draw(ids, weights, other)`
(given) is the id that a random number chooses; the weights need not sum to 1.

    numflow learn check 12       numflow learn hint 12       numflow learn bench 12
"""

import math

import numpy as np

from numflow.decoding.select import draw

LAB = {
    "number": 12, "title": "Choosing tokens", "minutes": 60, "functions": ["top_p", "accept", "verify"],
    "grader": "choosing",
    "hints": [
        "Draw p and q as two rows of bars on top of each other. Where q is higher, guesses are refused; where p is "
        "higher, they are missing. Both areas are the same.",
        "top_p: the candidate that crosses p is kept too. verify: draw(ids, weights, uniform) draws, and the weights "
        "need not be normalised.",
        "order = np.argsort(-c.probabilities, kind=\"stable\"); held = np.cumsum(...); count = np.searchsorted(held, "
        "p) + 1. verify: if accept * q(guess) < p(guess) return guess; return draw(p.ids, np.maximum(p.probabilities - "
        "q.of(p.ids), 0), other)."],
}


def top_p(c, p):
    """Candidates, p 0 .. 1 -> the candidates that are kept."""
    order = np.argsort(-c.probabilities, kind="stable")
    held = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(held, p)) + 1])


def accept(state, id):
    """Change state.mu after token `id`; state.tau, state.eta and state.drawn are there."""
    places = np.flatnonzero(state.drawn.ids == id)
    if len(places):
        surprise = -math.log2(state.drawn.probabilities[places[0]])
        state.mu -= state.eta * (surprise - state.tau)


def verify(p, guess, q, accept, other):
    """Distributions p and q, a guess drawn from q, two uniform numbers -> a token distributed as p."""
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * had < wanted:
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def top_p__too_few(c, p):
    """a set without the candidate that crosses p: it holds less than p"""
    order = np.argsort(-c.probabilities, kind="stable")
    held = np.cumsum(c.probabilities[order])
    return c.keep(order[: max(int(np.searchsorted(held, p)), 1)])


def top_p__none(c, p):
    """a set without the candidate that crosses p, which may even be empty"""
    order = np.argsort(-c.probabilities, kind="stable")
    return c.keep(order[: int(np.searchsorted(np.cumsum(c.probabilities[order]), p))])


def top_p__too_many(c, p):
    """a set with one candidate more than it takes to hold p"""
    order = np.argsort(-c.probabilities, kind="stable")
    held = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(held, p)) + 2])


def top_p__rarest(c, p):
    """the least probable candidates first"""
    order = np.argsort(c.probabilities, kind="stable")
    held = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(held, p)) + 1])


def top_p__by_id(c, p):
    """candidates in the order of their ids: they are to be sorted by probability"""
    held = np.cumsum(c.probabilities)
    return c.keep(np.arange(min(int(np.searchsorted(held, p)) + 1, len(c.ids))))


def top_p__threshold(c, p):
    """candidates that are at least p times as probable as the best one, which is min-p"""
    return c.keep(c.probabilities >= p * c.probabilities.max())


def top_p__last_of_equal(c, p):
    """the higher id first among equally probable candidates"""
    order = np.argsort(c.probabilities, kind="stable")[::-1]
    held = np.cumsum(c.probabilities[order])
    return c.keep(order[: int(np.searchsorted(held, p)) + 1])


def accept__wrong_way(state, id):
    """a mu that moves with the error and not against it"""
    mu = state.mu
    accept(state, id)
    state.mu = 2 * mu - state.mu


def accept__nats(state, id):
    """a surprise in nats: log2 makes it bits"""
    places = np.flatnonzero(state.drawn.ids == id)
    if len(places):
        state.mu -= state.eta * (-math.log(state.drawn.probabilities[places[0]]) - state.tau)


def accept__no_eta(state, id):
    """a step of the whole error: eta is left out"""
    places = np.flatnonzero(state.drawn.ids == id)
    if len(places):
        state.mu -= -math.log2(state.drawn.probabilities[places[0]]) - state.tau


def accept__from_mu(state, id):
    """an error against mu in place of tau"""
    places = np.flatnonzero(state.drawn.ids == id)
    if len(places):
        state.mu -= state.eta * (-math.log2(state.drawn.probabilities[places[0]]) - state.mu)


def accept__id_as_place(state, id):
    """an id that is taken for a place among the candidates"""
    if id < len(state.drawn.ids):
        state.mu -= state.eta * (-math.log2(state.drawn.probabilities[id]) - state.tau)


def verify__always(p, guess, q, accept, other):
    """guesses that always stay: the text is distributed as q"""
    return guess


def verify__never(p, guess, q, accept, other):
    """guesses that never stay: the text is right, and nothing is gained"""
    return draw(p.ids, p.probabilities, other)


def verify__by_p_alone(p, guess, q, accept, other):
    """guesses that stay with the probability p(guess): q(guess) is left out"""
    if accept < float(p.of(np.array([guess]))[0]):
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def verify__from_p(p, guess, q, accept, other):
    """another token that is drawn from p: it is to be drawn from max(0, p - q)"""
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    return guess if accept * had < wanted else draw(p.ids, p.probabilities, other)


def verify__from_q(p, guess, q, accept, other):
    """another token that is drawn from max(0, q - p): it is to be drawn from what p has more"""
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * had < wanted:
        return guess
    weights = np.maximum(q.of(p.ids) - p.probabilities, 0)
    return draw(p.ids, weights, other) if weights.any() else guess


def verify__rest_alone(p, guess, q, accept, other):
    """guesses that never stay, and tokens that are drawn from max(0, p - q) alone"""
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def verify__distance(p, guess, q, accept, other):
    """another token that is drawn from |p - q|: where q has more nothing is to be drawn"""
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    return guess if accept * had < wanted else draw(p.ids, np.abs(p.probabilities - q.of(p.ids)), other)


def verify__one_number(p, guess, q, accept, other):
    """one random number for both decisions: those that refuse are the high ones"""
    return verify(p, guess, q, accept, accept)


def verify__upside_down(p, guess, q, accept, other):
    """guesses that stay with the probability q / p in place of p / q"""
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * wanted < had:
        return guess
    return draw(p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def top_p__first_places(c, p):
    """as many candidates as it takes, but the first of c.ids in place of the most probable ones"""
    return c.keep(np.arange(len(top_p(c, p).ids)))


def accept__forced(state, id):
    """a step for a token that was forced: one that is not among the candidates changes nothing"""
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
    """max(0, p - q) that is not normalised: its sum is less than 1"""
    at = np.array([guess])
    if accept * q.of(at)[0] < p.of(at)[0]:
        return guess
    rest = np.cumsum(np.maximum(p.probabilities - q.of(p.ids), 0))
    return int(p.ids[min(int(np.searchsorted(rest, other, side="right")), len(p.ids) - 1)])


def accept__anew(state, id):
    """a mu that begins anew at tau: it moves from where it is"""
    before = state.mu
    accept(state, id)
    if id in state.drawn.ids:
        state.mu += state.tau - before


def verify__the_other_way(p, guess, q, accept, other):
    """guesses that stay where they should go, and go where they should stay: accept < p / q is to stay"""
    at = np.array([guess])
    return guess if accept * q.of(at)[0] > p.of(at)[0] else draw(
        p.ids, np.maximum(p.probabilities - q.of(p.ids), 0), other)


def story(functions, model):
    """The text of a model whose tokens `top_p` and `accept` choose."""
    from numflow.learn.graders.stories import chosen

    return chosen(model, functions)


def bench(functions):
    """The share of guesses that stay, over pairs of distributions that are more and more alike."""
    from numflow.learn.graders.choosing import PAIRS, distribution, trial

    bars = []
    for number, (p, q) in enumerate(PAIRS):
        p, q = distribution(p), distribution(q)
        _, stayed = trial(functions["verify"], p, q, 2000)
        most = float(np.minimum(p.of(q.ids), q.probabilities).sum())
        bars += [(f"pair {number}, yours", 100 * stayed), (f"pair {number}, sum of min(p, q)", 100 * most)]
    return {"what": "guesses that stay", "unit": "%", "bars": bars}
