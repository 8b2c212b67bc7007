"""Protection of a site from the server: signed orders, limits, and an audit log of its own."""
