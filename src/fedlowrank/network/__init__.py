"""Federations over a real network, with Flower."""

import os as _os

# Flower reads this variable when it is imported; set it to 1 to enable Flower's telemetry
_os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
_os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
