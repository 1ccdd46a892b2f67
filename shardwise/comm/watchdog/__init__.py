"""The watchdog: why a rank is waiting, and the error that ends a wait that would never end."""
