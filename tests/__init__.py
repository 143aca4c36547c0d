"""Tests of lightning_moe; folders are tiers (see conftest.py)."""
