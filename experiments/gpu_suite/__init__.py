"""Everything that is to be measured on a GPU, in one command.

    python -m experiments.gpu_suite --out reports/gpu/              on a machine with a GPU
    python -m experiments.gpu_suite --simulator --quick --out DIR   all of it at toy size, without one

Runs from the top of the repository with Python 3.11 or newer. Needs there: numpy, numba, safetensors, tokenizers,
sentencepiece, jinja2, huggingface_hub, filelock, rich, cuda-bindings; and **gguf, which has to be carried** to the
machine that was hoped for (a wheel of 0.1 MB for any Python): `pip download --no-deps gguf` here; there `pip install
--no-index --no-deps --target /tmp/site gguf*.whl` and PYTHONPATH=/tmp/site. Besides: greenlet for the simulator;
matplotlib for figures; torch for its matrix product beside ours, with transformers for a decoder as the peer (each left
out where it is missing, which the results say).

Published logits of tiny checkpoints (part parity-fixtures, 9 MB) are looked for in the folder that NUMFLOW_SHARED
names, in shared/ and in ../shared/; without them that part has no rows.

Kernels are compiled there by numba-cuda, cuda-core and libnvvm, libnvrtc, libnvJitLink (extra `cuda-compile`, or a CUDA
13 toolkit that CUDA_HOME names), all processors at once, in the first part (`compiling`: about 4 minutes of one). Where
these are not, carry compiled kernels along instead, which is 10 MB; they serve every version of Python:

    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --compile 90      here, for compute capability 9.0
    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --out reports/gpu/     there

For an hour with a card, whose commands may take ten minutes: `--stage 1`, then 2 .. 7, what teaches most first. Each
takes at most eight minutes, goes on where it was when it is run again, and keeps what its parts found in
OUT/stage-N.json, the one file to bring back.

Each part is a process of its own, so that one that faults, hangs or is killed does not end the others. It writes
OUT/<part>.json with every result it finds. A part stops after eight minutes with what it has, and is killed after nine
and a half; what fails within it is a row that says so. Run again, the command goes on: parts that came to their end are
skipped (--again: run anyway), those that were interrupted or failed as a whole are run anew. OUT/README.md and figures
are made from all parts that are there.
"""
