"""Tests against the vendors' own signatures and packages."""
