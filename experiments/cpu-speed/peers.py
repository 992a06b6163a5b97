"""torch in a process of its own that answers questions line by line."""

import json
import os
import subprocess
from pathlib import Path

TORCH = r'''
import json, sys, time
import torch, transformers
transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False)
kind, what, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
if kind == "decoder":
    config = transformers.LlamaConfig(**json.loads(what))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
else:
    model = transformers.AutoModel.from_pretrained(what, dtype=torch.float32).eval()
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
for line in sys.stdin:
    rows, length, repeat = json.loads(line)
    ids = torch.randint(1000, 20000, (rows, length))
    begin = time.perf_counter()
    for _ in range(repeat):
        if kind == "decoder":
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
        else:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    print((time.perf_counter() - begin) / repeat, flush=True)
'''


class Torch:
    """A process of the interpreter `python` with a model.

    kind: "decoder", of random weights in bfloat16; `what` is its configuration as JSON. "encoder", in float32; its
    folder.
    """

    def __init__(self, python: str, kind: str, what: Path | str, threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen([python, "-c", TORCH, kind, str(what), str(threads)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.versions = json.loads(self._answer())

    def seconds(self, rows: int, length: int, repeat: int = 1) -> float:
        """Of one forward pass of [rows, length] tokens."""
        self._process.stdin.write(json.dumps([rows, length, repeat]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"torch's process ended with code {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
