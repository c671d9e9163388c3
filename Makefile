# gdn_ref: `make` alone says what there is. Needs Python 3.10 or later and make; everything else goes into .venv.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
EXTRAS := notebooks,test,site,dev
# The newest and the oldest Triton that the kernels are made for; both are tested, each laid over what .venv has: the
# newest in full, the oldest by the first and the last case of every test. `make test` interprets as many under the newest
# and compiles under both. Up to 3.6 the interpreter does not get along with NumPy 2.4. The README's times were taken
# with BENCHED.
TRITONS := 3.9.0 3.4.0
BENCHED := 3.6.0
NUMPY_FOR_3.4.0 := numpy==2.2.6
NUMPY_FOR_3.6.0 := numpy==2.2.6
KERNELS_FOR_3.4.0 := short
KERNEL_TESTS := $(sort $(wildcard tests/test_kernels*.py)) tests/test_compile.py
# Of these the suite runs what needs no Triton; the rest has it in its name.
PARTLY := tests/test_ops.py tests/test_cases.py tests/test_compiler.py
# Triton is made for Linux; elsewhere the kernels' tests stay out.
KERNELS := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),$(TRITONS:%=kernels-%))

.DEFAULT_GOAL := help
.PHONY: help book site lab test suite kernels sanitize lint clean

help:
	@echo "make book   run every notebook, build the site into site/, end with a table of what was proved and checked"
	@echo "make test   all tests: the suite and, beside it, the kernels, of whose cases some are left to make kernels"
	@echo "make suite  the notebooks and everything that needs no Triton: pytest --nbval"
	@echo "make kernels    the Triton kernels, interpreted and compiled for four architectures, under Triton $(TRITONS)"
	@echo "make kernels-$(BENCHED)  the same under the release that the README's times are of, or under any other"
	@echo "make sanitize   on a machine with a GPU and CUDA: kernel tests under compute-sanitizer, for reads out of bounds"
	@echo "make lab    open the book in JupyterLab"
	@echo "make site   the site alone, from the committed outputs"
	@echo "make lint   ruff over code and notebooks"
	@echo "make clean  remove site/ and build/ (.venv stays)"
	@echo
	@echo "The first of them makes $(VENV) and installs the tested versions (constraints.txt); later ones find it there."
	@echo "Another interpreter: make book PYTHON=python3.12"

$(RUN):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("needs Python 3.10 or later; $(PYTHON) is %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(RUN)
	@echo "installing into $(VENV), once; some minutes, for torch is large"
	@$(RUN) -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

book: $(STAMP)
	@$(RUN) notebooks/build.py

site: $(STAMP)
	@$(RUN) notebooks/build.py --site-only

lab: $(STAMP)
	@$(RUN) -m jupyter lab --notebook-dir=. notebooks

# Two at a time, the longest first. The suite prints as it goes, the kernels, which have a log, when they are through.
test: $(STAMP) $(KERNELS:kernels-%=$(VENV)/triton-%)
	@$(MAKE) --no-print-directory -j2 --keep-going LOG=log KERNELS_FOR_3.9.0=short TESTS_FOR_3.4.0=tests/test_compile.py $(firstword $(KERNELS)) suite $(wordlist 2,9,$(KERNELS))
	$(if $(KERNELS),,@echo "Triton is made for Linux on x86-64: no kernel was tested here")

suite: $(STAMP)
	@$(RUN) -m pytest --nbval $(KERNEL_TESTS:%=--ignore=%)

kernels: $(TRITONS:%=kernels-%)

sanitize: $(STAMP)
	@$(RUN) tests/sanitizing.py

kernels-%: $(STAMP) | $(VENV)/triton-%
	@echo "kernels under Triton $*"
	@GDN_REF_KERNELS=$(KERNELS_FOR_$*) PYTHONPATH=$(CURDIR)/$(VENV)/triton-$* $(RUN) -m pytest $(or $(TESTS_FOR_$*),$(KERNEL_TESTS) $(PARTLY) -k "test_kernels or test_compile.py or triton or kernels") \
	    $(if $(LOG),>$(VENV)/triton-$*.log 2>&1; passed=$$?; cat $(VENV)/triton-$*.log; exit $$passed)

# Empty where .venv itself has that version.
.PRECIOUS: $(VENV)/triton-%
$(VENV)/triton-%: | $(STAMP)
	@if [ "$$($(RUN) -c 'from importlib.metadata import version; print(version("triton"))' 2>&1)" = $* ]; then mkdir $@; else \
	    echo "installing Triton $* beside $(VENV), once"; rm -rf $@.part; \
	    $(RUN) -m pip install --quiet --quiet --disable-pip-version-check --no-deps --target $@.part \
	        triton==$* $(NUMPY_FOR_$*) && mv $@.part $@; fi

lint: $(STAMP)
	@$(RUN) -m ruff check .

clean:
	@rm -rf site build
