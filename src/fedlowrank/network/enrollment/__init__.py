"""Keys that sites make themselves: requests, their acceptance, and the roster that all sites compare."""
