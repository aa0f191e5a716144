import harness
from hypothesis import settings

settings.register_profile("deepsp", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("deepsp")


def pytest_sessionfinish():
    harness.stop_all()
