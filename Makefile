# Coppice. A newcomer needs two commands: `make demo` and `make test`.
#
# Everything takes DATA (the data directory) and CACHE (downloads and built root file systems) from the command line:
#   make setup DATA=/mnt/coppice CACHE=/mnt/cache

DATA  ?= /var/lib/coppice
CACHE ?= /var/cache/coppice

TARGET := $(or $(CARGO_TARGET_DIR),target)
TRIPLE := x86_64-unknown-linux-gnu
CARGO  := $(shell command -v cargo || echo $(HOME)/.cargo/bin/cargo)

.DEFAULT_GOAL := help
.PHONY: help setup build lint fmt test test-vm stress crash rounds kvm docs demo bench bench-slots clean

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# --- set-up and build -------------------------------------------------------------------------------------------------

setup: ## Packages, user, release build, data directory, guest kernel, templates (needs root; idempotent)
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory build
	$(TARGET)/release/coppice setup --data-dir $(DATA) --cache-dir $(CACHE)

build: ## The release binaries: coppice, and the static guest agent next to it
	$(CARGO) build --release --locked -p coppice-cli
	@# The same bytes wherever the tree is: templates are baked anew when the agent changes.
	RUSTFLAGS='-C target-feature=+crt-static --remap-path-prefix=$(CURDIR)=/coppice' $(CARGO) build --profile guest --locked --target $(TRIPLE) -p coppice-guest
	@install -m 0755 $(TARGET)/$(TRIPLE)/guest/coppice-guest $(TARGET)/release/coppice-guest

# --- checks -----------------------------------------------------------------------------------------------------------

lint: ## Formatting, clippy, ruff, the dependency rule, drift of docs/openapi.json; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) test --workspace --locked --quiet --test dependency_rule
	$(CARGO) test --workspace --locked --quiet --test api the_document_is_the_committed_one
	@venv=$$(sh scripts/venv.sh $(CACHE)) && $$venv/bin/ruff check -q tests benches && $$venv/bin/ruff format --check -q tests benches

fmt: ## Formats everything
	$(CARGO) fmt --all

# --- tests ------------------------------------------------------------------------------------------------------------

# Unit and property tests and the engine's conformance are built in the dev profile: with overflow checks, and quicker than in
# the release profile.
test: setup ## Sets everything up, then every test, on real virtual machines (needs root)
	$(CARGO) test --workspace --locked
	@$(MAKE) --no-print-directory test-vm

# Side by side, each process with servers of its own: machines wait more than they compute. No more than four processes, for
# the memory that their machines have.
test-vm: ## Only the tests of `coppice up` on real machines (after `make setup`); PYTEST="-k fork -n 0" chooses
	@# With fault points; `cargo test` has made it.
	@test -x $(TARGET)/debug/coppice || $(CARGO) build --locked -p coppice-cli
	@venv=$$(sh scripts/venv.sh $(CACHE)) && COPPICE_DATA_DIR=$(DATA) COPPICE_CACHE_DIR=$(CACHE) \
		$$venv/bin/pytest tests -n auto --maxprocesses 4 --dist worksteal $(PYTEST)

docs: ## Takes real machines through every fork and writes down what each keeps (after `make setup`)
	@venv=$$(sh scripts/venv.sh $(CACHE)) && COPPICE_WRITE_DOCS=1 COPPICE_DATA_DIR=$(DATA) COPPICE_CACHE_DIR=$(CACHE) \
	    $$venv/bin/pytest tests/vm/test_fork_matrix.py

# The same tests as in `make test`, which does a small part of each.
stress: ## Ten minutes of random operations of many clients, and 3,000 rounds of them on fakes; STRESS="SECONDS SEED"
	STRESS_ROUNDS=3000 $(CARGO) test --locked -p coppice-host --test with_fake_engine stress
	@STRESS="$(or $(STRESS),600 1)" $(MAKE) --no-print-directory test-vm PYTEST="-s -o faulthandler_timeout=0 -k test_stress"

crash: ## kill -9 of the server at every fault point, by every operation that comes by it
	@COPPICE_CRASH=all $(MAKE) --no-print-directory test-vm PYTEST="-k test_crash_points"

rounds: ## 100 rounds of hibernate and wake, 200 of create and delete
	@COPPICE_ROUNDS=full $(MAKE) --no-print-directory test-vm PYTEST="-s -o faulthandler_timeout=0 -k test_rounds"

kvm: ## The same product where KVM runs unmodified kernels, in a host inside this one, with hibernate and wake
	@COPPICE_NESTED_SLEEPS=1 $(MAKE) --no-print-directory test-vm PYTEST="-n 0 -k test_nested_kvm"

# --- demo -------------------------------------------------------------------------------------------------------------

demo: setup ## Forks a live machine three ways and keeps the way that works (needs root; does all set-up first)
	@python3 demo/demo.py --coppice $(TARGET)/release/coppice --data-dir $(DATA) --cache-dir $(CACHE)

# --- benchmarks -------------------------------------------------------------------------------------------------------

bench: setup bench-slots ## Raw samples and medians from this machine (needs root); BENCH="--json FILE" for more
	@venv=$$(sh scripts/venv.sh $(CACHE)) && COPPICE_DATA_DIR=$(DATA) COPPICE_CACHE_DIR=$(CACHE) $$venv/bin/python benches/bench.py $(BENCH)

bench-slots:
	$(CARGO) build --release --locked -p coppice-net --example slot_bench

clean: ## Removes what was compiled; data directory and cache stay
	$(CARGO) clean
