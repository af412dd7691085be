"""Fails before MindSpore is asked for anything, on rank 1 only."""
import os

if os.environ["RANK_ID"] == "1":
    import a_module_that_is_not_there  # noqa: F401

import no_init  # noqa: F401
