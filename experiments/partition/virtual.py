"""The report's part on virtual devices: the choice of plans to measure, rows kept from earlier runs, and their table.
"""

import time
from collections.abc import Mapping

from numflow.errors import RequestError

from . import show
from .real import CONTEXT, SINGLE, measure

PLANS = {"single": SINGLE, "two by layer": "0;1", "two by tensor": "0&1"}
KEPT = ("model", "figures", "rounds")  # of the newest measurement


def virtual(lab, strategies: Mapping[str, str]) -> None:
    """Measure the plans that the option `virtual` names; rows of the others are taken from the folder's results."""
    plans = PLANS if lab.quick else PLANS | strategies
    wanted = _wanted(lab.options["virtual"], plans)
    old = {} if lab.quick else _results(lab)
    new = {}
    if old:
        lab.kept("virtual devices")
    if wanted:
        new = measure(lab, wanted)
        lab.measured("virtual devices")
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        new["rows"] = [{**row, "when": now} for row in new["rows"]]
    rows = _merged(list(plans.values()), old.get("virtual", []), new.get("rows", []))
    if not rows:
        return
    lab.results |= {"virtual": rows, **{key: (new or old)[key] for key in KEPT}}
    lab.heading("Measured: virtual devices of this machine")
    _text(lab, rows)
    show.virtual(lab, rows)


def _wanted(option: str, plans: Mapping[str, str]) -> dict[str, str]:
    """The plans of "all", "none", or device strings with commas between.

    Raises:
        RequestError: no such plan.
    """
    if option in ("all", "none"):
        return dict(plans) if option == "all" else {}
    texts = [text.strip() for text in option.split(",")]
    for text in texts:
        if text not in plans.values():
            raise RequestError(f"option virtual: expected all, none or some of {', '.join(plans.values())}, "
                               f"found {text!r}")
    return {name: text for name, text in plans.items() if text in texts}


def _results(lab) -> dict:
    """What the folder of the report has; rows without a date are of an older form and are not taken over."""
    found = lab.before().get("results", {})
    return found if all("when" in row for row in found.get("virtual", [])) else {}


def _merged(order: list[str], old: list[dict], new: list[dict]) -> list[dict]:
    """Rows by plan and number of queries: the new ones, and old ones where there are none."""
    rows = {(row["devices"], row["queries"]): row for row in (*old, *new) if row["devices"] in order}
    return sorted(rows.values(), key=lambda row: (order.index(row["devices"]), row["queries"]))


def _text(lab, rows: list[dict]) -> None:
    figures, spread = lab.results["figures"], "min .. max"
    giga, micro = {key: value / 1e9 for key, value in figures.items()}, {k: value * 1e6 for k, value in figures.items()}
    lab.text(
        f"{lab.results['model']}, after {CONTEXT} tokens; each virtual device is a set of threads with its own memory. "
        f"Measured on this machine: {giga['bandwidth']:.1f} GB/s and {giga['operations']:.0f} int8 GOP/s per device, "
        f"{giga['host_bandwidth']:.1f} GB/s together, {figures['cores']:.2g} devices at full speed together; "
        f"{micro['step']:.1f} µs per step, {micro['latency']:.1f} µs per exchange of two devices and "
        f"{micro['crowded']:.1f} µs of all; {micro['start_each']:.0f} µs per batch for each additional device. The "
        "time of each kind of step, and of a batch beside its steps, is measured on one device for each number of "
        "queries; so the rows of one device only show that the parts add up. Everything else is predicted: plans, "
        "exchanges, waiting, and devices that share cores and memory. More devices than cores cannot be faster than "
        "as many devices as cores; such plans test the execution and the prediction. All plans and measurements took "
        f"turns in {lab.results['rounds']} rounds, and each round is predicted from its own measurements. The table "
        "has medians of the rounds, each with minimum and maximum; the last column says whether the prediction lies "
        "between the minimum and the maximum of the measurement.")
    lab.table(["strategy", "devices", "queries", "tok/s", spread, "predicted", spread, "off", spread, "within"], [
        [row["strategy"], f"`{row['devices']}`", row["queries"], row["measured"],
         f"{row['least']:.0f} .. {row['most']:.0f}", row["predicted"],
         f"{row['predicted_least']:.0f} .. {row['predicted_most']:.0f}", f"{row['off']:+.0%}",
         f"{row['off_least']:+.0%} .. {row['off_most']:+.0%}",
         "yes" if row["least"] <= row["predicted"] <= row["most"] else "no"] for row in rows])
    worst = max(rows, key=lambda row: abs(row["off"]))
    near = sum(abs(row["off"]) <= 0.15 for row in rows)
    lab.text(f"The largest error of a prediction is {worst['off']:+.0%} ({worst['strategy']}, {worst['queries']} "
             f"queries); {near} of {len(rows)} are within 15 %.")
    for when in sorted({row["when"] for row in rows} - {max(row["when"] for row in rows)}):
        texts = dict.fromkeys(row["devices"] for row in rows if row["when"] == when)
        lab.text(f"Measured earlier, on {when}, with the machine's limits of that time: "
                 f"{', '.join(f'`{text}`' for text in texts)}.")
