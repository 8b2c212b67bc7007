"""Tests of the files of a report."""
