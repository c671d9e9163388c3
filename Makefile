# gdn_ref: `make` alone says what there is. Needs Python 3.10 or later and make; everything else goes into .venv.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
EXTRAS := notebooks,test,site,dev

.DEFAULT_GOAL := help
.PHONY: help book site lab test lint clean

help:
	@echo "make book   run every notebook, build the site into site/, end with a table of what was proved and checked"
	@echo "make test   the whole test suite, notebooks included"
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

test: $(STAMP)
	@$(RUN) -m pytest --nbval

lint: $(STAMP)
	@$(RUN) -m ruff check .

clean:
	@rm -rf site build
