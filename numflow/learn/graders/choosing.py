"""Grader of sampling functions: top_p and accept on worked examples, verify by a chi-square test of its tokens."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numflow.decoding.mirostat import Mirostat
from numflow.decoding.select import Candidates, draw
from numflow.decoding.speculative import Distribution
from numflow.learn.cases.chance import chi_square, limit
from numflow.learn.cases.verdict import Functions, Verdict, Wrong, raised, right, wrong

WORDS = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
EQUAL = np.array([0.15, 0.2, 0.2, 0.2, 0.1, 0.15])
PAIRS = (([0.1, 0.4, 0.05, 0.25, 0.2], [0.3, 0.1, 0.2, 0.2, 0.2]), ([0.5, 0.5, 0, 0, 0], [0, 0.1, 0.9, 0, 0]),
         ([0.2] * 5, [1, 0, 0, 0, 0]), ([0.6, 0.1, 0.25, 0.05, 0], [0.5, 0.2, 0.3, 0, 0]),
         ([0, 0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0, 0]))
DRAWS = 2000


class _Watched(Mirostat):
    """A Mirostat with a public attribute for its last candidates."""

    @property
    def drawn(self) -> Candidates | None:
        return self._drawn


def grade(functions: Functions, lab: Mapping[str, Any]) -> Verdict:
    """Grade top_p, accept and verify, in this order."""
    cases = [*_top_p_cases(functions), *_accept_cases(functions), *_verify_cases(functions)]
    for number, (name, run) in enumerate(cases, 1):
        try:
            said, evidence = run()
        except Exception as error:
            return raised(name, number, len(cases), error)
        if said:
            return wrong(name, number, len(cases), said, evidence)
    return right(len(cases))


def distribution(p: Any) -> Distribution:
    """The Distribution of probabilities by id."""
    p = np.array(p, float)
    ids = np.flatnonzero(p)
    return Distribution(ids, p[ids] / p.sum())


def trial(verify: Callable, p: Distribution, q: Distribution, draws: int) -> tuple[np.ndarray, float]:
    """Counts of tokens, and the share of accepted guesses."""
    counts, stayed = np.zeros(5, np.int64), 0
    for uniform in np.random.default_rng(1).random((draws, 3)):
        guess = draw(q.ids, q.probabilities, uniform[0])
        found = verify(p, guess, q, uniform[1], uniform[2])
        if not isinstance(found, int | np.integer) or not 0 <= found < 5:
            raise Wrong(f"verify returns {found!r}, which is not one of the tokens 0 .. 4")
        counts[found] += 1
        stayed += found == guess
    return counts, stayed / draws


def _top_p_cases(functions: Functions) -> list[tuple[str, Callable]]:
    rng = np.random.default_rng(2)
    spread = np.exp(3 * rng.standard_normal(400))
    cases = [("top_p-five-words", WORDS, p) for p in (0.39, 0.6, 0.86, 0.97)]
    cases += [("top_p-equals", EQUAL, p) for p in (0.3, 0.55, 0.7)]
    cases += [("top_p-400-words", spread / spread.sum(), p) for p in (0.3, 0.9, 0.999)]

    def run(p, share):
        order = np.argsort(-p, kind="stable")
        expected = np.sort(order[: int(np.searchsorted(np.cumsum(p[order]), share)) + 1]) * 2
        result = functions["top_p"](Candidates(np.arange(len(p)) * 2, np.log(p) + 3), share)
        if not isinstance(result, Candidates):
            raise Wrong(f"top_p should return candidates, as c.keep does, but returns {type(result).__name__}")
        found = np.asarray(result.ids)
        if found.tolist() == expected.tolist():
            return "", None
        if len(p) > 9:
            return f"p {share}: {len(found)} candidates are kept, expected {len(expected)}", found.tolist()
        return f"p {share}: the ids {found.tolist()} are kept, expected {expected.tolist()}", found.tolist()

    return [(f"{name}-{share}", lambda p=p, share=share: run(p, share)) for name, p, share in cases]


def _accept_cases(functions: Functions) -> list[tuple[str, Callable]]:
    five = Candidates(np.arange(5) * 3, np.log(WORDS))

    def run(version, id):
        state = _Watched(version, 1.05, 0.25)
        kept = state.narrow(five)
        before = state.mu
        expected = before
        drawn = kept if version == 2 else five
        indices = np.flatnonzero(drawn.ids == id)
        if len(indices):
            expected -= 0.25 * (-math.log2(drawn.probabilities[indices[0]]) - 1.05)
        functions["accept"](state, id)
        if math.isclose(state.mu, expected, rel_tol=1e-6):
            return "", None
        return (f"tau 1.05, eta 0.25, token {id} of {drawn.ids.tolist()}: mu goes from {before:.6g} to {state.mu:.6g}, "
                f"expected {expected:.6g}"), float(state.mu)

    return [(f"accept-{version}-{id}", lambda version=version, id=id: run(version, id))
            for version, id in ((2, 3), (2, 9), (1, 3), (1, 6), (2, 0))]


def _verify_cases(functions: Functions) -> list[tuple[str, Callable]]:
    def run(p, q):
        counts, accepted = trial(functions["verify"], distribution(p), distribution(q), DRAWS)
        evidence = [counts.tolist(), accepted]
        never = np.flatnonzero((np.array(p) == 0) & (counts > 0))
        if len(never):
            return f"token {never[0]} came {counts[never[0]]} times of {DRAWS}, but its probability in p is 0", evidence
        statistic, freedom = chi_square(counts, np.array(p) / np.sum(p))
        if statistic > limit(max(freedom, 1)):
            worst = int(np.argmax(np.abs(counts - np.array(p) * DRAWS)))
            return (f"token {worst} came {counts[worst]} times of {DRAWS}, expected {p[worst] * DRAWS:.0f} (chi-square "
                    f"{statistic:.0f}, at most {limit(max(freedom, 1)):.0f})"), evidence
        most = float(np.minimum(p, q).sum())
        if abs(accepted - most) > 0.04:
            return f"{accepted:.0%} of the guesses are accepted, expected {most:.0%}, the sum of min(p, q)", evidence
        return "", None

    return [(f"verify-{number}", lambda p=p, q=q: run(p, q)) for number, (p, q) in enumerate(PAIRS)]
