"""numflow's commands with a model that answers every prompt with the first argument."""

import sys

import numflow
from numflow.cli import main
from tests.cli.conftest import Loader

loader = Loader()
loader.answer = sys.argv.pop(1).encode()
numflow.load = loader
main()
