"""Processes of their own on one GPU: a cold start compiles once a key, and all compute the same."""

import os

from tests import cold_start


def test_a_cold_start_of_eight_processes_compiles_once_a_key(tmp_path):
    said = cold_start.together(8, {**os.environ, "CUTE_FLASH_CACHE_DIR": str(tmp_path)})
    cold_start.check(said, tmp_path)
