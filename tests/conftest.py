import os

import harness
from hypothesis import settings

# A compiled graph from an earlier run would hide what the code does now.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

settings.register_profile("deepsp", deadline=None, max_examples=40, derandomize=True)
# pytest --hypothesis-profile=long tests/test_fuzz.py
settings.register_profile("long", deadline=None, max_examples=4000)
settings.load_profile("deepsp")


def pytest_sessionfinish():
    harness.stop_all()
