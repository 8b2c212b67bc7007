"""Federations over a real network, with Flower."""

import os as _os

# Flower reads this when it is imported; who wants its telemetry sets it to 1
_os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
_os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
