"""Generated English text: short stories, sums, and questions with answers."""

import random

from numflow.learn.models.grammar import Writer, pattern

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = {
    "name": ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Juna", "Kim", "Leo", "Mia", "Noah"],
    "animal": ["cat", "dog", "duck", "fox", "goat", "hen", "mouse", "pig", "rabbit", "bird", "frog", "horse"],
    "thing": ["ball", "boat", "book", "box", "cup", "drum", "hat", "kite", "lamp", "bell"],
    "colour": ["red", "blue", "green", "yellow", "white", "black"],
    "place": ["in the garden", "by the river", "in the kitchen", "under a tree", "on the hill", "at the market",
              "near the old house", "behind the barn"],
    "mood": ["happy", "proud", "calm", "glad"],
    "fruit": ["apples", "pears", "plums", "nuts", "cherries"],
    "weather": ["It was a warm day", "It was a cold day", "The sun was shining", "It was raining"],
    "start": ["One day", "One morning", "One evening", "Once upon a time"],
    "n": NUMBERS[1:6], "m": NUMBERS[1:6], "sum": NUMBERS, "less": NUMBERS,
}
PLOTS = (
    "{start} {name.a} found a {colour} {thing} {place}. \"Whose {thing} is this?\" asked {name.a}. \"It is mine,\" "
    "said {name.b}. {name.a} gave the {colour} {thing} back to {name.b}, and {name.b} was {mood}.",
    "{name.a} had a {colour} {thing}. {name.a} lost it {place}. The {animal} of {name.b} saw the {thing} and brought "
    "it back. \"Thank you,\" said {name.a} to the {animal}. {name.a} and {name.b} were {mood}.",
    "Once upon a time there was a {animal.a} who lived {place}. The {animal.a} wanted to be a {animal.b}. \"You are a "
    "good {animal.a},\" said {name.a}. So the {animal.a} stayed a {animal.a} and was {mood}.",
    "{name.a} had {n} {fruit}. {name.b} gave {name.a} {m} more. Now {name.a} had {sum} {fruit}. {name.a} ate one "
    "{place}, and then there were {less} {fruit}.",
    "{weather}. {name.a} and {name.b} went for a walk. They met a {animal} {place}. The {animal} was hungry, so "
    "{name.a} gave it some {fruit}. \"You are kind,\" said {name.b} to {name.a}. The {animal} was {mood}.",
    "{start} a {animal.a} and a {animal.b} met {place}. \"I can run fast,\" said the {animal.a}. \"I can jump high,\" "
    "said the {animal.b}. They played together until the evening, and both were {mood}.",
    "{name.a} wanted to paint a {thing}. \"Which colour do you like?\" asked {name.b}. \"I like {colour},\" said "
    "{name.a}. So they painted the {thing} {colour} and put it {place}.",
    "{weather}. {name.a} was looking for a {thing}. It was not {place.a}. It was not {place.b}. At last {name.b} found "
    "the {thing} {place.c}, and {name.a} was {mood}.",
    "Once upon a time there was a little {animal.a} {place}. It was afraid of the {animal.b}. But the {animal.b} was "
    "kind and gave it some {fruit}. From that day on they were friends.",
    "{start} {name.a} and {name.b} built a {thing} {place}. {name.a} made it {colour}. Then a {animal} came and sat "
    "on it. {name.a} and {name.b} laughed, and the {animal} was {mood}.",
)
PATTERNS = [pattern(plot, WORDS) for plot in PLOTS]
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London",
            "Greece": "Athens", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo", "Poland": "Warsaw"}
OPPOSITES = {"big": "small", "hot": "cold", "old": "young", "fast": "slow", "day": "night", "good": "bad",
             "high": "low", "wet": "dry", "full": "empty", "light": "dark"}
SOUNDS = {"cat": "meow", "dog": "woof", "duck": "quack", "pig": "oink", "cow": "moo", "sheep": "baa"}
# (wordings of a question, answer)
FACTS = (
    (("Why is the sky blue?", "What makes the sky blue?"),
     "The light of the sun is made of all colours. Air scatters blue light most, so blue comes to us from the "
     "whole sky."),
    (("Why is the sunset red?", "Why is the sun red in the evening?"),
     "In the evening the light has a long way through the air. The blue is scattered away, and the red is left."),
    (("Why does it rain?", "Where does rain come from?"),
     "Water rises from the sea into the air. It cools and becomes a cloud. When the drops are heavy, they fall as "
     "rain."),
    (("What is the sun?", "Tell me about the sun."), "The sun is a star. It gives us light and warmth."),
    (("What is the moon?", "Tell me about the moon."), "The moon is a ball of rock. It goes around the earth once "
    "a month."),
    (("Why is there day and night?", "Why does it get dark at night?"),
     "The earth turns once a day. Where we face the sun it is day, and where we do not it is night."),
    (("Why is the sea salty?", "Where does the salt of the sea come from?"),
     "Rivers carry salt from the rocks into the sea. The water rises again, and the salt stays."),
    (("Why do leaves fall in autumn?", "Why do trees lose their leaves?"),
     "In winter there is little light. A tree saves water without its leaves, and grows new ones in spring."),
    (("Why are leaves green?", "What makes leaves green?"),
     "Leaves use red and blue light to make sugar. The green light is left, and that is what we see."),
    (("How do birds fly?", "Why can birds fly?"), "A bird pushes air down with its wings, and so the air pushes "
    "the bird up."),
    (("Why is ice slippery?", "Why do we slip on ice?"), "There is a thin film of water on the ice, and we slide "
    "on it."),
    (("How many days are in a week?", "How long is a week?"), "A week has seven days."),
    (("How many months are in a year?", "How long is a year?"), "A year has twelve months."),
    (("How many legs does a spider have?", "How many legs has a spider?"), "A spider has eight legs."),
    (("What do bees make?", "What do we get from bees?"), "Bees make honey."),
    (("What is bread made of?", "How is bread made?"), "Bread is made of flour and water, and then it is baked."),
    (("What is a language model?", "How does a language model work?"),
     "A language model reads some words and guesses the next one. Then it reads that word too, and guesses again."),
    (("What is a token?", "What are tokens?"), "A token is a piece of text: a word, or a part of one."),
    (("What is attention?", "How does attention work?"),
     "With attention a token looks back at the tokens before it, and takes more from those that matter."),
    (("What is a computer?", "Tell me about computers."), "A computer is a machine that follows instructions, very "
    "fast."),
    (("Who are you?", "What are you?", "What is your name?"),
     "I am a very small language model that comes with numflow. I know a few stories and a few facts."),
    (("Hello!", "Hi!", "Hello", "Good morning!"), "Hello! Ask me something small, or let me tell you a story."),
    (("Thank you!", "Thanks!"), "You are welcome."),
    (("What can you do?", "How can you help me?", "What do you know?"),
     "I can tell a short story, add small numbers, and answer a few questions."),
    (("What do cows drink?", "What do cows eat?"), "Cows eat grass and drink water."),
    (("Where do fish live?", "Where does a fish live?"), "Fish live in water."),
    (("What is snow?", "Where does snow come from?"), "Snow is water that froze in a cold cloud."),
    (("What is a rainbow?", "How does a rainbow come about?"),
     "Drops of rain break the light of the sun into its colours, and we see them as a bow."),
    (("Why do we sleep?", "Why do I have to sleep?"), "In sleep the body rests, and the mind keeps what it has "
    "learned."),
    (("What is wind?", "Where does wind come from?"), "Wind is air that moves from where it presses more to where "
    "it presses less."),
)
SHARES = {"story": 40, "told": 12, "fact": 26, "sum": 10, "capital": 5, "opposite": 4, "sound": 3}
USER, ASSISTANT = "<|user|>", "<|assistant|>"


def document(rng: random.Random) -> tuple[str, float]:
    """A random text and its bits of information. A conversation has the marks USER and ASSISTANT."""
    w = Writer(rng)
    kind = w.weighted(SHARES)
    text = {"story": _story, "told": _told, "fact": _fact, "sum": _sum, "capital": _capital, "opposite": _opposite,
            "sound": _sound}[kind](w)
    return text if isinstance(text, str) else _asked(w, *text), w.bits


def is_story(text: str) -> bool:
    """Whether a text is a consistent story: equal slots have equal words, other slots differ, and sums are right."""
    for plot in PATTERNS:
        if found := plot.fullmatch(text.strip()):
            words = {key: word.lower() for key, word in found.groupdict().items()}
            if "n" in words:
                n, m, total, less = (NUMBERS.index(words.pop(key)) for key in ("n", "m", "sum", "less"))
                return n + m == total == less + 1 and len(set(words.values())) == len(words)
            return len(set(words.values())) == len(words)
    return False


def _asked(w: Writer, question: str, answer: str) -> str:
    """A question and its answer as a conversation; one time in six only the answer."""
    if w.weighted({True: 5, False: 1}):
        return f"{USER}{question}{ASSISTANT}{answer}"
    return answer


def _story(w: Writer) -> str:
    return w.fill(w.choose(PLOTS), WORDS, _derived)


def _told(w: Writer) -> str:
    """A conversation in which the user asks for a story."""
    return f"{USER}{w.choose(('Tell me a story.', 'Please tell me a story.', 'Tell a story!'))}{ASSISTANT}{_story(w)}"


def _derived(slot: str, filled: dict) -> str | None:
    if slot in ("sum", "less"):
        return NUMBERS[NUMBERS.index(filled["n"]) + NUMBERS.index(filled["m"]) - (slot == "less")]
    return None


def _fact(w: Writer) -> tuple[str, str]:
    questions, answer = w.choose(FACTS)
    return w.choose(questions), answer


def _sum(w: Writer) -> tuple[str, str]:
    n, m = w.choose(range(6)), w.choose(range(6))
    if w.choose((True, False)):
        a, b, total = NUMBERS[n], NUMBERS[m], NUMBERS[n + m]
        return f"What is {a} plus {b}?", f"{a.capitalize()} plus {b} is {total}."
    a, b, rest = NUMBERS[n + m], NUMBERS[m], NUMBERS[n]
    return f"What is {a} minus {b}?", f"{a.capitalize()} minus {b} is {rest}."


def _capital(w: Writer) -> tuple[str, str]:
    country = w.choose(list(CAPITALS))
    return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."


def _opposite(w: Writer) -> tuple[str, str]:
    pairs = OPPOSITES | {b: a for a, b in OPPOSITES.items()}
    word = w.choose(list(pairs))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {pairs[word]}."


def _sound(w: Writer) -> tuple[str, str]:
    animal = w.choose(list(SOUNDS))
    return f"What does a {animal} say?", f"A {animal} says {SOUNDS[animal]}."
