"""Generated pairs of English and German sentences, with correct genders, cases and word order."""

import random
from typing import NamedTuple

from numflow.learn.models.grammar import Writer


class Noun(NamedTuple):
    """A noun: English, German, gender (m, f, n)."""

    english: str
    german: str
    gender: str


LIVING = [Noun(*row.split()) for row in (
    "cat Katze f", "dog Hund m", "bird Vogel m", "horse Pferd n", "mouse Maus f", "duck Ente f", "child Kind n",
    "girl Mädchen n", "man Mann m", "woman Frau f", "teacher Lehrerin f", "fox Fuchs m")]
THINGS = [Noun(*row.split()) for row in (
    "ball Ball m", "book Buch n", "lamp Lampe f", "box Kiste f", "hat Hut m", "boat Boot n", "letter Brief m",
    "flower Blume f", "house Haus n", "chair Stuhl m", "cup Tasse f", "bread Brot n")]
PLACES = [Noun(*row.split()) for row in (
    "garden Garten m", "kitchen Küche f", "school Schule f", "house Haus n", "tree Baum m", "bridge Brücke f",
    "table Tisch m", "river Fluss m")]
ADJECTIVES = [tuple(row.split()) for row in (
    "small klein", "big groß", "red rot", "green grün", "blue blau", "old alt", "new neu", "white weiß")]
RESTS = [tuple(row.split()) for row in ("sleeps schläft", "sits sitzt", "sings singt", "waits wartet", "plays spielt")]
ACTS = [tuple(row.split()) for row in (
    "sees sieht", "finds findet", "takes nimmt", "buys kauft", "loves liebt", "brings bringt")]
BARE = {"sees": "see", "finds": "find", "takes": "take", "buys": "buy", "loves": "love", "brings": "bring",
        "sleeps": "sleep", "sits": "sit", "sings": "sing", "waits": "wait", "plays": "play"}
WHEN = (("today", "heute"), ("now", "jetzt"), ("in the evening", "am Abend"), ("often", "oft"))
WHERE = (("in", "in"), ("near", "neben"), ("behind", "hinter"), ("under", "unter"))
FIXED = (("Good morning!", "Guten Morgen!"), ("Good night!", "Gute Nacht!"), ("Thank you very much.", "Vielen Dank."),
         ("How are you?", "Wie geht es dir?"), ("I am hungry.", "Ich habe Hunger."), ("Hello!", "Hallo!"),
         ("What is your name?", "Wie heißt du?"), ("The sky is blue.", "Der Himmel ist blau."),
         ("I do not know.", "Ich weiß es nicht."), ("See you tomorrow!", "Bis morgen!"))
# Articles of m, f, n by case.
THE = {"nominative": ("der", "die", "das"), "accusative": ("den", "die", "das"), "dative": ("dem", "der", "dem")}
A = {"nominative": ("ein", "eine", "ein"), "accusative": ("einen", "eine", "ein"),
     "dative": ("einem", "einer", "einem")}
SHARES = {"rest": 28, "act": 30, "is": 10, "where": 8, "asks": 8, "not": 10, "fixed": 6}


def pair(rng: random.Random) -> tuple[str, str]:
    """A random English sentence and its German translation."""
    w = Writer(rng)
    made = {"rest": _rest, "act": _act, "is": _is, "where": _where, "asks": _asks, "not": _not,
            "fixed": lambda w: w.choose(FIXED)}[w.weighted(SHARES)]
    english, german = made(w)
    return english[0].upper() + english[1:], german[0].upper() + german[1:]


def phrase(noun: Noun, case: str, definite: bool, adjective: tuple[str, str] | None) -> tuple[str, str]:
    """"the small dog", "den kleinen Hund": article, adjective and noun in a case."""
    article = (THE if definite else A)[case]["mfn".index(noun.gender)]
    if adjective is None:
        return f"{'the' if definite else _a(noun.english)} {noun.english}", f"{article} {noun.german}"
    english, stem = adjective
    return (f"{'the' if definite else _a(english)} {english} {noun.english}",
            f"{article} {stem}{_ending(noun.gender, case, definite)} {noun.german}")


def _a(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _ending(gender: str, case: str, definite: bool) -> str:
    """Ending of an adjective: weak declension after "der", mixed declension after "ein"."""
    if case == "dative" or (case == "accusative" and gender == "m"):
        return "en"
    return "e" if definite or gender == "f" else {"m": "er", "n": "es"}[gender]


def _noun_phrase(w: Writer, nouns, case: str, definite: bool | None = None) -> tuple[str, str]:
    definite = w.weighted({True: 2, False: 1}) if definite is None else definite
    adjective = w.choose(ADJECTIVES) if w.choose((True, False)) else None
    return phrase(w.choose(nouns), case, definite, adjective)


def _place(w: Writer) -> tuple[str, str]:
    (english, german), noun = w.choose(WHERE), w.choose(PLACES)
    place = phrase(noun, "dative", True, None)
    german = f"{german} {place[1]}".replace("in dem ", "im ")
    return f"{english} {place[0]}", german


def _rest(w: Writer) -> tuple[str, str]:
    """"The cat sleeps under the table". After a leading time the German verb comes before its subject."""
    subject, verb, place = _noun_phrase(w, LIVING, "nominative"), w.choose(RESTS), _place(w)
    if w.weighted({True: 1, False: 2}):
        time = w.choose(WHEN)
        return (f"{time[0]} {subject[0]} {verb[0]} {place[0]}.", f"{time[1]} {verb[1]} {subject[1]} {place[1]}.")
    return f"{subject[0]} {verb[0]} {place[0]}.", f"{subject[1]} {verb[1]} {place[1]}."


def _act(w: Writer) -> tuple[str, str]:
    subject, verb = _noun_phrase(w, LIVING, "nominative"), w.choose(ACTS)
    object_ = _noun_phrase(w, THINGS, "accusative")
    if w.weighted({True: 1, False: 2}):
        time = w.choose(WHEN)
        return (f"{time[0]} {subject[0]} {verb[0]} {object_[0]}.", f"{time[1]} {verb[1]} {subject[1]} {object_[1]}.")
    return f"{subject[0]} {verb[0]} {object_[0]}.", f"{subject[1]} {verb[1]} {object_[1]}."


def _is(w: Writer) -> tuple[str, str]:
    noun, adjective = phrase(w.choose(THINGS), "nominative", True, None), w.choose(ADJECTIVES)
    return f"{noun[0]} is {adjective[0]}.", f"{noun[1]} ist {adjective[1]}."


def _where(w: Writer) -> tuple[str, str]:
    noun = phrase(w.choose(THINGS + LIVING), "nominative", True, None)
    if w.choose((True, False)):
        return f"where is {noun[0]}?", f"wo ist {noun[1]}?"
    place = _place(w)
    return f"{noun[0]} is {place[0]}.", f"{noun[1]} ist {place[1]}."


def _asks(w: Writer) -> tuple[str, str]:
    subject, verb = _noun_phrase(w, LIVING, "nominative", True), w.choose(ACTS)
    object_ = _noun_phrase(w, THINGS, "accusative")
    return f"does {subject[0]} {BARE[verb[0]]} {object_[0]}?", f"{verb[1]} {subject[1]} {object_[1]}?"


def _not(w: Writer) -> tuple[str, str]:
    subject = _noun_phrase(w, LIVING, "nominative", True)
    if w.choose((True, False)):
        verb = w.choose(RESTS)
        return f"{subject[0]} does not {BARE[verb[0]]}.", f"{subject[1]} {verb[1]} nicht."
    verb, object_ = w.choose(ACTS), phrase(w.choose(THINGS), "accusative", True, None)
    return (f"{subject[0]} does not {BARE[verb[0]]} {object_[0]}.", f"{subject[1]} {verb[1]} {object_[1]} nicht.")
