"""Cohorts: clients for which the functions of a method are called once, with a slice for each client in every tensor."""
