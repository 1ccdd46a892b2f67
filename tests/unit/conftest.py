"""Examples of arithmetic may take their time on a busy machine: each test has its own limit already."""

from importlib.util import find_spec

# A machine that brings its own torch may lack it; tests that need it say so themselves.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
