"""Assignment of stored tensors to modules: a spec's name tables tried on a checkpoint's tensors."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product

from numflow.errors import SpecError, did_you_mean
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.spec.reader import Spec
from numflow.spec.resolve import Resolved

# Ends of tensor names by role; the empty one is for patterns that are whole names already.
SUFFIXES = {"weight": (".weight", ".gamma", ""), "bias": (".bias", ".beta", "_bias")}
STACK_PREFIX = {"": "", "encoder": "enc.", "decoder": "dec.", "draft": "draft."}

_EXPRESSION = re.compile(r"\{(?!(?:layer|expert|language|owner|use)\})([^{}]+)\}")  # in a pattern, of its layer
_LAYER = re.compile(r"\blayer\b")
_OWNER, _TURN = "{owner}", "{use}"  # in patterns of what several layers have together
_BEYOND = 16  # blocks behind the last layer that a pattern stands for


def _matched(pattern: str, suffixes: Iterable[str], name: str) -> tuple[str | None, str | None] | None:
    """Numbers of the layer and the expert of a name that a pattern stands for."""
    numbered = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)", 1).replace(r"\{layer\}", r"(?P=layer)")
    numbered = numbered.replace(r"\{expert\}", r"(?P<expert>\d+)", 1)
    found = re.fullmatch(f"{numbered}(?:{'|'.join(map(re.escape, suffixes))})", name)
    return found and (found.groupdict().get("layer"), found.groupdict().get("expert"))


class TensorNames:
    """Finds tensors by standard name and remembers which ones were used."""

    def __init__(self, spec: Spec, checkpoint: Checkpoint):
        self.spec, self.checkpoint = spec, checkpoint
        naming = spec.section(checkpoint.naming)
        self.patterns = {**spec.section("tensors"), **naming.get("tensors", {})}
        if not self.patterns:
            raise SpecError(f"{spec.path}: no tensor names for {checkpoint.naming!r} checkpoints "
                            f"(a [{checkpoint.naming}.tensors] table)")
        prefixes = naming.get("prefix", spec.table.get("prefix", []))
        self.prefixes = [*([prefixes] if isinstance(prefixes, str) else prefixes), ""]
        self.ignored = [*spec.table.get("ignore", []), *naming.get("ignore", [])]
        self.draft_layer = naming.get("draft_layer", "layers.{layer}")
        self.used: set[str] = set()
        # What stands for further words in braces; nothing does before a configuration is read.
        self.meant: Callable[[int | None, str], Mapping[str, int | str]] = lambda layer, stack: {}

    def candidates(self, module: str, role: str, layer: int | None, stack: str,
                   expert: int | None = None) -> Iterator[str]:
        """Every stored name that `module` could have, best first."""
        patterns = self.patterns.get(STACK_PREFIX[stack] + module, self.patterns.get(module, []))
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if stack == "draft":
                pattern = pattern.replace("layers.{layer}", self.draft_layer)
            expressions = _EXPRESSION.findall(pattern)
            per_layer = "{layer}" in pattern or any(_LAYER.search(text) for text in expressions)
            per_expert = "{expert}" in pattern
            if not pattern or (per_layer and layer is None) or per_expert != (expert is not None):
                continue
            for text in expressions:
                pattern = pattern.replace(f"{{{text}}}", self._value(text, layer))
            base = pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            if "{" in base:
                for word, meant in self.meant(layer, stack).items():
                    base = base.replace(word, str(meant))
                if "{" in base:
                    continue
            for prefix in self.prefixes:
                for suffix in SUFFIXES[role]:
                    yield prefix + base + suffix

    def _value(self, text: str, layer: int | None) -> str:
        """An expression in a pattern: "layer // 2" in layer 5 is 2."""
        return str(self._resolved.evaluate(f"{self.checkpoint.naming}.tensors", text, layer))

    @cached_property
    def _resolved(self) -> Resolved:
        return Resolved(self.spec, self.checkpoint.config, self.checkpoint.naming, self.has)

    def renamed(self, name: str) -> str | None:
        """The stored name of what has another one of its module's names, which comes without a prefix; None for no such
        tensor."""
        for module, role, layer, expert in self.modules_of(name):
            patterns = self.patterns[module]
            for stored in self.candidates(module, role, layer, "", expert) if isinstance(patterns, list) else ():
                if stored in self.checkpoint.tensors and not self._of_others(stored, name, role, layer, expert):
                    return stored
        return None

    def modules_of(self, name: str) -> Iterator[tuple[str, str, int | None, int | None]]:
        """Every module that a name without a prefix may be of, with role, layer and expert."""
        for module, patterns in self.patterns.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                for role, suffixes in SUFFIXES.items():
                    if pattern and (found := _matched(pattern, suffixes, name)):
                        layer, expert = (None if number is None else int(number) for number in found)
                        yield module, role, layer, expert
        yield from self._expressed.get(name, ())

    @cached_property
    def _expressed(self) -> Mapping[str, Sequence[tuple[str, str, int | None, int | None]]]:
        """Modules whose patterns have expressions, by their names without a prefix."""
        own = [module for module, patterns in self.patterns.items()
               if any(map(_EXPRESSION.search, [patterns] if isinstance(patterns, str) else patterns))]
        layers = range(self._resolved.option("stack", "layers")) if own else ()
        found: dict[str, list[tuple[str, str, int | None, int | None]]] = {}
        for module, role, layer in product(own, SUFFIXES, layers):
            for name in self.candidates(module, role, layer, ""):
                short = next(name.removeprefix(prefix) for prefix in self.prefixes if name.startswith(prefix))
                found.setdefault(short, []).append((module, role, layer, None))
        return found

    def in_turns(self, module: str) -> tuple[bool, bool]:
        """Whether several layers may have a module together, and whether it is one of as many as there are turns."""
        patterns = self.patterns.get(module, ())
        return any(_OWNER in pattern for pattern in patterns), any(_TURN in pattern for pattern in patterns)

    def _of_others(self, stored: str, name: str, role: str, layer: int | None, expert: int | None) -> bool:
        """Whether a module has the first of two names and not the second, which comes without a prefix."""
        forms = {prefix + name for prefix in self.prefixes}
        every = ({*self.candidates(module, role, layer, "", expert)} for module in self.patterns)
        return any(stored in names and not forms & names for names in every)

    def find(self, module: str, role: str = "weight", layer: int | None = None, stack: str = "",
             expert: int | None = None) -> Tensor | None:
        """The tensor of a module, marked as used; None if the file has none."""
        for name in self.candidates(module, role, layer, stack, expert):
            if name in self.checkpoint.tensors and not self._of_another(name, module, role, layer, stack, expert):
                self.used.add(name)
                return self.checkpoint.tensors[name]
        return None

    def has(self, name: str, layer: int | None = None, stack: str = "") -> bool:
        """Whether "attn_q.bias" is there, without marking it; a per-layer module is looked up in layer 0 by default."""
        module, _, role = name.rpartition(".")
        layer = 0 if layer is None else layer
        return any(candidate in self.checkpoint.tensors
                   and not self._of_another(candidate, module, role, layer, stack, expert)
                   for expert in (None, 0) for candidate in self.candidates(module, role, layer, stack, expert))

    def _of_another(self, name: str, module: str, role: str, layer: int | None, stack: str,
                    expert: int | None) -> bool:
        """Whether a bias stands beside a matrix that another module has."""
        beside = f"{name.removesuffix('.bias')}.weight"
        if role != "bias" or beside not in self.checkpoint.tensors:
            return False
        weights = self.candidates(module, "weight", layer, stack, expert)
        return next((weight for weight in weights if weight in self.checkpoint.tensors), beside) != beside

    def need(self, module: str, role: str = "weight", layer: int | None = None, stack: str = "",
             expert: int | None = None) -> Tensor:
        """As find.

        Raises:
            SpecError: the tensor is missing; says under which names it was looked for.
        """
        tensor = self.find(module, role, layer, stack, expert)
        if tensor is not None:
            return tensor
        tried = list(self.candidates(module, role, layer, stack, expert))
        where = f"{self.checkpoint.path} and spec {self.spec.name!r}"
        if not tried:
            raise SpecError(f"{where}: the spec has no name for tensor {module!r} of {self.checkpoint.naming!r} files")
        near = did_you_mean(tried[0], [n for n in self.checkpoint.tensors if n not in self.used][:2000])
        near = near if near.startswith("; did you mean") else ""
        raise SpecError(f"{where}: missing tensor {module}.{role}, looked for {tried[0]!r}"
                        f"{' and ' + str(len(tried) - 1) + ' other names' if len(tried) > 1 else ''}{near}")

    def left_over(self, layers: int) -> list[str]:
        """Tensors with values that no part of the network uses and no `ignore` pattern names; {layers} in one is their
        number, and {beyond} that or a number above it."""
        ignored = [pattern.replace("{layers}", str(layers)).replace("{beyond}", str(number)) for pattern in self.ignored
                   for number in range(layers, layers + (_BEYOND if "{beyond}" in pattern else 1))]
        return [name for name, tensor in self.checkpoint.tensors.items() if name not in self.used
                and 0 not in tensor.shape and not any(fnmatchcase(name, pattern) for pattern in ignored)]
