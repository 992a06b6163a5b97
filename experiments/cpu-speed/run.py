"""Speed on the CPU, beside llama.cpp, ik_llama.cpp and torch, with the same weights in the same run.

The engines take turns, run by run. Prefill has 512 tokens. Decoding has 128 tokens after 32; 16 after longer prompts;
32 beside programs that compute without end; and 16 steps of several sequences together, each after 32 tokens, without
sampling in all engines. The option `llama_cpp` (or $NUMFLOW_LLAMA_CPP) names the folder of llama.cpp's programs;
`ik_llama_cpp` (or $NUMFLOW_IK_LLAMA_CPP) that of ik_llama.cpp's, which run with and without `-rtr`; `torch_python` (or
$NUMFLOW_TORCH_PYTHON) a Python interpreter with torch and transformers. Engines that are missing are left out. The
memory bandwidth is measured before and after each round, and the processor time of other processes during the round. A
round is repeated if other processes used more than 0.15 cores, or if the bandwidth was below 90 % of the best of the
run. Kernels of the same run measure the machine's limits (numflow/cpu/measure/roofline.py). The synthetic model has
random weights; its speed does not depend on them.
"""

import os
from dataclasses import asdict
from pathlib import Path

from ..llama_cpp import found
from . import rounds
from .quiet import Watch, memory_speed
from .report import figures, write

# Lists have commas between; models may have their activations behind, as NAME+bf16. parts: which of the measurements.
# resume: keep the samples of a run that was broken off.
# again: measure what is asked for anew and keep everything else of the report's last run.
OPTIONS = {"parts": "model,context,batch,busy,torch,synthetic,start,profile", "rounds": 5, "resume": False,
           "again": False, "threads": "1,2", "models": "smollm2-135m-instruct", "context_models": "",
           "batch_models": "", "busy_models": "", "contexts": "512,4096", "batches": "1,8,32", "busy": "1,2",
           "torch_model": "smollm2-135m-instruct", "torch_shape": "135m", "encoder": "all-minilm-l6-v2", "shape": "1b",
           "kinds": "Q8_0,Q4_0,q3h",
           "llama_cpp": os.environ.get("NUMFLOW_LLAMA_CPP", ""),
           "ik_llama_cpp": os.environ.get("NUMFLOW_IK_LLAMA_CPP", ""),
           "torch_python": os.environ.get("NUMFLOW_TORCH_PYTHON", "")}


def run(lab):
    if lab.quick:
        lab.options |= {"rounds": 1, "threads": "1", "contexts": "64", "batches": "2", "busy": "1",
                        "parts": "model,context,batch,busy",
                        "models": lab.options["models"].split(",")[0]}
    options, peers = lab.options, found(lab.options["llama_cpp"], lab.options["ik_llama_cpp"])
    watch, first = Watch(memory_speed), next(iter(peers), None)
    samples = rounds.Samples(lab.folder / "samples.json", options["rounds"], options["resume"], options["again"])
    parts, threads = options["parts"].split(","), [int(t) for t in options["threads"].split(",")]
    models = _subjects(options["models"])
    for count in threads:
        if "model" in parts:
            for subject in models:
                rounds.by_model(lab, samples, peers, watch, subject, count)
        if "context" in parts:
            for subject in _subjects(options["context_models"]) or models[:1]:
                rounds.by_context(lab, samples, peers, watch, subject, count,
                                  [int(n) for n in options["contexts"].split(",")])
        if "batch" in parts:
            for subject in _subjects(options["batch_models"]) or models[:1]:
                rounds.by_batch(lab, samples, peers, watch, subject, count,
                                [int(n) for n in options["batches"].split(",")])
        if "busy" in parts:
            for subject in _subjects(options["busy_models"]) or models[:1]:
                for programs in options["busy"].split(","):
                    rounds.beside_others(lab, samples, peers, subject, count, int(programs))
        if "torch" in parts and options["torch_python"]:
            rounds.beside_torch(lab, samples, options["torch_python"], *_paths(options["torch_model"]),
                                options["torch_shape"], *_paths(options["encoder"]), count)
        if "synthetic" in parts:
            for kind in options["kinds"].split(","):
                rounds.synthetic(lab, samples, options["shape"], kind, count)
        if "start" in parts:
            for subject in models:
                rounds.start(lab, samples, first, subject, count)
    before = lab.before().get("results", {}) if options["again"] or options["resume"] else {}
    limits = {int(count): limit for count, limit in before.get("limits", {}).items()} | _limits(lab, threads)
    profiles = before.get("profiles", {})
    if "profile" in parts:
        profiles |= _profiles(models, threads)
        if "synthetic" in parts:
            profiles |= _synthetic_profiles(options["shape"], options["kinds"].split(","), threads)
    lab.results |= {"torch": before["torch"]} if "torch" in before and "torch" not in lab.results else {}
    lab.results["runs"] = [*before.get("runs", []), lab.recipe()]
    lab.results |= {"samples": samples.values, "limits": limits, "profiles": profiles,
                    "peers": [peer.name for peer in peers]}
    write(lab, samples.values, limits, profiles, __doc__)


def redraw(lab):
    """Figures from results alone."""
    figures(lab, lab.results["samples"], lab.results["limits"], lab.results["profiles"])


def _paths(names: str) -> list[Path]:
    from numflow import registry

    return [Path(registry.resolve(name)) for name in names.split(",") if name]


def _subjects(names: str) -> list[rounds.Subject]:
    """Models of a list, of which each may say its activations: NAME or NAME+bf16."""
    from numflow.cpu.linear.activations import OPERANDS

    found = []
    for name in names.split(",") if names else ():
        stem, plus, last = name.rpartition("+")
        whole = not plus or last not in OPERANDS
        found.append(rounds.Subject(*_paths(name if whole else stem), None if whole else last))
    return found


def _limits(lab, threads: list[int]) -> dict[int, dict]:
    from numflow.cpu.measure.roofline import measure_limits

    return {count: asdict(measure_limits(count, 1 << 24 if lab.quick else 1 << 29)) for count in threads}


def _profiles(models: list[rounds.Subject], threads: list[int]) -> dict[str, dict]:
    """Where the time of a prompt and of a token goes: of every model, with the fewest threads."""
    import numflow

    found = {}
    for subject in models:
        with numflow.load(subject.path, threads=threads[0], **subject.options) as model:
            found[subject.name] = _profile(model)
    return found


def _synthetic_profiles(shape: str, kinds: list[str], threads: list[int]) -> dict[str, dict]:
    """The same of the large model, with every number of threads."""
    found = {}
    for count in threads:
        for kind in kinds:
            with rounds.random_model(shape, kind, count) as model:
                found[f"{shape} {kind}, {count} thread{'s' * (count > 1)}"] = _profile(model)
    return found


def _profile(model) -> dict[str, list[dict]]:
    from numflow.engine.measure.profile import machine_limits, profile

    limits = machine_limits(model.program)
    return {"prefill": profile(model, limits, rounds.PROMPT, 0), "decode": profile(model, limits, 1, rounds.AFTER, 20)}
