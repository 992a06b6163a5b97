"""llama.cpp's and ik_llama.cpp's programs, as the experiments run them beside numflow, one run each."""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path


class LlamaCpp:
    """llama.cpp's programs in a folder; false where llama-bench is not there.

    key: what its samples are called by. name: in tables.
    """

    key, name, _errors = "peer", "llama.cpp", subprocess.DEVNULL

    def __init__(self, folder: str):
        self._folder = Path(folder)
        self._given = bool(folder)
        self.peak_mib = 0.0

    def __bool__(self) -> bool:
        return self._given and (self._folder / "llama-bench").exists()

    def prefill(self, path: Path, threads: int, tokens: int) -> float:
        """tokens/s of a prompt."""
        return self.bench(path, threads, "-p", tokens, "-n", 0)

    def decode(self, path: Path, threads: int, after: int, new: int) -> float:
        """tokens/s of a number of tokens after a prompt."""
        return self.bench(path, threads, "-p", 0, "-n", new, "-d", after)

    def bench(self, path: Path, threads: int, *what) -> float:
        """tokens/s of one run of llama-bench; `peak_mib` is then its largest resident memory."""
        out = self._run("llama-bench", "-m", path, "-t", threads, "-r", 1, "-o", "json", *what)
        return json.loads(out[out.index("["):])[0]["avg_ts"]

    def batched(self, path: Path, threads: int, sequences: int, context: int, steps: int) -> float:
        """tokens/s of all of so many sequences decoding together."""
        return self.batched_row(path, threads, sequences, context, steps)["speed_tg"]

    def batched_row(self, path: Path, threads: int, sequences: int, context: int, steps: int) -> dict[str, float]:
        """Numbers of llama-batched-bench: "speed_tg" as above, "t" the seconds of prompts and new tokens."""
        out = self._batched(path, threads, sequences, context, steps, "--output-format", "jsonl")
        return {name: float(number) for name, number in re.findall(r'"(\w+)": *(-?[\d.]+)', out)}

    def _batched(self, path: Path, threads: int, sequences: int, context: int, steps: int, *more) -> str:
        size = sequences * (context + steps) + 256
        return self._run("llama-batched-bench", "-m", path, "-t", threads, "-tb", threads, "-c", size, "-npp", context,
                         "-ntg", steps, "-npl", sequences, *more)

    def _run(self, program: str, *words) -> str:
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen([str(self._folder / program), *map(str, words)], stdout=out,
                                       stderr=self._errors, text=True)
            self.peak_mib = 0.0
            while process.poll() is None:
                self.peak_mib = max(self.peak_mib, _peak_mib(process.pid))
                time.sleep(0.02)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, program)
            out.seek(0)
            return out.read()


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp's programs. repacked: rows of weights interleaved when they are loaded (`-rtr 1`)."""

    def __init__(self, folder: str, repacked: bool):
        super().__init__(folder)
        self._repacked, mark = repacked, " -rtr" if repacked else ""
        self.key, self.name = f"ik{mark}", f"ik_llama.cpp{mark}"

    def decode(self, path: Path, threads: int, after: int, new: int) -> float:
        return self.bench(path, threads, "-p", 0, "-n", 0, "-gp", f"{after},{new}")

    def bench(self, path: Path, threads: int, *what) -> float:
        return super().bench(path, threads, "-rtr", int(self._repacked), *what)

    def batched(self, path: Path, threads: int, sequences: int, context: int, steps: int) -> float:
        self._errors = subprocess.STDOUT  # its table goes to standard error
        # Its flash attention aborts where sequences are of one cache (GGML_ASSERT(S > 0) in iqk_fa_templates.h).
        out = self._batched(path, threads, sequences, context, steps, "-no-fa", *(["-rtr"] if self._repacked else []))
        rows = [line.split("|")[1:-1] for line in out.splitlines() if line.count("|") > 8]
        names = [cell.strip() for cell in rows[0]]
        return float(rows[-1][names.index("S_TG t/s")])


def found(llama_cpp: str, ik_llama_cpp: str) -> list[LlamaCpp]:
    """The peers whose programs are installed."""
    return [peer for peer in (LlamaCpp(llama_cpp), IkLlamaCpp(ik_llama_cpp, False), IkLlamaCpp(ik_llama_cpp, True))
            if peer]


def _peak_mib(process: int) -> float:
    """Largest resident memory so far; what getrusage tells begins with that of the process that has started it."""
    try:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0
