"""What the server's process answers, and to whom; run by :mod:`..deploy.guard` within Flower's SuperLink."""
