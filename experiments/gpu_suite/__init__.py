"""All measurements on a GPU, in one command.

    python -m experiments.gpu_suite --out reports/gpu/              on a machine with a GPU
    python -m experiments.gpu_suite --simulator --quick --out DIR   everything at toy size, without a GPU

Run it from the top of the repository with Python 3.11 or newer. It needs numpy, numba, safetensors, tokenizers,
sentencepiece, jinja2, huggingface_hub, filelock, rich, cuda-bindings and gguf. On a machine without a network, carry
**gguf** there (a wheel of 0.1 MB for any Python): `pip download --no-deps gguf` here; there `pip install --no-index
--no-deps --target /tmp/site gguf*.whl` and PYTHONPATH=/tmp/site. Optional packages: greenlet for the simulator;
matplotlib for figures; torch for its matrix product beside ours, and transformers for its decoder. Parts without their
package are left out, and the results say so.

The part parity-fixtures needs published logits of tiny checkpoints (9 MB). It looks for them in the folder that
NUMFLOW_SHARED names, in shared/ and in ../shared/; without them the part has no rows.

The first part (`compiling`, about 4 minutes of one processor) compiles the kernels with numba-cuda, cuda-core and
libnvvm, libnvrtc, libnvJitLink (extra `cuda-compile`, or a CUDA 13 toolkit that CUDA_HOME names), on all processors at
once. Without these, carry compiled kernels along (10 MB); they work with every version of Python:

    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --compile 90      here, for compute capability 9.0
    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --out reports/gpu/     there

If a GPU is available for an hour, with at most ten minutes per command, run `--stage 1`, then 2 .. 7; the most
informative stages come first. Each stage takes at most eight minutes, continues where it stopped when it is run again,
and writes the results of its parts to OUT/stage-N.json, the only file to bring back.

Each part runs in its own process, so a part that faults, hangs or is killed does not end the others. It writes
OUT/<part>.json with all its results. A part stops after eight minutes with the results that it has, and is killed after
nine and a half. A failure within a part is a row with its message. When the command runs again, completed parts are
skipped (--again: run anyway), and interrupted or failed parts run again. OUT/README.md and figures are made from the
results of all parts.
"""
