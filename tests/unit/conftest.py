"""Examples of arithmetic may take their time on a busy machine: each test has its own limit already."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
