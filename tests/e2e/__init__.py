"""See tests/conftest.py for what a tier is."""
