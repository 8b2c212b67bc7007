"""Tables and drawings of the result pages; `docs/evidence.py` and `docs/league.py` write them."""
