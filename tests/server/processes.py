"""A service as users run it: `numflow serve` in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.conftest import REPO
from tests.waiting import until

KEY = "sk-no-key-required"


class ServerProcess:
    """Starts `numflow serve`; use it in a `with`. url: where it listens. log: lines of standard error so far."""

    def __init__(self, *arguments: str, wait: bool = True, **environment: str):
        env = {**os.environ, "NUMFLOW_OFFLINE": "1", "PYTHONPATH": str(REPO), **environment}
        env.pop("NUMFLOW_API_KEY", None) if "NUMFLOW_API_KEY" not in environment else None
        self.process = subprocess.Popen([sys.executable, "-m", "numflow", "serve", "--port", "0", *arguments],
                                        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        if not line:
            self._reader.join(5)
            raise AssertionError(f"no service: {''.join(self.log)}")
        self.url = line.rsplit(" ", 1)[1].strip()
        self.port = int(self.url.rpartition(":")[2])
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.__exit__()
                raise

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def wait_ready(self, seconds: float = 60) -> None:
        """Wait until /health answers ok."""
        until(self._is_ready, "a service that is ready", seconds)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.log)
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False  # the process may be ending: checked again at the next poll

    def status(self) -> dict:
        """The JSON of /status."""
        return httpx.get(f"{self.url}/status").json()

    def engine(self) -> dict:
        """The first model's entry in /status."""
        return self.status()["models"][0]["engine"]

    def wait_idle(self, seconds: float = 60) -> dict:
        """Wait until no request runs or waits; the engine's numbers."""
        def idle():
            found = self.engine()
            return found if not found["running"] and not found["waiting"] else None

        return until(idle, "an idle engine", seconds)

    def resident(self) -> int:
        """Resident memory of the process in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def threads(self) -> int:
        """Number of threads of the process."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Terminate the process; its exit code."""
        self.process.send_signal(sig)
        return self.process.wait(seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()
