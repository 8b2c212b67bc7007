"""A cohort: clients whose tensors are stacked, so that a method's functions are called once for all of them."""
