"""A long test of a service under mixed load: lost answers, memory growth, and KV blocks that are never freed. One
device of the service is killed during the test.

Clients request chats, completions and embeddings from two models, one of which runs on two devices in separate
processes. Some clients read slowly, some disconnect during an answer, and most prompts share their beginning. An answer
is lost if a client that stays connected receives neither the whole answer nor an error.
"""

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from numflow.errors import RequestError
from numflow.lab import style

SYSTEM = "You are a patient librarian who answers in short sentences and never guesses. " * 12
WORDS = ("river", "bread", "music", "weather", "lamp", "garden", "winter", "letter", "bridge", "stone", "orchard",
         "harbour")
KV_MEMORY = "384MB"  # of each model that writes: else the prefix cache takes a gigabyte, little by little
TIMEOUT_S = 120   # for a client to see anything
SAMPLE_S = 5.0    # between two looks at the service
SETTLED = 1 / 3   # of the time, after which memory should not grow any more
GROWTH = 0.05     # that counts as flat
CHAT, PARTS, EMBED = "chat", "parts", "embeddings"


def soak(lab, settings, command) -> dict:
    """Drive a service for `minutes`. command: makes the command that serves a configuration on a port.

    Returns:
        counts: [kind of client, outcome, number]; samples: [seconds, bytes of memory, health, blocks in use];
        lost, blocks_at_end, killed_s, recovered_s.
    """
    seconds = 60 * settings["minutes"]
    with tempfile.TemporaryDirectory() as folder:
        config, embeds = _config(lab, Path(folder), settings)
        with command(config) as (process, port):
            service = _Service(process, port)
            service.wait(300)
            counts, stop = Counter(), threading.Event()
            threads = [threading.Thread(target=_client, args=(service, number, embeds, counts, stop), daemon=True)
                       for number in range(settings["clients"])]
            for thread in threads:
                thread.start()
            found = _watch(lab, service, seconds, counts)
            stop.set()
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
            hanging = sum(thread.is_alive() for thread in threads)
            found["blocks_at_end"] = service.blocks_when_idle()
    rows = [[kind, outcome, number] for (kind, outcome), number in sorted(counts.items())]
    return found | {"counts": rows, "minutes": settings["minutes"], "clients": settings["clients"],
                    "lost": hanging + sum(number for _, outcome, number in rows if outcome == "LOST")}


def growth(found: dict) -> float:
    """How much more memory there was in the last quarter than between a third of the time and the kill: a device that
    is started anew takes its memory little by little."""
    seconds, until = 60 * found["minutes"], found["killed_s"] or 60 * found["minutes"] / 2
    first = [memory for at, memory, *_ in found["samples"] if SETTLED * seconds <= at < until]
    last = [memory for at, memory, *_ in found["samples"] if at >= 0.75 * seconds]
    return statistics.median(last) / statistics.median(first) - 1 if first and last else 0.0


def _config(lab, folder: Path, settings) -> tuple[Path, bool]:
    """The service's configuration, and whether there is a model for embeddings."""
    from numflow import registry
    from numflow.errors import NumflowError

    text = [f'[engine]\nkv_memory = "{KV_MEMORY}"\n', f'[models.{CHAT}]\npath = {json.dumps(settings["path"])}\n',
            f'[models.{PARTS}]\npath = {json.dumps(settings["path"])}\ndevices = "0;1"\ntransport = "processes"\n'
            'threads = 1\npreload = true\n']
    try:
        place = str(registry.resolve(settings["encoder"]))
        text.append(f"[models.{EMBED}]\npath = {json.dumps(place)}\n")
    except NumflowError as error:
        lab.say(f"no embeddings: {error}")
    path = folder / "service.toml"
    path.write_text("\n".join(text))
    return path, len(text) == 4


class _Service:
    """A service from outside. ask: one request; the rest looks after its process and numbers."""

    def __init__(self, process: subprocess.Popen, port: int):
        self.process, self.port = process, port

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def get(self, path: str) -> tuple[int, dict]:
        connection = self.connection()
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def wait(self, seconds: float) -> None:
        """Wait until the service is ready."""
        for _ in range(int(seconds / 0.2)):
            if self.process.poll() is not None:
                raise RequestError(f"the service ended with {self.process.returncode}")
            with suppress(OSError):  # it does not listen yet
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.2)
        raise RequestError(f"the service was not ready after {seconds:g} s")

    def tree(self) -> list[int]:
        """The service's process and those of its devices."""
        found = [self.process.pid]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile
            if parent == self.process.pid:
                found.append(int(stat.parent.name))
        return found

    def devices(self) -> list[int]:
        """The processes of devices."""
        def is_device(pid):
            try:
                return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                return False

        return [pid for pid in self.tree() if is_device(pid)]

    def memory(self) -> int:
        """Private memory of its processes in bytes."""
        total = 0
        for pid in self.tree():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
        return total

    def blocks(self) -> int:
        """KV blocks in use, of all models."""
        models = self.get("/status")[1]["models"]
        return sum(model["engine"]["kv_blocks_used"] for model in models if model.get("engine"))

    def blocks_when_idle(self) -> int:
        """The same once nothing runs or waits."""
        for _ in range(600):
            models = self.get("/status")[1]["models"]
            engines = [model["engine"] for model in models if model.get("engine")]
            if not any(engine["running"] or engine["waiting"] for engine in engines):
                return sum(engine["kv_blocks_used"] for engine in engines)
            time.sleep(0.2)
        return self.blocks()


def _watch(lab, service: _Service, seconds: float, counts: Counter) -> dict:
    """Sample the service until the time is over, and kill a device during the test."""
    begin, samples, killed, recovered = time.monotonic(), [], None, None
    while (at := time.monotonic() - begin) < seconds:
        try:
            health, blocks = service.get("/health")[0], service.blocks()
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            health, blocks = 0, -1
        samples.append([round(at, 1), service.memory(), health, blocks])
        if killed is None and at > 0.4 * seconds and (devices := service.devices()):
            os.kill(devices[0], signal.SIGKILL)
            killed = at
            lab.say(f"{at:.0f} s: killed the process of a device")
        elif killed is not None and recovered is None and health == 200 and at > killed + 2:
            recovered = at
            lab.say(f"{at:.0f} s: healthy again")
        if len(samples) % 12 == 0:
            lab.say(f"{at:.0f} s: {sum(counts.values())} requests, {samples[-1][1] / 1e6:.0f} MB, {blocks} blocks")
        time.sleep(min(SAMPLE_S, seconds / 20))
    return {"samples": samples, "killed_s": killed, "recovered_s": recovered}


def _client(service: _Service, number: int, embeds: bool, counts: Counter, stop: threading.Event) -> None:
    """Send requests in a loop, each of another kind."""
    rng = random.Random(number)
    ways = [_chat, _stream, _stream, _completion, _abort, _slow, *([_embed] if embeds else [])]
    while not stop.is_set():
        way = rng.choice(ways)
        try:
            outcome = way(service, rng)
        except (TimeoutError, ConnectionError, http.client.HTTPException, ValueError, KeyError, IndexError):
            outcome = "LOST"
        counts[way.__name__.strip("_"), outcome] += 1


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _post(service: _Service, path: str, body: dict):
    connection = service.connection()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def _whole(service: _Service, path: str, body: dict, has) -> str:
    """An answer in one piece. has: whether a reply is one."""
    connection, reply = _post(service, path, body)
    try:
        found = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != 200:
        return f"error {reply.status} {found['error']['code']}"
    return "ok" if has(found) else "LOST"


def _chat(service: _Service, rng: random.Random) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _words(rng, rng.randint(1, 40))}]
    return _whole(service, "/v1/chat/completions", {"model": CHAT, "messages": messages,
                                                    "max_tokens": rng.randint(1, 48)},
                  lambda found: found["choices"][0]["finish_reason"] in ("stop", "length"))


def _completion(service: _Service, rng: random.Random) -> str:
    return _whole(service, "/v1/completions", {"model": PARTS, "prompt": _words(rng, rng.randint(1, 120)),
                                               "max_tokens": rng.randint(1, 32), "n": rng.choice((1, 1, 2)),
                                               "temperature": 0.8},
                  lambda found: all(choice["finish_reason"] for choice in found["choices"]))


def _embed(service: _Service, rng: random.Random) -> str:
    texts = [_words(rng, rng.randint(1, 60)) for _ in range(rng.randint(1, 6))]
    return _whole(service, "/v1/embeddings", {"model": EMBED, "input": texts},
                  lambda found: len(found["data"]) == len(texts))


def _stream(service: _Service, rng: random.Random, pause: float = 0.0, leave_after: int = 0) -> str:
    body = {"model": rng.choice((CHAT, PARTS)), "stream": True, "max_tokens": rng.randint(4, 64),
            "messages": [{"role": "system", "content": SYSTEM},
                         {"role": "user", "content": _words(rng, rng.randint(1, 40))}]}
    connection, reply = _post(service, "/v1/chat/completions", body)
    try:
        if reply.status != 200:
            return f"error {reply.status} {json.loads(reply.read())['error']['code']}"
        events = 0
        while line := reply.readline():
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return "ok"
            event, events = json.loads(line[6:]), events + 1
            if "error" in event:
                return f"error in the stream {event['error']['code']}"
            if leave_after and events >= leave_after:
                return "left"
            time.sleep(pause)
        return "LOST"
    finally:
        connection.close()


def _slow(service: _Service, rng: random.Random) -> str:
    return _stream(service, rng, pause=0.2)


def _abort(service: _Service, rng: random.Random) -> str:
    return _stream(service, rng, leave_after=rng.randint(1, 6))


def report(lab, found: dict) -> None:
    """Tables and figure of a soak, and what cannot be."""
    lab.heading("A long time under mixed load")
    lab.text(" ".join(__doc__.split("\n\n", 1)[1].split()))
    lab.text(f"{found['clients']} clients for {found['minutes']:g} minutes, {sum(n for *_, n in found['counts'])} "
             "requests.")
    lab.table(["client", "outcome", "requests"], found["counts"])
    if found["killed_s"] is not None:
        told = "was not healthy again" if found["recovered_s"] is None else \
            f"was healthy again {found['recovered_s'] - found['killed_s']:.0f} s later"
        lab.text(f"The process of a device was killed after {found['killed_s']:.0f} s; the service {told}.")
    lab.claim("No answer was lost without an error, and no KV block was in use at the end.",
              found["lost"] == 0 and found["blocks_at_end"] == 0,
              f"{found['lost']} answers were lost without an error; {found['blocks_at_end']} blocks were in use at the "
              "end.")
    grown = growth(found)
    told = "from the time between a third of it and the kill to its last quarter"
    lab.claim(f"Memory changed by {grown:+.1%} {told}.", grown <= GROWTH, f"Memory GREW by {grown:.1%} {told}.")
    lab.doubt(found["lost"] == 0, f"{found['lost']} answers lost without an error")
    lab.doubt(found["blocks_at_end"] == 0, f"{found['blocks_at_end']} blocks in use at the end")
    lab.doubt(found["recovered_s"] is not None or found["killed_s"] is None, "no health after a device was killed")
    figure(lab, found)


def figure(lab, found: dict) -> None:
    """Memory, and blocks in use, along the time."""
    made, axes = style.figure(2, 1, (7.2, 4.6))
    minutes = [at / 60 for at, *_ in found["samples"]]
    for number, (axis, values, label) in enumerate((
            (axes[0], [memory / 1e6 for _, memory, *_ in found["samples"]], "memory, MB"),
            (axes[1], [blocks for *_, blocks in found["samples"]], "KV blocks in use"))):
        axis.plot(minutes, values, **style.series(number) | {"marker": "", "linewidth": 1})
        axis.set(ylabel=label, ylim=(0, None))
        if found["killed_s"] is not None:
            axis.axvline(found["killed_s"] / 60, color=style.GREY, linewidth=0.8)
            if not number:
                axis.text(found["killed_s"] / 60 + 0.01 * minutes[-1], max(values) * 0.1, "a device is killed",
                          fontsize=8, color=style.GREY)
    axes[1].set_xlabel("minutes")
    axes[0].set_xticklabels([])
    lab.figure(made, "soak", f"After {found['minutes']:g} minutes memory differs by {growth(found):+.1%}, and "
               f"{found['blocks_at_end']} blocks are left behind", f"{found['clients']} clients", part="soak",
               hspace=0.15, caption="Private memory of all processes, and KV blocks in use")
