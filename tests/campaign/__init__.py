"""Random fault injection: attempts to break what weft promises, each with a check that the fault happened.

`python -m tests.campaign` (`make campaign`) runs attempts of all classes for a given time; `test_campaign.py` runs a
few seeds of each class. A class is a module with `attempt(random, scene)`, which returns if weft kept its promise, and
raises Broken if it did not, or Missed if the fault did not happen.
"""
