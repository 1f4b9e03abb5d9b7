# snapcask: set up, try, check. `make` alone lists the targets. Linux, GNU make, bash.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

EXTRAS ?= dev#          optional dependencies to install, e.g. EXTRAS=dev,s3
PYTEST_ARGS ?=#         e.g. PYTEST_ARGS='-k wire -x'
BENCH ?=#               benchmarks/bench_$(BENCH).py is what `make bench` runs; without it, the suite
BENCH_ARGS ?=#          its arguments, e.g. BENCH=dedup BENCH_ARGS='--synthetic-gib 8'
QUICK ?=#               anything: the suite's quick mode, two minutes
README ?=#              anything: `make bench-report` writes README.md's figures from benchmarks/out/full.json
FIGURES ?=#             a folder: `make bench-report` writes the charts there too, as SVG files
APT_PACKAGES ?= zstd xfsprogs btrfs-progs runc# what the tests need from the system

PYTHON := .venv/bin/python
STAMP := .venv/.installed-$(EXTRAS)

# Shell functions. as_root runs a command as root where that needs no password, or where a person
# is there to type it; apt_install fails, changing nothing, where it cannot do its work.
define FUNCTIONS
as_root() {
    if [ "$$(id -u)" = 0 ]; then "$$@"
    elif ! command -v sudo >/dev/null; then return 1
    elif [ -t 0 ]; then sudo "$$@"
    else sudo -n "$$@"
    fi
}
apt_install() {
    command -v apt-get >/dev/null || return 1
    as_root true 2>/dev/null || return 1
    echo "installing with apt-get: $$*"
    as_root apt-get -qq update &&
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get -qq install -y --no-install-recommends "$$@" >/dev/null
}
new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13 python3.14; do
        if new_enough "$$name"; then echo "$$name"; return; fi
    done
    return 1
}
endef

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

.PHONY: venv
venv: $(STAMP) ## Create .venv and install snapcask in it, editable, with EXTRAS (dev)

$(STAMP): pyproject.toml
	@$(FUNCTIONS)
	if ! { new_enough $(PYTHON) && $(PYTHON) -m pip --version >/dev/null 2>&1; }; then
	    python=$$(find_python) || {
	        echo "snapcask needs Python 3.11 or newer, and found none as python3 or python3.11 to" \
	            "python3.14. Install one (Debian 12, Ubuntu: apt-get install python3.11-venv)." >&2
	        exit 1
	    }
	    if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
	        package=$$("$$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	        apt_install "$$package" || {
	            echo "$$python cannot make virtual environments: install $$package first" >&2
	            exit 1
	        }
	    fi
	    echo "creating .venv with $$("$$python" --version)"
	    "$$python" -m venv --clear .venv
	fi
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

.PHONY: system
system: ## Install the system packages that tests need, where that is possible
	@$(FUNCTIONS)
	missing=()
	for package in $(APT_PACKAGES); do
	    [ "$$(dpkg-query -W -f='$${db:Status-Status}' "$$package" 2>/dev/null)" = installed ] ||
	        missing+=("$$package")
	done
	if [ "$${#missing[@]}" != 0 ]; then
	    apt_install "$${missing[@]}" ||
	        echo "not installed, some tests may skip or fail: $${missing[*]}"
	fi

.PHONY: demo
demo: venv ## Show what snapcask does, on small data made here
	@$(PYTHON) benchmarks/demo.py

.PHONY: test
test: venv system ## Run the tests (PYTEST_ARGS='-k wire -x')
	@$(PYTHON) -m pytest -q $(PYTEST_ARGS)

.PHONY: quick
quick: venv system ## Run the tests that take no servers and no mounts
	@$(PYTHON) -m pytest -q -m 'not (slow or root or s3 or thorough)' $(PYTEST_ARGS)

.PHONY: lint
lint: venv ## Check format, style, types and import contracts
	@failed=()
	echo "- ruff format"; $(PYTHON) -m ruff format --diff --quiet || failed+=("ruff format")
	echo "- ruff check"; $(PYTHON) -m ruff check --quiet || failed+=("ruff check")
	echo "- mypy"; $(PYTHON) -m mypy --no-error-summary || failed+=(mypy)
	echo "- lint-imports"; .venv/bin/lint-imports --no-logo || failed+=(lint-imports)
	[ "$${#failed[@]}" = 0 ] || { printf 'failed: %s\n' "$${failed[@]}" >&2; exit 1; }

.PHONY: format
format: venv ## Format the code and apply the safe fixes
	@$(PYTHON) -m ruff check --fix --exit-zero --quiet
	$(PYTHON) -m ruff format

.PHONY: proto
proto: venv ## Generate the messages of the CSI driver from csi/proto/csi.proto
	@$(PYTHON) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. csi/proto/csi.proto

.PHONY: bench
bench: venv ## Run the benchmarks (QUICK=1: in small; BENCH=chunking: one of them)
	@if [ -z "$(BENCH)" ]; then
	    exec $(PYTHON) benchmarks/suite.py $(if $(QUICK),--quick)
	fi
	scripts="$(sort $(wildcard benchmarks/bench_$(BENCH).py))"
	[ -n "$$scripts" ] || { echo "no benchmarks/bench_$(BENCH).py" >&2; exit 1; }
	for script in $$scripts; do
	    echo "== $$script"
	    $(PYTHON) "$$script" $(BENCH_ARGS)
	done

.PHONY: bench-report
bench-report: venv ## Draw what was measured: benchmarks/out/report.html
	@if [ -n "$(README)" ]; then $(PYTHON) benchmarks/readme.py --write; fi
	$(PYTHON) benchmarks/draw.py $(if $(FIGURES),--figures $(FIGURES))

.PHONY: clean
clean: ## Remove caches, builds and what demo and benchmarks left; .venv stays
	@rm -rf build dist demo-store benchmarks/out .hypothesis .import_linter_cache .mypy_cache \
	    .pytest_cache .ruff_cache *.egg-info
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -print0 | xargs -0 rm -rf
