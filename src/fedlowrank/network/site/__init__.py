"""What a site does to protect itself from the server: signed orders, limits, and an audit log of its own."""
