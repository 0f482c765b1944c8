.PHONY: test test-learning test-slow lint docs

# Everything a change has to pass; some 25 minutes on two cores.
test: lint
	python -m pytest

# Trains to the scores the README tells.
test-learning:
	python -m pytest -m learning

# The long variants of tests, and ten minutes under pressure.
test-slow:
	python -m pytest -m slow

# The documentation's site, in site/.
docs:
	mkdocs build --strict

lint:
	ruff check .
	ruff format --check .
	mypy
