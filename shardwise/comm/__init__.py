"""Communication between ranks: process groups, channels, streams, the watchdog. Nothing here knows a module."""
