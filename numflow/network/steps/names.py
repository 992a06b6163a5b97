"""Assignment of stored tensors to modules, by a spec's tables of tensor names."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import product

from numflow.errors import SpecError, did_you_mean
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.spec.reader import Spec
from numflow.spec.resolve import Resolved

# Suffixes of tensor names by role; the empty suffix is for patterns that are complete names.
SUFFIXES = {"weight": (".weight", ".gamma", ""), "bias": (".bias", ".beta", "_bias")}
STACK_PREFIX = {"": "", "encoder": "enc.", "decoder": "dec.", "draft": "draft."}

_EXPRESSION = re.compile(r"\{(?!(?:layer|expert|language|owner|use)\})([^{}]+)\}")  # an expression in a pattern
_LAYER = re.compile(r"\blayer\b")
_OWNER = "{owner}"  # in patterns of tensors that several layers share
_hint = lru_cache(256)(did_you_mean)  # a draft of a spec misses the same names in many families
_BEYOND = 16  # number of layer indices behind the last layer that {beyond} matches


def _matched(pattern: str, suffixes: Iterable[str], name: str) -> tuple[str | None, str | None] | None:
    """Layer and expert of a tensor name that matches a pattern; None for no match."""
    numbered = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)", 1).replace(r"\{layer\}", r"(?P=layer)")
    numbered = numbered.replace(r"\{expert\}", r"(?P<expert>\d+)", 1)
    found = re.fullmatch(f"{numbered}(?:{'|'.join(map(re.escape, suffixes))})", name)
    return found and (found.groupdict().get("layer"), found.groupdict().get("expert"))


class TensorNames:
    """Look-up of tensors by standard name; records which tensors were used."""

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
        # Replacements of further words in braces; none before the configuration is read.
        self.replacements: Callable[[int | None, str], Mapping[str, int | str]] = lambda layer, stack: {}

    def candidates(self, module: str, role: str, layer: int | None, stack: str,
                   expert: int | None = None) -> Iterator[str]:
        """All tensor names that `module` may have, first choice first."""
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
                for word, value in self.replacements(layer, stack).items():
                    base = base.replace(word, str(value))
                if "{" in base:
                    continue
            for prefix in self.prefixes:
                for suffix in SUFFIXES[role]:
                    yield prefix + base + suffix

    def _value(self, text: str, layer: int | None) -> str:
        """The value of an expression in a pattern: "layer // 2" in layer 5 is 2."""
        return str(self._resolved.evaluate(f"{self.checkpoint.naming}.tensors", text, layer))

    @cached_property
    def _resolved(self) -> Resolved:
        return Resolved(self.spec, self.checkpoint.config, self.checkpoint.naming, self.has)

    def renamed(self, name: str) -> str | None:
        """The stored name of the tensor that a name without a prefix stands for, where a module has several names; None
        for no such tensor."""
        for module, role, layer, expert in self.modules_of(name):
            patterns = self.patterns[module]
            for stored in self.candidates(module, role, layer, "", expert) if isinstance(patterns, list) else ():
                if stored in self.checkpoint.tensors and not self._of_others(stored, name, role, layer, expert):
                    return stored
        return None

    def modules_of(self, name: str) -> Iterator[tuple[str, str, int | None, int | None]]:
        """Module, role, layer and expert of every module that may have this name, which has no prefix."""
        for module, patterns in self.patterns.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                for role, suffixes in SUFFIXES.items():
                    if pattern and (found := _matched(pattern, suffixes, name)):
                        layer, expert = (None if number is None else int(number) for number in found)
                        yield module, role, layer, expert
        yield from self._expressed.get(name, ())

    @cached_property
    def _expressed(self) -> Mapping[str, Sequence[tuple[str, str, int | None, int | None]]]:
        """Module, role, layer and expert by tensor name without a prefix, for patterns with expressions."""
        modules = [module for module, patterns in self.patterns.items()
               if any(map(_EXPRESSION.search, [patterns] if isinstance(patterns, str) else patterns))]
        stacks = ("encoder", "decoder") if self.spec.type == "encoder-decoder" else ("",)
        layers = range(max(self._resolved.option("stack", "layers", None, stack) for stack in stacks)
                       ) if modules else ()
        found: dict[str, list[tuple[str, str, int | None, int | None]]] = {}
        for module, role, layer in product(modules, SUFFIXES, layers):
            for name in self.candidates(module, role, layer, ""):
                short = next(name.removeprefix(prefix) for prefix in self.prefixes if name.startswith(prefix))
                found.setdefault(short, []).append((module, role, layer, None))
        return found

    def in_turns(self, weight: str) -> bool:
        """Whether a weight, such as "blk.0.attn_q.weight", is in a block that several layers may share ({owner})."""
        module = next(iter(weight.split(".")[2:]), "")
        return any(_OWNER in pattern for pattern in self.patterns.get(module, ()))

    def _of_others(self, stored: str, name: str, role: str, layer: int | None, expert: int | None) -> bool:
        """Whether a module has the name `stored` and not `name`, which has no prefix."""
        prefixed = {prefix + name for prefix in self.prefixes}
        names_of = ({*self.candidates(module, role, layer, "", expert)} for module in self.patterns)
        return any(stored in names and not prefixed & names for names in names_of)

    def find(self, module: str, role: str = "weight", layer: int | None = None, stack: str = "",
             expert: int | None = None) -> Tensor | None:
        """The tensor of a module, which is marked as used; None if the file has none."""
        for name in self.candidates(module, role, layer, stack, expert):
            if name in self.checkpoint.tensors and not self._of_another(name, module, role, layer, stack, expert):
                self.used.add(name)
                return self.checkpoint.tensors[name]
        return None

    def has(self, name: str, layer: int | None = None, stack: str = "") -> bool:
        """Whether the file has "attn_q.bias", without marking it as used. Default layer: 0."""
        module, _, role = name.rpartition(".")
        layer = 0 if layer is None else layer
        return any(candidate in self.checkpoint.tensors
                   and not self._of_another(candidate, module, role, layer, stack, expert)
                   for expert in (None, 0) for candidate in self.candidates(module, role, layer, stack, expert))

    def _of_another(self, name: str, module: str, role: str, layer: int | None, stack: str,
                    expert: int | None) -> bool:
        """Whether a bias belongs to another module: the weight with the same name is another module's."""
        weight_name = f"{name.removesuffix('.bias')}.weight"
        if role != "bias" or weight_name not in self.checkpoint.tensors:
            return False
        weights = self.candidates(module, "weight", layer, stack, expert)
        return next((weight for weight in weights if weight in self.checkpoint.tensors), weight_name) != weight_name

    def need(self, module: str, role: str = "weight", layer: int | None = None, stack: str = "",
             expert: int | None = None) -> Tensor:
        """The tensor of a module, which is marked as used.

        Raises:
            SpecError: the tensor is missing; names the tensor names that were tried.
        """
        tensor = self.find(module, role, layer, stack, expert)
        if tensor is not None:
            return tensor
        tried = list(self.candidates(module, role, layer, stack, expert))
        where = f"{self.checkpoint.path} and spec {self.spec.name!r}"
        if not tried:
            raise SpecError(f"{where}: the spec has no name for tensor {module!r} of {self.checkpoint.naming!r} files")
        near = _hint(tried[0], tuple(n for n in self.checkpoint.tensors if n not in self.used)[:2000])
        near = near if near.startswith("; did you mean") else ""
        raise SpecError(f"{where}: missing tensor {module}.{role}, looked for {tried[0]!r}"
                        f"{' and ' + str(len(tried) - 1) + ' other names' if len(tried) > 1 else ''}{near}")

    def left_over(self, layers: int) -> list[str]:
        """Tensors, except empty ones, that the network does not use and no `ignore` pattern matches. In patterns,
        {layers} is the number of layers and {beyond} any index from there on."""
        ignored = [pattern.replace("{layers}", str(layers)).replace("{beyond}", str(number)) for pattern in self.ignored
                   for number in range(layers, layers + (_BEYOND if "{beyond}" in pattern else 1))]
        return [name for name, tensor in self.checkpoint.tensors.items() if name not in self.used
                and 0 not in tensor.shape and not any(fnmatchcase(name, pattern) for pattern in ignored)]
