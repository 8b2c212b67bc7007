"""Observation and operation of a run over a network: waiting, activity, falls of validation, a site's policy."""
