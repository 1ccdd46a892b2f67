"""Examples of arithmetic may take their time on a busy machine: each test has its own limit already."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
