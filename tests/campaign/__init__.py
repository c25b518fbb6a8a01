"""Attacks on the program: what it promises, tried at random, with faults that are seen to have happened.

`python -m tests.campaign` (`make campaign`) tries class after class for as long as it is given; `test_campaign.py`
tries a few seeds of each. A class is a module with `attempt(random, scene)`, which returns where the promise held, and
raises Broken where it did not, or Missed where the fault did not happen.
"""
