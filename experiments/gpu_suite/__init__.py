"""All measurements on a GPU, in one command.

    python -m experiments.gpu_suite --out reports/gpu/              on a machine with a GPU
    python -m experiments.gpu_suite --simulator --quick --out DIR   everything at toy size, without a GPU

Run it from the top of the repository with Python 3.11 or newer. It needs numpy, numba, safetensors, tokenizers,
sentencepiece, jinja2, huggingface_hub, filelock, rich, cuda-bindings, and gguf. On a machine without a package index,
bring gguf along (a wheel of 0.1 MB for any Python): `pip download --no-deps gguf` here; there `pip install --no-index
--no-deps --target /tmp/site gguf*.whl` and PYTHONPATH=/tmp/site. Optional: greenlet for the simulator; matplotlib for
figures; torch to compare its matrix products, and with transformers a decoder. The results say what was missing.

Published logits of tiny checkpoints (part parity-fixtures, 9 MB) are read from the folder in NUMFLOW_SHARED, from
shared/ or from ../shared/. Without them that part has no rows.

The first part (`compiling`, about 4 minutes of one core) compiles all kernels, on all cores, by numba-cuda, cuda-core,
libnvvm, libnvrtc and libnvJitLink (extra `cuda-compile`, or a CUDA 13 toolkit in CUDA_HOME). If the machine does not
have them, bring compiled kernels along instead, which are 10 MB and independent of the Python version:

    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --compile 90      here, for compute capability 9.0
    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --out reports/gpu/     there

For a GPU that is available for an hour, with at most ten minutes for a command: `--stage 1`, then 2 .. 7, the most
informative first. Each stage takes at most eight minutes, continues where it stopped when it is run again, and writes
the results of its parts to OUT/stage-N.json, the only file to bring back.

Each part runs in a separate process, so that a fault, a hang or a kill does not end the others. It writes every
result to OUT/<part>.json as it comes. A part stops after eight minutes, and is killed after nine and a half; a failure
within a part is reported as a row. If the command is run again, finished parts are skipped (--again: run anyway),
and parts that were interrupted or failed as a whole are repeated. OUT/README.md and figures are made from all results.
"""
