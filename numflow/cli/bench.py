"""`numflow bench`."""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from numflow.cli import options
from numflow.cli.groups import Execution, grouped
from numflow.cli.inputs import read_text
from numflow.cli.running import asked_name, compile_notice, print_json
from numflow.cli.tables import print_fields, print_table
from numflow.errors import RequestError

_SIZES = {"prefill": "prompt of {}", "decode": "decoding after {}", "batched": "decoding of {} sequences"}


@grouped
def bench(
    model: options.Model = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="N,N", help="Prompt length in tokens. Decoding is measured "
                                               "after a prompt of the first length.")] = "512",
    gen_tokens: Annotated[int, typer.Option(metavar="N", help="Number of new tokens.")] = 128,
    context: Annotated[str, typer.Option(metavar="N,N", show_default=False, help="Also measure decoding with so many "
                                         "tokens in the KV cache.")] = "",
    batch: Annotated[str, typer.Option(metavar="N,N", show_default=False,
                                       help="Also measure decoding of so many sequences at the same time.")] = "",
    repeat: Annotated[int, typer.Option(metavar="N", help="Number of runs. Median, minimum and maximum are "
                                        "shown.")] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="Show the time of every op, as a share of the total and of "
                                          "this machine's limits.")] = False,
    compare: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Compare with an earlier "
                                                 "result, written with --json.")] = None,
    op: Annotated[str | None, typer.Option("--op", metavar="NAME", show_default=False, help="Measure one op without a "
                                           "model, linear or rms_norm, and compare with its last run.")] = None,
    kind: Annotated[str | None, typer.Option("--type", metavar="TYPE", show_default="q4", help="With --op linear: type "
                                             "of the weights, such as Q4_0 or q3h.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", metavar="NxK", show_default="4096x4096", help="With --op: "
                                              "output rows times input columns.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="N,N", show_default="1", help="With --op: tokens "
                                               "per call.")] = None,
    how: Execution = Execution(),
    json: options.Json = False,
) -> None:
    """Measure the speed of a model: load, prefill, decode.

    With --op one op is measured without a model: its time, its share of this machine's limit, and the ratio to its
    last run.
    """
    given = {"--type": kind, "--shape": shape, "--tokens": tokens}
    if op is not None:
        _bench_op(op, model, kind or "q4", shape or ("4096x4096" if op == "linear" else "4096"),
                  _numbers("--tokens", tokens or "1"), max(repeat, 5), how, json)
        return
    if alone := [name for name, value in given.items() if value is not None]:
        raise RequestError(f"{alone[0]} needs --op: it is an option of measuring one op")
    from numflow.engine.measure.bench import bench as run
    from numflow.engine.measure.bench import process_start

    earlier = None if compare is None else _earlier(compare)
    with compile_notice(how.compiles) as notice:
        def progress(line: str) -> None:
            notice.clear()
            print(line, file=sys.stderr, flush=True)

        result = run(asked_name(model, how.offline), _numbers("--prompt-tokens", prompt_tokens), gen_tokens, repeat,
                     process_start(), progress, contexts=_numbers("--context", context),
                     batches=_numbers("--batch", batch), profiled=profile, **how.arguments())
    if earlier is not None:
        from numflow.engine.measure.bench_runs import compare as rows_of

        result["compare"] = rows_of(result, earlier)
    if json:
        print_json(result)
    else:
        _print(result)


def _bench_op(op: str, model: str | None, kind: str, shape: str, tokens: list[int], repeat: int, how: Execution,
              json: bool) -> None:
    """Measure an op for every number of tokens and print one row each."""
    from numflow.engine.measure.host import host
    from numflow.lab.op_bench import bench_op

    if model is not None:
        raise RequestError("--op measures an op without a model: leave -m out")
    if unused := [name for name in how.arguments() if name not in ("threads", "activations")]:
        raise RequestError(f"--{unused[0].replace('_', '-')} has no effect with --op, leave it out")
    with compile_notice(True) as notice:
        found = [bench_op(op, kind, shape, count, repeat, how.threads, how.activations) for count in tokens]
        notice.clear()
    if json:
        print_json({"runs": found, "host": host()})
        return
    print_table((">tokens", ">us", ">min", ">max", ">GB/s", ">GOP/s", ">of limit", "compared with last run"), [
        (one["tokens"], *(f"{one['microseconds'][key]:.1f}" for key in ("median", "min", "max")), f"{one['gb_s']:.1f}",
         f"{one['gop_s']:.1f}", f"{one['at_limit']:.0%}", _compared(one)) for one in found])
    first = found[0]
    case = f"{op} {first['type']} {shape}" if op == "linear" else f"{op} {shape}"
    print(f"{case}: {first['megabytes']:.2f} MB each, {first['copies']} copies, {first['threads']} threads; limits "
          f"{first['limits']['read_gb_s']:.1f} GB/s, {first['limits']['int8_gop_s']:.0f} int8 and "
          f"{first['limits']['f32_gop_s']:.0f} f32 GOP/s; load {first['load']}")


def _compared(one: dict[str, Any]) -> str:
    """Ratio of this run to the last one, marked where the spreads of the two overlap."""
    if one["last"] is None:
        return "no earlier run"
    ratio = f"{one['against_last']:.2f} times as fast"
    return ratio if one["apart"] else f"{ratio}, within the spread"


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RequestError(f"{option} should be whole numbers separated by commas, is {text!r}") from None


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json_module.loads(read_text(path))
    except ValueError as error:
        raise RequestError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("decode_tok_s"), dict):
        raise RequestError(f"{path}: not a result of `numflow bench --json` (no decode_tok_s)")
    return found


def _print(result: dict[str, Any]) -> None:
    fields = {}
    for key, value in result.items():
        if key in ("prefill_tok_s", "decode_tok_s"):
            fields[key] = _spread(value)
        elif key in _SIZES:
            fields |= {_SIZES[key].format(size): f"{_spread(spread)} tok/s" for size, spread in value.items()}
        elif key not in ("host", "profile", "compare") and value is not None:
            fields |= value if key in ("limits", "options") else {key: value}
    facts = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in fields.items()}
    print_fields((*facts.items(), *((k, v) for k, v in result["host"].items() if v is not None)))
    for phase, rows in result.get("profile", {}).items():
        print(f"\n{phase}: {sum(row['microseconds'] for row in rows) / 1e3:.2f} ms")
        print_table(("op", ">steps", ">us", ">share", ">MB", ">GB/s", ">GOP/s", ">of limit"), [
            (row["op"], row["steps"], f"{row['microseconds']:.0f}", f"{row['share']:.1%}", f"{row['megabytes']:.2f}",
             f"{row['gb_s']:.1f}", f"{row['gop_s']:.1f}", "-" if row["at_limit"] is None else f"{row['at_limit']:.0%}")
            for row in rows])
    if "compare" in result:
        print()
        print_table(("tokens/s", ">now", ">then", ">ratio"), [
            (row["what"], f"{row['ours']:.1f}", f"{row['theirs']:.1f}", f"{row['ratio']:.2f}")
            for row in result["compare"]])


def _spread(value: dict[str, float]) -> str:
    return f"{value['median']:.1f} (min {value['min']:.1f}, max {value['max']:.1f})"
