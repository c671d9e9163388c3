"""The check: any Gated DeltaNet implementation held against the float64 definition, property by property.

    python -m gdn_ref check                     this package, on this machine
    python -m gdn_ref check --impl package.module:function
    python -m gdn_ref vectors DIR               test vectors for ports in other languages

records.py says what an implementation, a property and a verdict are; cases.py makes inputs and holds the definition;
probe.py is what a property asks with; forward.py, states.py, backward.py, surroundings.py and pools.py are the
properties; adapters.py meets everybody's signatures; suite.py runs, report.py prints, vectors.py writes test vectors.
"""
