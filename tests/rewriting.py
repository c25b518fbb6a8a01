"""Execution of the asserts of helpers under python -O, which leaves out all asserts that pytest has not rewritten.

Import it before any helper. It also serves the process that ranks are forked from, in which pytest does not run.
"""

from __future__ import annotations

import sys

import pytest
from _pytest.assertion import install_importhook
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import get_config

HELPERS = ("tests.lib", "tests.campaign", "tests.data.sampling.reference", "tests.reporting.folders")
"""Modules and packages with asserts, next to the test modules themselves."""

if not __debug__ and not any(isinstance(finder, AssertionRewritingHook) for finder in sys.meta_path):
    install_importhook(get_config())
pytest.register_assert_rewrite(*HELPERS)
