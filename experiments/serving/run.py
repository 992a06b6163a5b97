"""Serving: throughput and latency over HTTP, beside the engine alone and llama.cpp's server.

The same requests, with a fixed number of clients, go in turn to three servers: the engine in this process, `numflow
serve`, and llama-server if its path is given (option llama_server). Decoding is greedy, all answers have the same
length, and every prompt is different. The part `soak` runs a service under mixed load for `minutes`. Results of parts
that are not run are kept.
"""

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numflow
from numflow.errors import RequestError
from numflow.lab import style
from numflow.server.load_generator import LoadTest
from numflow.server.load_generator import run as drive

from . import soak

OPTIONS = {"model": "smollm2", "llama_server": "", "clients": 32, "requests": 64, "words": 32, "tokens": 64,
           "rounds": 3, "threads": 2, "parts": "throughput", "minutes": 30.0, "encoder": "minilm"}
NAMES = {"engine": "engine alone", "numflow": "numflow serve", "llama": "llama-server"}


def run(lab):
    settings = dict(lab.options)
    if lab.quick:
        settings |= {"clients": 4, "requests": 4, "tokens": 8, "rounds": 1, "parts": "throughput,soak", "minutes": 0.25}
    settings["path"] = str(numflow.registry.resolve(settings["model"]))
    kept = {} if lab.quick else lab.before().get("results", {})
    parts = settings["parts"].split(",")
    for part, work in (("throughput", throughput), ("soak", soaked)):
        if part in parts:
            kept[part] = work(lab, settings)
            lab.measured(part)
        elif part in kept:
            lab.kept(part)
    for option in ("model", "llama_server"):  # the report omits their paths on this machine
        lab.options[option] = Path(settings[option]).name
    lab.results = {part: kept[part] for part in ("throughput", "soak") if part in kept}
    if "throughput" in lab.results:
        report(lab, **lab.results["throughput"])
    if "soak" in lab.results:
        soak.report(lab, lab.results["soak"])


def throughput(lab, settings) -> dict:
    """Rounds of the same requests on every server."""
    before = os.getloadavg()[0]
    rounds = measure(lab, settings)
    shown = {name: settings[name] for name in ("clients", "requests", "words", "tokens", "rounds", "threads")}
    return {"settings": shown | {"model": Path(settings["path"]).name}, "rounds": rounds, "load_before": before,
            "load_after": os.getloadavg()[0]}


def soaked(lab, settings) -> dict:
    """The service under mixed load."""
    @contextmanager
    def command(config):
        port = free_port()
        words = [sys.executable, "-m", "numflow", "serve", "-c", str(config), "--port", str(port), "--log", "/dev/null"]
        with process(words) as started:
            yield started, port

    return soak.soak(lab, settings, command)


def measure(lab, settings) -> list[dict]:
    """One row per round: the results of each server with its own requests."""
    rounds = []
    with ExitStack() as stack:
        path = settings["path"]
        places = {"engine": Engine(stack, path, settings)}
        places["numflow"] = Server(stack, numflow_command(path, settings), "/health")
        if settings["llama_server"]:
            places["llama"] = Server(stack, llama_command(path, settings), "/health")
        for place in places.values():  # kernels are compiled, caches and buffers grow
            place.drive(load(settings, 10**6, min(settings["clients"], settings["requests"]), 8))
        for number in range(settings["rounds"]):
            row = {}
            for name, place in places.items():
                row[name] = place.drive(load(settings, number * settings["requests"], settings["requests"],
                                             settings["tokens"]))
                lab.say(f"round {number + 1}: {NAMES[name]} {row[name]['new_tok_s']:.1f} tokens/s")
            rounds.append(row)
    return rounds


def load(settings, first: int, requests: int, tokens: int) -> LoadTest:
    return LoadTest("http://127.0.0.1:1", settings["clients"], 600, requests, settings["words"], tokens, first=first,
                    limit=600)


class Engine:
    """The engine in this process."""

    def __init__(self, stack, path, settings):
        model = stack.enter_context(numflow.load(path, threads=settings["threads"]))
        self._engine = stack.enter_context(numflow.Engine(model, max_batch=settings["clients"]))

    def drive(self, load: LoadTest) -> dict:
        """Queue everything; as many run at a time as there are clients."""
        begin = time.perf_counter()
        handles = [self._engine.submit(load.prompt(number), load.max_tokens, ignore_eos=True)
                   for number in range(load.first, load.first + load.requests)]
        tokens = sum(len(handle.result().ids) for handle in handles)
        return {"new_tok_s": tokens / (time.perf_counter() - begin), "new_tokens": tokens}


class Server:
    """A server process on a free port. command: makes the command line for a port."""

    def __init__(self, stack, command, health):
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        stack.enter_context(process(command(port)))
        wait_for(self._url + health)

    def drive(self, load: LoadTest) -> dict:
        """The clients' measurements."""
        found = drive(LoadTest(**{**vars(load), "url": self._url})).report()
        if found["errors"]:
            raise RequestError(f"requests failed: {found['errors']}")
        return found


def numflow_command(path, settings):
    return lambda port: [sys.executable, "-m", "numflow", "serve", "-m", path, "--port", str(port), "--max-batch",
                         str(settings["clients"]), "--threads", str(settings["threads"]), "--log", "/dev/null"]


def llama_command(path, settings):
    room = 4 * (settings["words"] + settings["tokens"])
    return lambda port: [settings["llama_server"], "-m", path, "--host", "127.0.0.1", "--port", str(port), "-np",
                         str(settings["clients"]), "-c", str(settings["clients"] * room), "-t",
                         str(settings["threads"])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(command):
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for(url: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RequestError(f"no server at {url} after {seconds} s")


def report(lab, settings, rounds, load_before, load_after):
    names = list(rounds[0])
    speed = {name: [row[name]["new_tok_s"] for row in rounds] for name in names}
    median = {name: statistics.median(values) for name, values in speed.items()}
    lab.text(f"{settings['model']}, {settings['clients']} clients, {settings['requests']} requests a round "
             f"of {settings['words']} words and {settings['tokens']} new tokens each, greedy, {settings['threads']} "
             f"threads. Clients run on the same machine; the servers take turns, {settings['rounds']} rounds. "
             f"Load average {load_before:.1f} before, {load_after:.1f} after.")
    lab.heading("Throughput")
    lab.table(["server", "tokens/s, median", "minimum", "maximum", "relative to the engine",
               *(["relative to llama-server"] if "llama" in names else [])],
              [(NAMES[name], median[name], min(speed[name]), max(speed[name]), ratio(speed, name, "engine"),
                *([ratio(speed, name, "llama")] if "llama" in names else [])) for name in names])
    lab.text("Ratios are medians over the rounds; in each round the servers run one after the other.")
    served = [name for name in names if name != "engine"]
    lab.heading("Latency, seconds")
    lab.table(["server", "time", "p50", "p95", "p99"],
              [(NAMES[name], what, *(statistics.median(row[name][key][p] for row in rounds)
                                     for p in ("p50", "p95", "p99")))
               for what, key in (("to the first token", "time_to_first_token_s"), ("between tokens", "inter_token_s"),
                                 ("whole request", "request_s")) for name in served])
    lab.text("All clients of a round start at once, so many first tokens wait for the prompts of other clients.")
    figure(lab, names, speed)


def ratio(speed, name, other) -> float:
    return statistics.median(a / b for a, b in zip(speed[name], speed[other], strict=True))


def figure(lab, names, speed):
    made, axis = style.figure(size=(7.2, 2.6))
    median = {name: statistics.median(speed[name]) for name in names}
    places = range(len(names))
    axis.barh(places, [median[name] for name in names], color=style.SERIES[0][0], height=0.55)
    for place, name in zip(places, names):
        axis.plot(speed[name], [place] * len(speed[name]), "o", color="#222222", markersize=4, markeredgecolor="white")
    axis.set_yticks(places, [NAMES[name] for name in names])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("new tokens a second, all clients together (points: rounds)")
    if "llama" in names:
        finding = f"The service writes {ratio(speed, 'numflow', 'llama'):.1f} times the tokens of llama-server"
    else:
        finding = f"The service keeps {ratio(speed, 'numflow', 'engine'):.0%} of the engine's tokens a second"
    lab.figure(made, "throughput", finding, part="throughput", left=1.2,
               caption="Throughput: bars are medians, points the rounds.")


def redraw(lab):
    """Figures from results alone."""
    if "throughput" in lab.results:
        rounds = lab.results["throughput"]["rounds"]
        names = list(rounds[0])
        figure(lab, names, {name: [row[name]["new_tok_s"] for row in rounds] for name in names})
    if "soak" in lab.results:
        soak.figure(lab, lab.results["soak"])
