"""Everything that is to be measured on a GPU, in one command.

    python -m experiments.gpu_suite --out reports/gpu/              on a machine with a GPU
    python -m experiments.gpu_suite --simulator --quick --out DIR   all of it at toy size, without one

Runs from the top of the repository with Python 3.11 or newer. Needs there: what numflow itself needs, and the package
cuda-bindings; greenlet for the simulator; matplotlib for figures; torch for its matrix product beside ours, with
transformers for a decoder as the peer (each left out where it is missing, which the results say).

Published logits of tiny checkpoints (part parity-fixtures, 9 MB) are looked for in the folder that NUMFLOW_SHARED
names, in shared/ and in ../shared/; without them that part has no rows.

Kernels are compiled there by numba-cuda, cuda-core and libnvvm, libnvrtc, libnvJitLink (extra `cuda-compile`, or a CUDA
13 toolkit that CUDA_HOME names). Where these are not, carry compiled kernels along instead, which is 10 MB:

    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --compile 90      here, for compute capability 9.0
    NUMFLOW_CUDA_KERNELS=kernels python -m experiments.gpu_suite --out reports/gpu/     there

Each part writes OUT/<part>.json and is skipped where that exists (--again: run it anyway); a part stops after ten
minutes with what it has. OUT/README.md and figures are made from all parts that are there.
"""
