# A thin front of CMake's presets. `make demo` and `make test` set up, build and run by themselves.
.PHONY: help setup build demo test bench format lint clean

help:
	@echo "make setup   install what the build needs (Debian packages; as root)"
	@echo "make build   release build into build/"
	@echo "make demo    generate text in place, by replay and with drafts, and compare"
	@echo "make test    build and run all tests"
	@echo "make bench   the recurrent steps against this machine's memory bandwidth"
	@echo "make format  format the sources; make lint: check format and run clang-tidy"

setup:
	@tools/setup.sh build

build: setup
	cmake --preset release
	cmake --build --preset release

demo: build
	build/bin/replayssm compare models/nemotron-h-tiny \
	  --prompt "And it came to pass in those days, that" --max-tokens 256 --draft ngram

test: build
	ctest --preset release

bench: build
	build/bin/mamba2_cpu_bench
	build/bin/delta_rule_cpu_bench gated_delta_net
	build/bin/delta_rule_cpu_bench kimi_delta_attention

format:
	tools/format.sh -i

lint:
	@tools/setup.sh lint
	tools/format.sh --dry-run -Werror
	cmake --preset release
	tools/tidy.sh

clean:
	rm -rf build
